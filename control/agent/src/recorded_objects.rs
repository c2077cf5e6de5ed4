//! The objects that are in effect, kept on disk for a start while the API server is away.
//!
//! A thread of its own keeps every object as a line of JSON and writes all lines some time after a change: policy does not wait
//! for the disk. A batch of changes is recorded whole, so that no half-known state is ever on disk.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use penstock_policy::model::{Object, ObjectChange, ObjectRef};

use crate::config::Config;
use crate::privileges;
use crate::state_file::{Identity, StateFile};

/// The version of the file's form: that of [`Object`] as JSON. A test asks for another one when that changes.
const VERSION: u32 = 7;

/// Suffix of the file, after the name of the connection table's file.
pub(crate) const SUFFIX: &str = ".objects";

/// Shortest time between two writes. It is also this multiple of the last write's duration, so that writing takes a small
/// share of a core however many objects there are.
const WRITE_INTERVAL: Duration = Duration::from_secs(1);
const INTERVAL_FACTOR: u32 = 50;

/// The report on objects of an earlier run while they are in effect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct StaleObjects {
    pub(crate) recorded: Timestamp,
    pub(crate) objects: usize,
}

/// The file of the objects of one API server for one node.
#[derive(Clone, Debug)]
pub(crate) struct ObjectFile(StateFile);

impl ObjectFile {
    /// The file of this configuration; `None` without a state directory. Of manifests, too: one of them may be refused at the next
    /// start.
    pub(crate) fn of(config: &Config) -> Option<Self> {
        let location = config.source.location();
        let mut origin = location.to_string();
        // Rules with domain names were read for a daemon that follows them.
        if config.domain_names.enabled {
            origin.push_str(", with domain names");
        }
        let identity = Identity::new("objects", VERSION, config.node.as_str(), origin);
        StateFile::beside(&config.conntrack.mapping, SUFFIX, identity).map(Self)
    }

    /// The objects, and when they were written. `None` if there are none to use; the log then says why.
    pub(crate) fn read(&self) -> Option<(Timestamp, Vec<Object>)> {
        let read = self.0.read().and_then(|stored| {
            let Some(stored) = stored else { return Ok(None) };
            let objects = serde_json::Deserializer::from_slice(&stored.content).into_iter();
            let objects: Result<Vec<Object>, serde_json::Error> = objects.collect();
            Ok(Some((stored.written, objects.map_err(|error| self.0.damaged(error.into()))?)))
        });
        read.unwrap_or_else(|error| {
            tracing::warn!("objects of the last run: {error}");
            None
        })
    }
}

/// Writes objects to their file. Dropping it writes what is not written yet.
pub(crate) struct ObjectRecorder {
    changes: Option<Sender<Vec<ObjectChange>>>,
    thread: Option<JoinHandle<()>>,
}

impl ObjectRecorder {
    /// Starts the thread. It writes `objects` soon, unless they are from the file itself.
    pub(crate) fn start(file: ObjectFile, objects: RecordedLines, are_from_file: bool) -> io::Result<Self> {
        let (sender, changes) = mpsc::channel();
        let record = ObjectRecord { file, lines: objects, failed: false };
        let thread = thread::Builder::new().name("objects".to_owned()).spawn(move || {
            privileges::drop_all();
            record.run(&changes, !are_from_file);
        })?;
        Ok(Self { changes: Some(sender), thread: Some(thread) })
    }

    /// Records a batch of changes that is in effect.
    pub(crate) fn record(&self, changes: Vec<ObjectChange>) {
        if let Some(sender) = &self.changes {
            // Sending fails only if the thread has panicked.
            let _ = sender.send(changes);
        }
    }
}

impl Drop for ObjectRecorder {
    fn drop(&mut self) {
        self.changes = None;
        if let Some(thread) = self.thread.take() {
            // A panic has been reported on standard error.
            let _ = thread.join();
        }
    }
}

/// The lines of a file, by object.
#[derive(Debug, Default)]
pub(crate) struct RecordedLines(BTreeMap<ObjectRef, Box<[u8]>>);

impl RecordedLines {
    pub(crate) fn of(objects: &[Object]) -> Self {
        let mut lines = Self::default();
        for object in objects {
            lines.set(object);
        }
        lines
    }

    pub(crate) fn references(&self) -> BTreeSet<ObjectRef> {
        self.0.keys().cloned().collect()
    }

    /// Returns whether anything changed.
    fn set(&mut self, object: &Object) -> bool {
        let mut line = serde_json::to_vec(object).expect("objects have text keys and no other failing part");
        line.push(b'\n');
        let line = line.into_boxed_slice();
        self.0.get(&object.reference()) != Some(&line) && {
            self.0.insert(object.reference(), line);
            true
        }
    }

    fn apply(&mut self, change: &ObjectChange) -> bool {
        match change {
            ObjectChange::Set(object) => self.set(object),
            ObjectChange::Delete(reference) => self.0.remove(reference).is_some(),
        }
    }
}

struct ObjectRecord {
    file: ObjectFile,
    lines: RecordedLines,
    /// Whether the last write failed.
    failed: bool,
}

impl ObjectRecord {
    fn run(mut self, changes: &Receiver<Vec<ObjectChange>>, mut is_unwritten: bool) {
        let mut next_write = Instant::now();
        loop {
            let now = Instant::now();
            if is_unwritten && now >= next_write {
                self.write();
                is_unwritten = false;
                next_write = now + WRITE_INTERVAL.max(INTERVAL_FACTOR * now.elapsed());
            }
            let received = match is_unwritten {
                true => changes.recv_timeout(next_write.saturating_duration_since(now)),
                false => changes.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match received {
                // Every change, not only up to the first that has an effect.
                Ok(batch) => batch.iter().for_each(|change| is_unwritten |= self.lines.apply(change)),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        if is_unwritten {
            self.write();
        }
    }

    fn write(&mut self) {
        let ObjectFile(file) = &self.file;
        let written = file.write(self.lines.0.values().map(|line| &line[..]));
        let failed = written.is_err();
        if let Err(error) = written {
            // The file does not have what is in effect any more.
            let _ = fs::remove_file(file.path());
            if !self.failed {
                tracing::warn!(
                    "cannot record the objects: {error}; after a restart pods stay closed until the API server is there"
                );
            }
        }
        self.failed = failed;
    }
}

/// All objects of a source as changes of what an earlier run recorded: what the source does not have is deleted.
pub(crate) fn replacing(recorded: &BTreeSet<ObjectRef>, objects: Vec<ObjectChange>) -> Vec<ObjectChange> {
    let there: BTreeSet<ObjectRef> = objects
        .iter()
        .filter_map(|change| match change {
            ObjectChange::Set(object) => Some(object.reference()),
            ObjectChange::Delete(_) => None,
        })
        .collect();
    recorded.difference(&there).cloned().map(ObjectChange::Delete).chain(objects).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::path::Path;

    use penstock_policy::model::{
        ClusterNetworkPolicy, ClusterRule, ClusterTier, DomainPattern, EndpointPort, EndpointSlice, IpBlock,
        LabelOperator, NamedPort, Namespace, NetworkPolicy, Node, ObjectKey, Peer, Peers, Pod, PodLifetime, PolicyPort,
        PolicyPorts, PortMatch, PortProtocol, Requirement, Rule, RuleAction, Selector, Service, ServiceEndpoint,
        ServicePort, Staging, Subject, TargetPort,
    };

    use super::*;

    fn config(directory: &Path, node: &str) -> Config {
        let mapping = directory.join("conntrack").display().to_string();
        let text = format!("node = \"{node}\"\n[source]\nin_cluster = true\n[conntrack]\nmapping = \"{mapping}\"\n");
        Config::parse(&text, Path::new("/etc/penstock.toml")).unwrap()
    }

    fn key(name: &str) -> ObjectKey {
        ObjectKey { namespace: "shop".into(), name: name.into() }
    }

    fn pod(name: &str, last: u8) -> Object {
        Object::Pod(Pod {
            key: key(name),
            labels: [("app".to_owned(), name.to_owned())].into(),
            node: Some("here".into()),
            addresses: vec![[10, 1, 1, last].into(), "fd00::5".parse().unwrap()],
            ports: vec![NamedPort { name: "http".into(), protocol: PortProtocol::Tcp, number: 8080 }],
            lifetime: PodLifetime { leaving: false, started: Some(7), created: None },
            ..Pod::default()
        })
    }

    fn requirement(key: &str, operator: LabelOperator) -> Requirement {
        Requirement { key: key.into(), operator }
    }

    /// An object of each kind, and every variant of what is in one.
    fn samples() -> Vec<Object> {
        let selector = Selector {
            requirements: vec![
                requirement("a", LabelOperator::In(vec!["x".into()])),
                requirement("b", LabelOperator::NotIn(vec!["y".into()])),
                requirement("c", LabelOperator::Exists),
                requirement("d", LabelOperator::DoesNotExist),
            ],
        };
        let port = |protocol, which| PolicyPort { protocol, which };
        let rule = Rule {
            peers: Peers::AnyOf(vec![
                Peer::Pods(selector.clone()),
                Peer::Namespaces(Selector::default()),
                Peer::PodsInNamespaces { namespaces: Selector::default(), pods: Selector::default() },
                Peer::IpBlock(IpBlock {
                    cidr: "10.0.0.0/8".parse().unwrap(),
                    except: vec!["10.1.0.0/16".parse().unwrap()],
                }),
                Peer::Networks(vec!["fd00::/8".parse().unwrap()]),
                Peer::Nodes(Selector::default()),
                Peer::DomainNames(vec![DomainPattern::new("*.example.org").unwrap()]),
            ]),
            ports: PolicyPorts::AnyOf(vec![
                port(PortProtocol::Tcp, PortMatch::Range { first: 1, last: 2 }),
                port(PortProtocol::Udp, PortMatch::Name("dns".into())),
                port(PortProtocol::Sctp, PortMatch::Every),
            ]),
        };
        let every = Rule { peers: Peers::Every, ports: PolicyPorts::Every };
        let cluster_rule =
            |action| ClusterRule { name: Some("r".into()), action, matches: every.clone(), is_understood: true };
        vec![
            Object::Namespace(Namespace {
                name: "shop".into(),
                labels: [("team".to_owned(), "a".to_owned())].into(),
                default_deny_ingress: false,
                terminating: true,
            }),
            Object::Node(Node {
                name: "here".into(),
                labels: Default::default(),
                addresses: vec![[192, 0, 2, 1].into()],
                status_addresses: vec![[192, 0, 2, 1].into()],
            }),
            pod("web", 5),
            Object::NetworkPolicy(NetworkPolicy {
                key: key("p"),
                pod_selector: selector,
                isolates: true,
                ingress: Some(vec![rule]),
                egress: None,
                staging: Staging::Replaces("q".into()),
                notes: Default::default(),
            }),
            Object::ClusterNetworkPolicy(ClusterNetworkPolicy {
                name: "c".into(),
                tier: ClusterTier::Baseline,
                priority: 3,
                subject: Subject::default(),
                ingress: [RuleAction::Accept, RuleAction::Deny, RuleAction::Pass].map(cluster_rule).into(),
                egress: vec![],
                staging: Staging::InForce,
                notes: Default::default(),
            }),
            Object::Service(Service {
                key: key("web"),
                addresses: vec![[10, 96, 0, 1].into()],
                ports: vec![
                    ServicePort {
                        name: "http".into(),
                        protocol: PortProtocol::Tcp,
                        number: 80,
                        target: TargetPort::Number(8080),
                        node_port: Some(30_080),
                    },
                    ServicePort {
                        name: "dns".into(),
                        protocol: PortProtocol::Udp,
                        number: 53,
                        target: TargetPort::Name("dns".into()),
                        node_port: None,
                    },
                ],
                external: Vec::new(),
                local_only: true,
                selector: None,
            }),
            Object::EndpointSlice(EndpointSlice {
                key: key("web-1"),
                service: Some("web".into()),
                ports: vec![EndpointPort { name: "http".into(), protocol: PortProtocol::Tcp, number: 8080 }],
                endpoints: vec![ServiceEndpoint {
                    address: [10, 1, 1, 5].into(),
                    ready: true,
                    serving: true,
                    terminating: false,
                    node: Some("here".into()),
                    node_hints: vec![],
                    zone_hints: vec!["a".into()],
                }],
            }),
        ]
    }

    #[test]
    fn objects_of_every_kind_are_recorded_and_read_again() {
        let directory = tempfile::tempdir().unwrap();
        let file = ObjectFile::of(&config(directory.path(), "here")).unwrap();
        assert!(file.read().is_none());
        let objects = samples();
        let recorder = ObjectRecorder::start(file.clone(), RecordedLines::of(&objects), false).unwrap();
        let more = pod("db", 6);
        recorder.record(vec![ObjectChange::Set(more.clone()), ObjectChange::Delete(objects[2].reference())]);
        drop(recorder);
        let (_, read) = file.read().unwrap();
        let expected: BTreeSet<String> = objects
            .iter()
            .filter(|object| object.reference() != objects[2].reference())
            .chain([&more])
            .map(|object| format!("{object:?}"))
            .collect();
        assert_eq!(read.iter().map(|object| format!("{object:?}")).collect::<BTreeSet<_>>(), expected);
        assert_eq!(fs::metadata(file.0.path()).unwrap().mode() & 0o777, 0o600);
        assert!(ObjectFile::of(&config(directory.path(), "there")).unwrap().read().is_none(), "another node's");
    }

    #[test]
    fn the_form_of_recorded_objects_is_that_of_its_version() {
        let mut text = format!("version {VERSION}\n");
        for object in samples() {
            text += &(serde_json::to_string(&object).unwrap() + "\n");
        }
        let name = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/recorded_objects.jsonl");
        if std::env::var_os("UPDATE_EXPECTED").is_some() {
            fs::write(&name, &text).unwrap();
        }
        let expected = fs::read_to_string(&name).unwrap();
        assert_eq!(
            text, expected,
            "the form changed: raise VERSION, and that of bundles (control/replay/src/bundle), then run this with UPDATE_EXPECTED=1"
        );
    }

    #[test]
    fn content_that_is_no_object_is_not_used() {
        let directory = tempfile::tempdir().unwrap();
        let file = ObjectFile::of(&config(directory.path(), "here")).unwrap();
        let good = serde_json::to_vec(&pod("web", 5)).unwrap();
        for bad in [&b"{\"Pod\": {}}"[..], b"{\"Unheard\": {}}", b"[]", &good[..good.len() - 1]] {
            file.0.write([&good[..], b"\n", bad]).unwrap();
            assert!(file.read().is_none(), "{}", String::from_utf8_lossy(bad));
        }
    }

    #[test]
    fn a_daemon_without_state_directory_records_nothing() {
        for (source, mapping, is_recorded) in [
            ("manifests = \"/m\"", "/run/penstock/conntrack", true),
            ("in_cluster = true", "/run/penstock/conntrack", true),
            ("manifests = \"/m\"", "off", false),
            ("in_cluster = true", "off", false),
        ] {
            let text = format!("node = \"a\"\n[source]\n{source}\n[conntrack]\nmapping = \"{mapping}\"\n");
            let config = Config::parse(&text, Path::new("/etc/penstock.toml")).unwrap();
            assert_eq!(ObjectFile::of(&config).is_some(), is_recorded, "{text}");
        }
    }

    #[test]
    fn objects_that_the_source_lost_are_deleted_in_the_same_batch() {
        let recorded = RecordedLines::of(&[pod("web", 5), pod("old", 6)]).references();
        let now = vec![ObjectChange::Set(pod("web", 7)), ObjectChange::Set(pod("new", 8))];
        let mut expected = vec![ObjectChange::Delete(ObjectRef::Pod(key("old")))];
        expected.extend(now.clone());
        assert_eq!(replacing(&recorded, now), expected);
        assert_eq!(replacing(&recorded, Vec::new()).len(), 2, "an empty cluster");
    }
}
