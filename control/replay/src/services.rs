//! Connections to Services: which backend they get, and which side of the translation a capture shows.
//!
//! A worker chooses at random, and a capture seldom shows what it chose. So that results do not depend on chance:
//!
//! 1. Where the captures show a packet of the client's port on its way to a backend, that backend counts.
//! 2. Otherwise affinity, where the Service has it and the client was given a backend before.
//! 3. Otherwise policy is evaluated for each backend that the connection may get, and the first one that it denies is taken;
//!    if it denies none, the first of all. What passes would pass whichever backend is chosen.
//!
//! A packet is captured before its translation or after it. A worker receives it before: what a capture shows after it is turned
//! back, by the connection table, and enters where a worker would have received it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ipnet::IpNet;
use penstock_dataplane::names::NameTime;
use penstock_dataplane::packet::{Address, Flow, Packet, Protocol, parse};
use penstock_dataplane::pipeline::evaluate_backend;
use penstock_dataplane::policy::PolicySet;
use penstock_dataplane::services::{Backend, Frontend};
use rustc_hash::{FxHashMap, FxHashSet};
use serde::Serialize;

use super::capture::{CaptureError, Captures, Time};
use super::truncated::fill_up;

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ServiceReading {
    /// Whether they are translated as workers do with `services.enabled`; otherwise the node's kernel does it, and egress policy is for
    /// what answers, in the packets behind the translation.
    pub translates: bool,
    /// The blocks of cluster addresses, as the setting `service_cidrs`.
    pub blocks: Vec<IpNet>,
}

type ClientPort = (Address, u16, Protocol);

/// Backends that captures show: what a client's port that sends to a Service sends to other addresses.
#[derive(Debug, Default)]
pub(super) struct ShownBackends(FxHashMap<ClientPort, Vec<(Time, Backend)>>);

impl ShownBackends {
    /// Reads captures for what ports that send to one of these addresses send elsewhere. A capture that is no regular file can be
    /// read only once, and shows nothing.
    pub(super) fn read(captures: &[PathBuf], services: &FxHashSet<Address>) -> Result<Self, CaptureError> {
        let is_regular = |path: &Path| path.metadata().is_ok_and(|file| file.is_file());
        if services.is_empty() || !captures.iter().all(|path| is_regular(path)) {
            return Ok(Self::default());
        }
        let (mut captures, mut shown, mut frame) = (Captures::open(captures)?, Self::default(), Vec::new());
        while let Some(record) = captures.next(&mut frame)? {
            if record.captured < record.original {
                fill_up(0, record.captured, record.original, &mut frame);
            }
            if let Ok(packet) = parse(&frame) {
                shown.note(record.time, &packet.flow, services);
            }
            frame.clear();
        }
        shown.0.retain(|_, backends| !backends.is_empty());
        Ok(shown)
    }

    fn note(&mut self, time: Time, flow: &Flow, services: &FxHashSet<Address>) {
        if !flow.protocol.has_ports() {
            return;
        }
        let client = (flow.src, flow.src_port, flow.protocol);
        if services.contains(&flow.dst) {
            self.0.entry(client).or_default();
        } else if let Some(backends) = self.0.get_mut(&client) {
            let backend = Backend { address: flow.dst, port: flow.dst_port };
            if backends.last().is_none_or(|(_, last)| *last != backend) {
                backends.push((time, backend));
            }
        }
    }

    /// The first backend of the frontend that the captures show from this time on.
    fn find(&self, time: Time, flow: &Flow, frontend: &Frontend) -> Option<Backend> {
        let shown = self.0.get(&(flow.src, flow.src_port, flow.protocol))?;
        let later = shown.iter().filter(|(at, _)| *at >= time).map(|(_, backend)| *backend);
        // The last one before goes on until another one is shown.
        let before = shown.iter().rev().find(|(at, _)| *at < time).map(|(_, backend)| *backend);
        later.chain(before).find(|backend| frontend.may_choose(backend))
    }
}

/// The backend of a connection to a Service, and what policy says of each that it may get.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct BackendChoice {
    /// The packet's place in its batch.
    pub(super) index: usize,
    pub(super) flow: Flow,
    /// The Service's port.
    pub(super) service: Arc<str>,
    pub(super) backend: Backend,
    /// How many it may get.
    pub(super) backends: usize,
    /// Those of them that policy denies.
    pub(super) denied: Vec<Backend>,
}

impl BackendChoice {
    /// Chooses for the client's first packet at `time`; `last` is the backend that affinity asks for.
    pub(super) fn new(
        (index, time): (usize, Time),
        (flow, frontend): (&Flow, &Frontend),
        last: Option<Backend>,
        (shown, policy): (&ShownBackends, &PolicySet),
        now: NameTime,
    ) -> Option<Self> {
        let is_denied = |backend: &&Backend| !evaluate_backend(policy, flow, backend, now).is_allowed();
        let denied: Vec<Backend> = frontend.backends.iter().filter(is_denied).copied().collect();
        let first = denied.first().or_else(|| frontend.backends.first()).copied();
        let backend = shown.find(time, flow, frontend).or(last).or(first)?;
        let (service, backends) = (Arc::clone(&frontend.name), frontend.backends.len());
        Some(Self { index, flow: *flow, service, backend, backends, denied })
    }

    pub(super) fn reach(&self) -> Reach {
        match self.denied.len() {
            0 => Reach::Allow,
            denied if denied == self.backends => Reach::Deny,
            _ => Reach::Partial,
        }
    }
}

/// The verdict of policy on the backends of a Service.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Reach {
    Allow,
    /// It allows none.
    Deny,
    /// It allows some.
    Partial,
}

impl Reach {
    /// Its name in JSON.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Allow => "allow",
            Self::Deny => "deny",
            Self::Partial => "partial",
        }
    }
}

/// The connections to a port of a Service, by what policy says of the backends that each might have got.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct ServiceCount {
    /// The port: `shop/api:http`.
    pub service: String,
    pub allow: u64,
    /// Connections that it allows to none.
    pub deny: u64,
    /// Connections that it allows to some.
    pub partial: u64,
    /// Those of the last kind, by client.
    pub partly_denied: Vec<PartlyDenied>,
}

/// A client that policy allows only some backends of a Service.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
pub struct PartlyDenied {
    /// The client: a pod, or an address.
    pub client: String,
    pub backends: usize,
    /// Those of them that policy denies it: pods or addresses, without their port.
    pub denied: Vec<String>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct ServiceCounters(std::collections::BTreeMap<Arc<str>, ServiceCount>);

impl ServiceCounters {
    /// Counts a connection, or an attempt that was denied. `name` names an address.
    pub(super) fn count(&mut self, choice: &BackendChoice, name: impl Fn(Address) -> String) {
        let count = self
            .0
            .entry(Arc::clone(&choice.service))
            .or_insert_with(|| ServiceCount { service: choice.service.to_string(), ..ServiceCount::default() });
        match choice.reach() {
            Reach::Allow => count.allow += 1,
            Reach::Deny => count.deny += 1,
            Reach::Partial => {
                count.partial += 1;
                let denied = choice.denied.iter().map(|backend| name(backend.address)).collect();
                let partly = PartlyDenied { client: name(choice.flow.src), backends: choice.backends, denied };
                if let Err(place) = count.partly_denied.binary_search(&partly) {
                    count.partly_denied.insert(place, partly);
                }
            }
        }
    }

    /// The counts, by name.
    pub(super) fn counts(&self) -> Vec<ServiceCount> {
        self.0.values().cloned().collect()
    }
}

/// Datagrams whose first fragment was captured behind its translation: the later ones have no ports to find their connection by.
#[derive(Debug, Default)]
pub(super) struct TurnedDatagrams(FxHashMap<(Address, Address, Protocol, u32), Flow>);

/// Datagrams that are kept; all are forgotten when there are more.
const DATAGRAMS_KEPT: usize = 4096;

impl TurnedDatagrams {
    /// Notes a first fragment that a worker received with this flow.
    pub(super) fn note(&mut self, packet: &Packet, received: Flow) {
        let Some(fragment) = packet.fragment.filter(|fragment| fragment.is_first()) else { return };
        if self.0.len() >= DATAGRAMS_KEPT {
            self.0.clear();
        }
        self.0.insert((packet.flow.src, packet.flow.dst, packet.flow.protocol, fragment.id()), received);
    }

    /// With which flow a worker received a later fragment.
    pub(super) fn find(&self, packet: &Packet) -> Option<Flow> {
        let fragment = packet.fragment.filter(|fragment| !fragment.is_first())?;
        self.0.get(&(packet.flow.src, packet.flow.dst, packet.flow.protocol, fragment.id())).copied()
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use penstock_dataplane::services::WithoutBackend;

    use super::*;

    fn end(text: &str) -> (Address, u16) {
        let (address, port) = text.rsplit_once(':').unwrap();
        (address.parse::<IpAddr>().unwrap().into(), port.parse().unwrap())
    }

    fn flow(from: &str, to: &str) -> Flow {
        let ((src, src_port), (dst, dst_port)) = (end(from), end(to));
        Flow { src, dst, src_port, dst_port, protocol: Protocol::TCP }
    }

    #[test]
    fn the_shown_backend_is_the_next_of_the_clients_port() {
        let (client, service) = ("10.0.0.1:4000", "10.96.0.1:80");
        let services = [end(service).0].into_iter().collect();
        let backend = |text| {
            let (address, port) = end(text);
            Backend { address, port }
        };
        let backends: Arc<[Backend]> = ["10.0.0.2:80", "10.0.0.3:80"].map(backend).into();
        let serving = Arc::clone(&backends);
        let without = WithoutBackend::Refused;
        let frontend = Frontend { name: "shop/api".into(), backends, serving, without, affinity: None };
        let mut shown = ShownBackends::default();
        for (second, from, to) in [
            // Before the client's port has sent to a Service, and from another port: no backend of its connection.
            (1, client, "10.0.0.3:80"),
            (2, client, service),
            (3, client, "10.0.0.2:80"),
            (4, "10.0.0.1:4001", "10.0.0.3:80"),
            (5, client, "192.0.2.1:80"),
            (6, client, service),
            (7, client, "10.0.0.3:80"),
        ] {
            shown.note(Time(second), &flow(from, to), &services);
        }
        for (from, at, expected) in [
            (client, 2, Some("10.0.0.2:80")),
            (client, 4, Some("10.0.0.3:80")),
            (client, 6, Some("10.0.0.3:80")),
            (client, 9, Some("10.0.0.3:80")),
            ("10.0.0.1:4001", 2, None),
        ] {
            let found = shown.find(Time(at), &flow(from, service), &frontend);
            assert_eq!(found, expected.map(backend), "{from} at {at}");
        }
    }
}
