//! An object source under test, and what it has reported so far.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_bench::testbed::api_server::{Account, ApiServer, Resource};
use penstock_dataplane::packet::{Flow, Protocol};
use penstock_policy::engine::{Engine, EngineSettings};
use penstock_policy::model::{Object, ObjectChange, ObjectRef};
use penstock_sources::api_server::{Access, ApiServer as Source, ApiServerTimeouts, NodeWriter, pods_not_enforced};
use penstock_sources::{KindHealth, ObjectKind, SourceHealth, convert};

use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::runtime::{Builder, Runtime};

/// Timeout of every step, a server's start and the longest retry backoff included.
const TIMEOUT: Duration = Duration::from_secs(60);

/// ApiServerTimeouts of a real node, but with a shorter timeout for a silent server.
pub(crate) const TIMEOUTS: ApiServerTimeouts = ApiServerTimeouts {
    page: Duration::from_secs(5),
    watch_start: Duration::from_secs(2),
    list_pause: Duration::from_secs(2),
    healthy_after: Duration::from_millis(500),
    silence: Duration::from_secs(2),
    look_again: Duration::from_millis(100),
};

pub(crate) struct Follower {
    runtime: Runtime,
    source: Source,
    health: Arc<SourceHealth>,
    objects: BTreeMap<ObjectRef, Object>,
    engine: Engine,
    pub(crate) batches: usize,
}

impl Follower {
    /// Follows a server with only the rights of the shipped ClusterRole.
    pub(crate) fn start(server: &ApiServer) -> Self {
        Self::reporting(server, None)
    }

    /// The same; as this node it writes Events.
    pub(crate) fn reporting(server: &ApiServer, node: Option<&str>) -> Self {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let health = Arc::new(SourceHealth::default());
        let access = Access::Kubeconfig { path: server.kubeconfig(Account::Penstock), context: None };
        let writer = node.map(|node| NodeWriter {
            node: node.to_owned(),
            startup_taint: None,
            not_enforced: pods_not_enforced().1,
        });
        let opened = runtime.block_on(async {
            let mut source =
                Source::start(&access, TIMEOUTS, Arc::clone(&health), writer, convert::ConversionSettings::default())
                    .await
                    .unwrap();
            let objects = tokio::time::timeout(TIMEOUT, source.first()).await;
            (source, objects)
        });
        let (source, objects) = (opened.0, opened.1.expect("all kinds are listed in time"));
        assert!(health.is_synced(), "nothing is reported from a partial list");
        let mut engine = Engine::new(EngineSettings::for_node("here"));
        engine.apply(objects.iter().cloned().map(ObjectChange::Set));
        let objects = objects.into_iter().map(|object| (object.reference(), object)).collect();
        Self { runtime, source, health, objects, engine, batches: 0 }
    }

    pub(crate) fn health(&self, kind: ObjectKind) -> KindHealth {
        self.health.of(kind)
    }

    /// Takes batches until exactly the server's current objects are known; returns the number of batches.
    pub(crate) fn catch_up(&mut self, server: &ApiServer) -> usize {
        let before = self.batches;
        let deadline = Instant::now() + TIMEOUT;
        let mut wanted = objects_of(server);
        while self.objects != wanted {
            assert!(
                Instant::now() < deadline,
                "not followed: {}\n{:?}",
                self.differences(&wanted),
                ObjectKind::ALL.map(|kind| self.health(kind))
            );
            let logged = self.batches;
            self.listen_once(Duration::from_millis(200));
            // A real server creates objects of its own at any time.
            if self.batches == logged {
                wanted = objects_of(server);
            }
        }
        self.batches - before
    }

    /// Takes one batch that arrives within `time`.
    fn listen_once(&mut self, time: Duration) {
        let next = self.source.next();
        if let Ok(batch) = self.runtime.block_on(async { tokio::time::timeout(time, next).await }) {
            self.take(batch.expect("it is followed"));
        }
    }

    /// Takes all batches that arrive within `time`.
    pub(crate) fn listen(&mut self, time: Duration) {
        let deadline = Instant::now() + time;
        while let Ok(batch) = {
            let next = self.source.next();
            self.runtime.block_on(async { tokio::time::timeout_at(deadline.into(), next).await })
        } {
            self.take(batch.expect("it is followed"));
        }
    }

    /// Waits until the health of the pods' watch satisfies a condition.
    pub(crate) fn until(&mut self, what: &str, holds: impl Fn(&KindHealth) -> bool) {
        let deadline = Instant::now() + TIMEOUT;
        while !holds(&self.health(ObjectKind::Pod)) {
            assert!(Instant::now() < deadline, "never {what}: {:?}", self.health(ObjectKind::Pod));
            self.listen(Duration::from_millis(10));
        }
    }

    pub(crate) fn objects(&self) -> &BTreeMap<ObjectRef, Object> {
        &self.objects
    }

    /// Whether the policy tables allow `from` to open a connection to `to`.
    pub(crate) fn reaches(&self, from: &str, to: &str) -> bool {
        let address = |text: &str| text.parse::<std::net::IpAddr>().unwrap().into();
        let (src, dst) = (address(from), address(to));
        let flow = Flow { src, dst, protocol: Protocol::TCP, src_port: 40_000, dst_port: 80 };
        self.engine.policy_set().evaluate(&flow).is_allowed()
    }

    fn take(&mut self, batch: Vec<ObjectChange>) {
        self.batches += 1;
        for change in &batch {
            match change {
                ObjectChange::Set(object) => drop(self.objects.insert(object.reference(), object.clone())),
                ObjectChange::Delete(reference) => drop(self.objects.remove(reference)),
            }
        }
        self.engine.apply(batch);
    }

    fn differences(&self, wanted: &BTreeMap<ObjectRef, Object>) -> String {
        let missing: Vec<_> = wanted.iter().filter(|(name, object)| self.objects.get(name) != Some(object)).collect();
        let extra: Vec<_> = self.objects.keys().filter(|name| !wanted.contains_key(name)).collect();
        format!(
            "missing or other {}: {:?}\nextra: {extra:?}",
            missing.len(),
            missing.iter().take(5).collect::<Vec<_>>()
        )
    }
}

/// All followed objects of a server, read independently.
fn objects_of(server: &ApiServer) -> BTreeMap<ObjectRef, Object> {
    fn typed<T: DeserializeOwned>(value: Value) -> T {
        serde_json::from_value(value).expect("an object of its type")
    }
    let settings = convert::ConversionSettings::default();
    let read = |resource, value| match resource {
        Resource::Namespaces => convert::namespace(&typed(value), settings).map(Object::Namespace),
        Resource::Nodes => convert::node(&typed(value)).map(Object::Node),
        Resource::Pods => convert::pod(&typed(value)).map(Object::Pod),
        Resource::Services => convert::service(&typed(value)).map(|(service, _)| Object::Service(service)),
        Resource::NetworkPolicies => convert::network_policy(&typed(value)).map(Object::NetworkPolicy),
        Resource::ClusterNetworkPolicies => {
            convert::cluster_network_policy(&typed(value), convert::ConversionSettings::default())
                .map(Object::ClusterNetworkPolicy)
        }
        Resource::Events => unreachable!("they are not followed"),
    };
    let followed = Resource::ALL.into_iter().filter(|resource| *resource != Resource::Events);
    let all = followed.flat_map(|resource| {
        let listed = match server.admin().list(resource) {
            Ok(listed) => listed,
            Err(error) if resource == Resource::ClusterNetworkPolicies => {
                // The small server's words, and a real one's.
                let text = format!("{error:#}").to_lowercase();
                assert!(["no such path", "404 page not found"].iter().any(|words| text.contains(words)), "{text}");
                Vec::new()
            }
            Err(error) => panic!("{error:#}"),
        };
        listed.into_iter().map(move |value| read(resource, value).expect("a valid object"))
    });
    all.map(|object| (object.reference(), object)).collect()
}
