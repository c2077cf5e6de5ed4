//! Services: where a packet to a cluster address goes.
//!
//! A [`ServiceSet`] maps each frontend (cluster address, protocol, port) to the backends that may be chosen for a new
//! connection. Which these are is decided before, per node: the packet path only chooses one of them. A set is immutable
//! and shares with the set before all that did not change: an update copies one of many shards.

use std::fmt;
use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHasher};
use std::hash::{Hash, Hasher};

use crate::packet::{Address, Protocol};

/// One end of a connection: an address and a port.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct Backend {
    pub address: Address,
    pub port: u16,
}

/// The cluster address and port of a Service's port.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct FrontendKey {
    /// The cluster address.
    pub address: Address,
    /// TCP, UDP or SCTP.
    pub protocol: Protocol,
    /// The Service's port.
    pub port: u16,
}

/// The fate of a packet that opens a connection to a frontend without a backend.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum WithoutBackend {
    /// Refused: by a RST for TCP, otherwise by an ICMP error. There is no backend anywhere.
    #[default]
    Refused,
    /// Dropped. There are backends, and none that this node may use.
    Dropped,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Affinity {
    /// Identifies the Service's port. It is the same at each of the Service's addresses and for every process.
    pub id: u64,
    /// For so long after the client's last new connection.
    pub seconds: u32,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Frontend {
    /// The name of the Service's port, for display: `shop/api:http`.
    pub name: Arc<str>,
    /// Those that a new connection may get, sorted, each once.
    pub backends: Arc<[Backend]>,
    /// All that serve, wherever they are and whether they take new connections or not; sorted, each once.
    pub serving: Arc<[Backend]>,
    /// The fate of packets without [`Frontend::backends`].
    pub without: WithoutBackend,
    pub affinity: Option<Affinity>,
}

impl Frontend {
    pub fn may_choose(&self, backend: &Backend) -> bool {
        self.backends.binary_search(backend).is_ok()
    }

    pub fn is_serving(&self, backend: &Backend) -> bool {
        self.serving.binary_search(backend).is_ok()
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Destination<'a> {
    NotService,
    /// A Service has the address, and none has this port there.
    NoSuchPort,
    Frontend(&'a Arc<Frontend>),
}

type PortOfAddress = (Protocol, u16, Arc<Frontend>);
type Shard = FxHashMap<Address, Arc<[PortOfAddress]>>;

/// A change copies one shard: about ten addresses at 10,000 Services.
const SHARDS: usize = 1024;

/// The frontends of all Services at one time. Immutable, cheap to clone; the default has none.
#[derive(Clone, Default)]
pub struct ServiceSet {
    shards: Option<Arc<[Arc<Shard>; SHARDS]>>,
    frontends: usize,
}

impl ServiceSet {
    pub fn find(&self, address: Address, protocol: Protocol, port: u16) -> Destination<'_> {
        let Some(shards) = &self.shards else { return Destination::NotService };
        match shards[shard_of(address)].get(&address) {
            None => Destination::NotService,
            Some(ports) => ports
                .iter()
                .find(|(of, number, _)| (*of, *number) == (protocol, port))
                .map_or(Destination::NoSuchPort, |(.., frontend)| Destination::Frontend(frontend)),
        }
    }

    pub fn frontend(&self, key: &FrontendKey) -> Option<&Arc<Frontend>> {
        match self.find(key.address, key.protocol, key.port) {
            Destination::Frontend(frontend) => Some(frontend),
            Destination::NoSuchPort | Destination::NotService => None,
        }
    }

    /// Sets or removes a frontend. What does not differ stays shared.
    pub fn set(&mut self, key: FrontendKey, frontend: Option<Arc<Frontend>>) {
        if self.frontend(&key) == frontend.as_ref() {
            return;
        }
        let shards = self.shards.get_or_insert_with(|| Arc::new(std::array::from_fn(|_| Arc::default())));
        let shard = Arc::make_mut(&mut Arc::make_mut(shards)[shard_of(key.address)]);
        let before = shard.get(&key.address).map(|ports| &**ports).unwrap_or_default();
        let others = before.iter().filter(|(protocol, port, _)| (*protocol, *port) != (key.protocol, key.port));
        let after: Arc<[PortOfAddress]> =
            others.cloned().chain(frontend.map(|frontend| (key.protocol, key.port, frontend))).collect();
        self.frontends = self.frontends + after.len() - before.len();
        if after.is_empty() {
            shard.remove(&key.address);
        } else {
            shard.insert(key.address, after);
        }
    }

    /// All frontends, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (FrontendKey, &Arc<Frontend>)> {
        self.shards.iter().flat_map(|shards| shards.iter()).flat_map(|shard| {
            shard.iter().flat_map(|(&address, ports)| {
                ports.iter().map(move |(protocol, port, frontend)| {
                    (FrontendKey { address, protocol: *protocol, port: *port }, frontend)
                })
            })
        })
    }

    /// Whether this is an unchanged copy of the other set. Two sets that became equal by changes are not.
    pub fn is_same(&self, other: &Self) -> bool {
        match (&self.shards, &other.shards) {
            (Some(own), Some(other)) => Arc::ptr_eq(own, other),
            (None, None) => true,
            _ => false,
        }
    }

    pub fn len(&self) -> usize {
        self.frontends
    }

    pub fn is_empty(&self) -> bool {
        self.frontends == 0
    }
}

impl PartialEq for ServiceSet {
    fn eq(&self, other: &Self) -> bool {
        self.frontends == other.frontends
            && self.iter().all(|(key, frontend)| other.frontend(&key).is_some_and(|found| found == frontend))
    }
}

impl fmt::Debug for ServiceSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

fn shard_of(address: Address) -> usize {
    let mut hasher = FxHasher::default();
    address.hash(&mut hasher);
    (hasher.finish() >> 32) as usize % SHARDS
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key(number: u32) -> FrontendKey {
        let protocol = if number.is_multiple_of(3) { Protocol::UDP } else { Protocol::TCP };
        let address = Address::from_v4_bytes((0x0a60_0000 + number / 4).to_be_bytes());
        FrontendKey { address, protocol, port: 80 + (number % 4) as u16 }
    }

    fn frontend(number: u16) -> Arc<Frontend> {
        let backends: Arc<[Backend]> = [Backend { address: Address::default(), port: number }].into();
        let serving = backends.clone();
        Arc::new(Frontend {
            name: "shop/api".into(),
            backends,
            serving,
            without: WithoutBackend::Refused,
            affinity: None,
        })
    }

    proptest! {
        #[test]
        fn agrees_with_a_map_under_any_history(
            steps in prop::collection::vec((0u32..60, prop::option::weighted(0.7, 1u16..4)), 0..300),
        ) {
            let (mut set, mut map) = (ServiceSet::default(), FxHashMap::default());
            let mut copy = (set.clone(), map.clone());
            for (index, (number, value)) in steps.into_iter().enumerate() {
                set.set(key(number), value.map(frontend));
                match value {
                    Some(value) => map.insert(number, value),
                    None => map.remove(&number),
                };
                if index == 100 {
                    copy = (set.clone(), map.clone());
                }
            }
            for (set, map) in [(set, map), copy] {
                prop_assert_eq!(set.len(), map.len());
                prop_assert_eq!(set.iter().count(), map.len());
                for number in 0..60 {
                    let expected = map.get(&number).map(|value| frontend(*value));
                    prop_assert_eq!(set.frontend(&key(number)), expected.as_ref());
                    let FrontendKey { address, protocol, .. } = key(number);
                    let is_known = map.keys().any(|other| key(*other).address == address);
                    let expected = if is_known { Destination::NoSuchPort } else { Destination::NotService };
                    prop_assert_eq!(set.find(address, protocol, 9), expected);
                }
            }
        }
    }

    #[test]
    fn a_change_of_one_service_copies_one_shard() {
        let mut set = ServiceSet::default();
        (0..20_000).for_each(|number| set.set(key(number), Some(frontend(1))));
        let before = set.clone();
        set.set(key(7), Some(frontend(1)));
        let shards = |set: &ServiceSet| set.shards.clone().unwrap();
        assert!(Arc::ptr_eq(&shards(&set), &shards(&before)), "nothing changed");
        set.set(key(7), Some(frontend(2)));
        let (now, before) = (shards(&set), shards(&before));
        let shared = now.iter().zip(&*before).filter(|(now, before)| Arc::ptr_eq(now, before)).count();
        assert_eq!(shared, SHARDS - 1);
        let largest = now.iter().map(|shard| shard.len()).max().unwrap();
        assert!(largest <= 64, "{largest} addresses of 5,000 in one shard");
    }
}
