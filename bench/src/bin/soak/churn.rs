//! Pods and policies that come and go, with probes that verify policy.

use std::net::IpAddr;
use std::time::Duration;

use anyhow::Result;
use penstock_bench::probe::{self, ProbeOutcome, Protocol, RetryPolicy, Site};

use crate::fixture::{Fixture, pod, policy};

const POLICY: Duration = Duration::from_millis(250);
/// How long the churned pod exists, and how long it does not.
const POD: Duration = Duration::from_millis(1500);
const PROBE: Duration = Duration::from_millis(500);
/// The churned pod, and the last part of its addresses.
const NAME: &str = "passing";
const NUMBER: u8 = 77;

pub(crate) struct Churn {
    next_policy: Duration,
    next_pod: Duration,
    next_probe: Duration,
    pod_is_there: bool,
    pub(crate) policies: u32,
    pub(crate) pods: u32,
    pub(crate) probes: u32,
    /// Wrong results: from when to when, and what.
    pub(crate) wrong: Vec<(Duration, Duration, String)>,
}

const ASKED: [(&str, &str, Protocol, ProbeOutcome); 5] = [
    ("test/pod-0", "test/pod-1", Protocol::Tcp(8080), ProbeOutcome::Reached),
    ("test/pod-2", "test/pod-1", Protocol::Tcp(8080), ProbeOutcome::Silent),
    ("test/pod-3", "test/pod-2", Protocol::Udp(53), ProbeOutcome::Reached),
    ("test/pod-4", "node", Protocol::Icmp, ProbeOutcome::Reached),
    ("test/pod-5", "test/pod-1", Protocol::Icmp, ProbeOutcome::Silent),
];

impl Churn {
    pub(crate) fn new() -> Self {
        let start = Duration::ZERO;
        Self {
            next_policy: start,
            next_pod: start,
            next_probe: start,
            pod_is_there: false,
            policies: 0,
            pods: 0,
            probes: 0,
            wrong: Vec::new(),
        }
    }

    pub(crate) fn step(&mut self, fixture: &mut Fixture) -> Result<()> {
        let now = fixture.epoch.elapsed();
        if now >= self.next_policy {
            self.policies += 1;
            fixture.save("policy.yaml", &policy(1 + (self.policies % 60_000) as u16))?;
            self.next_policy = now + POLICY;
        }
        if now >= self.next_probe {
            let (from, to, protocol, expected) = ASKED[self.probes as usize % ASKED.len()];
            let (site, v6) = (fixture.site(from)?.clone(), self.probes.is_multiple_of(2));
            self.ask(fixture, &site, (to, v6), protocol, expected)?;
            self.next_probe = now + PROBE;
        }
        if now >= self.next_pod {
            self.turn_pod(fixture)?;
            self.next_pod = fixture.epoch.elapsed() + POD;
        }
        Ok(())
    }

    /// Creates the pod, or probes it and removes it.
    fn turn_pod(&mut self, fixture: &mut Fixture) -> Result<()> {
        let full = format!("test/{NAME}");
        if self.pod_is_there {
            let site = Site::from(fixture.cluster.node.pod(&full)?);
            self.ask(fixture, &site, ("test/pod-3", false), Protocol::Tcp(8080), ProbeOutcome::Reached)?;
            self.ask(fixture, &site, ("test/pod-1", true), Protocol::Udp(53), ProbeOutcome::Silent)?;
            fixture.cluster.node.remove_pod(&full)?;
            fixture.remove("passing.yaml")?;
        } else {
            let addresses: [IpAddr; 2] =
                [format!("10.244.1.{NUMBER}").parse()?, format!("fd00:10:244:1::{NUMBER}").parse()?];
            fixture.cluster.node.add_pod(&full, &addresses)?;
            fixture.save("passing.yaml", &pod(NAME, NUMBER))?;
            self.pods += 1;
        }
        self.pod_is_there = !self.pod_is_there;
        Ok(())
    }

    fn ask(
        &mut self,
        fixture: &Fixture,
        from: &Site,
        (to, v6): (&str, bool),
        protocol: Protocol,
        expected: ProbeOutcome,
    ) -> Result<()> {
        let start = fixture.epoch.elapsed();
        let target = (fixture.cluster.site(to)? as u32, fixture.address(to, v6, 0)?.ip());
        // A denied probe needs no retries.
        let attempts = if expected == ProbeOutcome::Silent { 1 } else { 4 };
        let patience = RetryPolicy { attempts, ..RetryPolicy::default() };
        let outcome = probe::run_one(from, target, protocol, patience)?;
        self.probes += 1;
        if outcome != expected {
            let what = format!("{protocol} from {} to {to} (IPv6: {v6}): {outcome}, not {expected}", from.name);
            self.wrong.push((start, fixture.epoch.elapsed(), what));
        }
        Ok(())
    }

    pub(crate) fn end(&mut self, fixture: &mut Fixture) -> Result<()> {
        if self.pod_is_there {
            self.turn_pod(fixture)?;
        }
        Ok(())
    }
}
