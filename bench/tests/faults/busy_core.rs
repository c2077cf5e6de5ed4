//! A worker that shares its core with another process.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use penstock_bench::load::Generator;

use crate::faults::restarts::thread_named;
use crate::fixture::{Fixture, pods};
use crate::forger::Forger;

/// A process in its own session that spins on one core until it is dropped.
struct BusyProcess(Child);

impl BusyProcess {
    fn on(core: &str) -> Self {
        let mut command = Command::new("setsid");
        command.args(["taskset", "-c", core, "sh", "-c", "while :; do :; done"]).stdout(Stdio::null());
        Self(command.spawn().unwrap())
    }

    /// Time it ran, and time it waited for the core.
    fn times(&self) -> (Duration, Duration) {
        times(&format!("/proc/{}/schedstat", self.0.id()))
    }
}

impl Drop for BusyProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn times(schedstat: &str) -> (Duration, Duration) {
    let text = std::fs::read_to_string(schedstat).unwrap();
    let mut numbers = text.split_whitespace().map(|number| Duration::from_nanos(number.parse().unwrap()));
    (numbers.next().unwrap(), numbers.next().unwrap())
}

#[test]
fn a_realtime_worker_does_not_wait_for_a_busy_process() {
    let fixture = Fixture::of(&pods(2), |_, config| {
        // All packets through the worker.
        config.offload = false;
        config.sections += "[workers]\npriority = \"realtime\"\n";
    });
    let (daemon, worker) = (fixture.daemon.id(), thread_named(fixture.daemon.id(), "worker-0"));
    let status = std::fs::read_to_string(format!("/proc/{daemon}/task/{worker}/status")).unwrap();
    let core = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap().trim();
    let computing = BusyProcess::on(core);
    let address = |name: &str| fixture.site(name).address(false).unwrap();
    let frame = Forger::of(&fixture, "test/pod-0").udp((address("test/pod-0"), 1000), (address("test/pod-1"), 9), b"");
    let generator = fixture.site("test/pod-0").namespace.run(|| Generator::open("eth0")).unwrap();
    let of_worker = || times(&format!("/proc/{daemon}/task/{worker}/schedstat"));
    let (before, computed) = (of_worker(), computing.times());
    let sent = generator.send(&frame, 200_000, Duration::from_micros(500)).unwrap();
    let (after, computed) = (of_worker(), computing.times().0 - computed.0);
    let (ran, waited) = (after.0 - before.0, after.1 - before.1);
    println!("{sent} packets: the worker ran {ran:?} and waited {waited:?}; the other process ran {computed:?}");
    assert!(sent >= 200_000 && ran > Duration::from_millis(50) && computed > Duration::from_millis(50));
    // Another test's worker may be on the core too, at the same priority.
    assert!(waited < ran / 2, "it waited {waited:?} to run {ran:?}");
}
