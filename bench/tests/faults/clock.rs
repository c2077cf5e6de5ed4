//! Setting the wall clock does not affect connections.

use std::net::{SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::time::Duration;

use penstock_bench::probe::EchoConnection;
use penstock_bench::testbed::ScratchDir;

use crate::fixture::{Fixture, pods, policy};

/// Timeout of an idle connection in this test.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Seconds of a day.
const DAY: i64 = 86_400;
const RECEIVE_TIMEOUT: Duration = Duration::from_millis(800);

/// The library that shows a process another time than the machine's, from Debian's package `faketime`.
fn library() -> PathBuf {
    let directories = ["x86_64-linux-gnu", "aarch64-linux-gnu"];
    let paths = directories.map(|name| Path::new("/usr/lib").join(name).join("faketime/libfaketimeMT.so.1"));
    paths.into_iter().find(|path| path.exists()).expect("faketime is installed (make setup)")
}

/// The daemon's wall clock, offset as written to a file. Its monotonic clock is the machine's.
struct WallClock(PathBuf);

impl WallClock {
    fn new(scratch: &ScratchDir) -> Self {
        let wall = Self(scratch.path().join("clock"));
        wall.set(0);
        wall
    }

    fn set(&self, seconds: i64) {
        let new = self.0.with_extension("new");
        std::fs::write(&new, format!("{seconds:+}")).unwrap();
        std::fs::rename(new, &self.0).unwrap();
    }

    fn environment(&self) -> Vec<(String, String)> {
        [
            ("LD_PRELOAD", library().display().to_string()),
            ("FAKETIME_TIMESTAMP_FILE", self.0.display().to_string()),
            ("FAKETIME_NO_CACHE", "1".to_owned()),
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1".to_owned()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into()
    }
}

/// A query from `pod-0` to `pod-1`; returns the server's end of the connection.
fn ask(fixture: &Fixture, number: u16) -> (UdpSocket, UdpSocket, SocketAddr) {
    let open = |name: &str, port: u16| {
        let site = fixture.site(name);
        let socket = site.namespace.udp((site.address(false).unwrap(), port)).unwrap();
        socket.set_read_timeout(Some(RECEIVE_TIMEOUT)).unwrap();
        socket
    };
    let (client, server) = (open("test/pod-0", 30_000 + number), open("test/pod-1", 7000 + number));
    client.send_to(b"question", server.local_addr().unwrap()).unwrap();
    let from = server.recv_from(&mut [0; 16]).unwrap().1;
    (client, server, from)
}

/// The time of day that the daemon logs when it publishes, in seconds.
fn logged_time(fixture: &Fixture, number: u16) -> i64 {
    let seen = fixture.daemon.log().len();
    let changed = policy("changes", "pod-1", &format!("  ingress: [{{}}, {{ports: [{{port: {}}}]}}]\n", 1 + number));
    fixture.save("changes.yaml", changed.trim_start_matches("---\n"));
    let line = fixture.daemon.log().wait_for_after(seen, "published", Duration::from_secs(5)).unwrap();
    let time = line.split_once('T').unwrap().1;
    let part = |at: usize| time[at..at + 2].parse::<i64>().unwrap();
    part(0) * 3600 + part(3) * 60 + part(6)
}

#[test]
fn setting_the_wall_clock_by_an_hour_does_not_affect_timeouts() {
    let scratch = ScratchDir::new().unwrap();
    let wall = WallClock::new(&scratch);
    let fixture = Fixture::of(&(pods(2) + &policy("asks", "pod-0", "  ingress: []\n")), |_, config| {
        config.environment = wall.environment();
        config.conntrack += "timeouts = { udp_timeout = \"2s\", udp_timeout_stream = \"2s\" }\n";
    });
    let flow = EchoConnection::open(
        &fixture.site("test/pod-0").namespace,
        fixture.target("test/pod-1", false),
        8080,
        Duration::from_secs(5),
    )
    .unwrap();
    let mut before = logged_time(&fixture, 0);
    for (number, step, moves) in [(1, 3600, 3600), (2, -3600, -7200)] {
        let (client, server, from) = ask(&fixture, number);
        wall.set(step);
        let now = logged_time(&fixture, number);
        let moved = (now - before - moves).rem_euclid(DAY);
        assert!(moved < 60, "the daemon's clock was set: it says {now} s, and said {before} s before");
        before = now;
        server.send_to(b"answer", from).unwrap();
        client.recv(&mut [0; 16]).expect("the connection is there");
        flow.wait_for(100, Duration::from_secs(30)).unwrap();
        std::thread::sleep(2 * TIMEOUT + Duration::from_millis(500));
        server.send_to(b"late", from).unwrap();
        assert!(client.recv(&mut [0; 16]).is_err(), "it has ended after {TIMEOUT:?}, whatever the clock says");
    }
}
