//! How often each rule decided, and when last; kept over restarts.
//!
//! Workers count in the tables, in rows of their own. The daemon's loop sums up the tables' counters every few seconds, by
//! the policy, the rule's name and what it says: an edit makes it another rule, and a rule that no longer exists is forgotten. So there
//! are never more entries than rules.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use penstock_admin::types;
use penstock_policy::compile::RuleSource;
use penstock_policy::describe;
use penstock_policy::render::tables::RuleUse;
use serde::{Deserialize, Serialize};

use super::config::Config;
use super::objects::NodeObjects;
use super::state_file::{Identity, KeptFile, StateFile};

/// How often the tables' counters are read: the resolution of the last hit.
pub(super) const INTERVAL: Duration = Duration::from_secs(5);
/// How often the file is written, if something has changed.
const WRITE_INTERVAL: Duration = Duration::from_secs(60);
/// The most rules that are kept. Others are counted from when one of these is gone.
const MOST_RULES: usize = 50_000;
const VERSION: u32 = 2;
/// Suffix of the file, after the name of the connection table's file.
pub(super) const SUFFIX: &str = ".rules";
/// Ages of the last hit that are counted for metrics, in days.
const AGES: [(&str, i64); 3] = [("1d", 1), ("7d", 7), ("30d", 30)];
const DAY: i64 = 86_400;

/// A rule: its policy, its name, which may be that of another policy's rule too, and a hash of what it says.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
struct RuleId {
    policy: String,
    name: String,
    content: u64,
}

impl RuleId {
    fn of(source: &RuleSource) -> Self {
        let name = source.name();
        Self { policy: name.policy().to_owned(), name: name.text().to_owned(), content: source.content() }
    }
}

/// How a rule was used. Times are seconds of Unix time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Used {
    hits: u64,
    last: Option<i64>,
    since: i64,
}

pub(super) struct CountedRules {
    used: Vec<RuleUse>,
    revision: u64,
    rules: Option<Vec<RuleSource>>,
}

pub(super) struct RuleUsage {
    rules: BTreeMap<RuleId, Used>,
    /// Which state of the policies the rules are of.
    revision: Option<u64>,
    left_out: usize,
    file: KeptFile,
    is_changed: bool,
}

impl RuleUsage {
    /// Opens what the last run has kept, if there is a state directory.
    pub(super) fn open(config: &Config) -> Self {
        let origin = config.source.location().to_string();
        let identity = Identity::new("rule usage", VERSION, config.node.as_str(), origin);
        Self::of(StateFile::beside(&config.conntrack.mapping, SUFFIX, identity))
    }

    fn of(file: Option<StateFile>) -> Self {
        let file = KeptFile::new(file, "hits of rules");
        let read = file.read_json::<Vec<(RuleId, Used)>>().unwrap_or_else(|error| {
            tracing::warn!("usage of rules: {error}");
            None
        });
        let rules = read.into_iter().flatten().take(MOST_RULES).collect();
        Self { rules, revision: None, left_out: 0, file, is_changed: false }
    }

    /// Reads the workers' counts, and the rules if they are not those of the last call. Call it with the objects locked; names
    /// and hashes are computed afterwards.
    pub(super) fn read(&self, objects: &mut NodeObjects) -> CountedRules {
        let used = objects.take_use();
        let revision = objects.engine().state().policy_revision();
        let is_other = self.revision != Some(revision);
        CountedRules { used, revision, rules: is_other.then(|| objects.engine().deciding_rules().collect()) }
    }

    /// Adds what was read. Rules that are not in effect are forgotten once `is_synced`: before, the source has not told of all
    /// policies.
    pub(super) fn add(&mut self, counted: CountedRules, is_synced: bool, now: Timestamp) {
        let now = now.as_second();
        if let Some(rules) = counted.rules {
            self.follow(&rules, is_synced, now);
            self.revision = is_synced.then_some(counted.revision);
        }
        for used in counted.used {
            if let Some(known) = self.rules.get_mut(&RuleId::of(&used.source)) {
                (known.hits, known.last, self.is_changed) = (known.hits + used.hits, Some(now), true);
            }
        }
    }

    fn follow(&mut self, rules: &[RuleSource], is_synced: bool, now: i64) {
        let mut before = std::mem::take(&mut self.rules);
        self.left_out = 0;
        for rule in rules.iter().map(RuleId::of) {
            if self.rules.len() >= MOST_RULES {
                self.left_out += 1;
                continue;
            }
            let used = before.remove(&rule).unwrap_or(Used { hits: 0, last: None, since: now });
            self.rules.insert(rule, used);
        }
        if !is_synced {
            let room = MOST_RULES.saturating_sub(self.rules.len());
            self.rules.extend(before.into_iter().take(room));
        }
        self.is_changed = true;
    }

    /// Writes the file, if it is time and something has changed, on a thread of its own.
    pub(super) fn keep(&mut self) {
        if self.is_changed && self.file.is_due(WRITE_INTERVAL) {
            self.is_changed = false;
            let lines = self.lines();
            self.file.write(|| lines);
        }
    }

    /// Writes the file, for the next run.
    pub(super) fn finish(&self) {
        self.file.finish(|| self.lines());
    }

    fn lines(&self) -> Vec<u8> {
        serde_json::to_vec(&self.rules.iter().collect::<Vec<_>>()).expect("text and numbers are JSON")
    }

    /// All rules with their usage, those without a hit first, then by the time of the last hit.
    pub(super) fn list(&self, sources: &[RuleSource]) -> types::Rules {
        let usage = |source| {
            let id = RuleId::of(source);
            Some(listed(source, &id, self.rules.get(&id)?))
        };
        let mut rules: Vec<types::RuleUsage> = sources.iter().filter_map(usage).collect();
        rules.sort_by(|one, other| (one.last_hit, &one.rule).cmp(&(other.last_hit, &other.rule)));
        types::Rules { now: Timestamp::now().as_second(), left_out: self.left_out, rules }
    }

    /// How many rules have decided within the last day, week and month, and how many never.
    pub(super) fn ages(&self, now: Timestamp) -> Vec<(&'static str, u64)> {
        let within = |days: i64| {
            let from = now.as_second() - days * DAY;
            self.rules.values().filter(|used| used.last.is_some_and(|last| last >= from)).count() as u64
        };
        let never = self.rules.values().filter(|used| used.last.is_none()).count() as u64;
        AGES.iter().map(|(name, days)| (*name, within(*days))).chain([("never", never)]).collect()
    }
}

fn listed(source: &RuleSource, id: &RuleId, used: &Used) -> types::RuleUsage {
    types::RuleUsage {
        rule: id.name.clone(),
        policy: id.policy.clone(),
        direction: describe::direction(source.direction).to_owned(),
        index: source.rule,
        content: format!("{:016x}", id.content),
        action: describe::action(source.action()).to_owned(),
        hits: used.hits,
        last_hit: used.last,
        since: used.since,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use penstock_dataplane::packet::{Flow, Protocol};
    use penstock_policy::model::{
        NetworkPolicy, Object, ObjectChange, ObjectKey, ObjectRef, Peers, Pod, PolicyPort, PolicyPorts, PortMatch,
        PortProtocol, Rule, Selector, Staging,
    };

    use super::*;
    use crate::config::TableMapping;

    fn usage(directory: &Path) -> RuleUsage {
        let identity = Identity::new("rule usage", VERSION, "here", "x".into());
        let file = StateFile::beside(&TableMapping::File(directory.join("conntrack")), SUFFIX, identity);
        assert!(file.as_ref().unwrap().read().is_ok());
        RuleUsage::of(file)
    }

    fn key(name: &str) -> ObjectKey {
        ObjectKey { namespace: "shop".into(), name: name.into() }
    }

    /// A policy with one ingress rule for each of these ports.
    fn policy(name: &str, ports: &[u16]) -> ObjectChange {
        let rule = |&port: &u16| {
            let which = PortMatch::Range { first: port, last: port };
            let ports = PolicyPorts::AnyOf(vec![PolicyPort { protocol: PortProtocol::Tcp, which }]);
            Rule { peers: Peers::Every, ports }
        };
        ObjectChange::Set(Object::NetworkPolicy(NetworkPolicy {
            key: key(name),
            pod_selector: Selector::default(),
            isolates: true,
            ingress: Some(ports.iter().map(rule).collect()),
            egress: None,
            staging: Staging::InForce,
            notes: Default::default(),
        }))
    }

    fn node() -> NodeObjects {
        let mut objects = NodeObjects::new("here", &[]);
        objects.count_use(2);
        objects.apply([ObjectChange::Set(Object::Pod(pod([10, 0, 0, 1])))], &[]);
        objects
    }

    fn pod(address: [u8; 4]) -> Pod {
        Pod { key: key("web"), node: Some("here".into()), addresses: vec![address.into()], ..Pod::default() }
    }

    fn open(objects: &NodeObjects, worker: usize, port: u16) {
        let (src, dst) = (std::net::IpAddr::from([192, 0, 2, 1]).into(), std::net::IpAddr::from([10, 0, 0, 1]).into());
        let flow = Flow { src, dst, protocol: Protocol::TCP, src_port: 9, dst_port: port };
        let set = objects.engine().policy_set();
        set.count(worker, &set.evaluate(&flow));
    }

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(seconds).unwrap()
    }

    /// Name, hits, last hit and since when.
    fn shape(usage: &RuleUsage, objects: &NodeObjects) -> Vec<(String, u64, Option<i64>, i64)> {
        let sources: Vec<RuleSource> = objects.engine().deciding_rules().collect();
        let rules = usage.list(&sources).rules;
        rules.into_iter().map(|rule| (rule.rule, rule.hits, rule.last_hit, rule.since)).collect()
    }

    #[test]
    fn hits_survive_restarts_and_an_edit_is_another_rule() {
        let directory = tempfile::tempdir().unwrap();
        let (mut usage, mut objects) = (self::usage(directory.path()), node());
        objects.apply([policy("p", &[80, 81]), policy("q", &[90])], &[]);
        usage.add(usage.read(&mut objects), true, at(1_000));
        open(&objects, 0, 80);
        open(&objects, 1, 80);
        open(&objects, 1, 90);
        usage.add(usage.read(&mut objects), true, at(2_000));
        let (p, q) = ("shop-ingress-p".to_owned(), "shop-ingress-q-0".to_owned());
        let expected = [
            (format!("{p}-1"), 0, None, 1_000),
            (format!("{p}-0"), 2, Some(2_000), 1_000),
            (q.clone(), 1, Some(2_000), 1_000),
        ];
        assert_eq!(shape(&usage, &objects), expected);
        usage.finish();

        let (mut usage, mut objects) = (self::usage(directory.path()), node());
        // Not all policies are known yet: what was known is kept.
        usage.add(usage.read(&mut objects), false, at(2_500));
        objects.apply([policy("p", &[80, 82])], &[]);
        usage.add(usage.read(&mut objects), true, at(3_000));
        let expected = [(format!("{p}-1"), 0, None, 3_000), (format!("{p}-0"), 2, Some(2_000), 1_000)];
        assert_eq!(shape(&usage, &objects), expected, "the edited rule is new, the policy q is gone");
        assert_eq!(usage.ages(at(2_000 + 2 * DAY)), [("1d", 0), ("7d", 1), ("30d", 1), ("never", 1)]);
        objects.apply([ObjectChange::Delete(ObjectRef::NetworkPolicy(key("p")))], &[]);
        usage.add(usage.read(&mut objects), true, at(4_000));
        assert!(usage.rules.is_empty());
    }

    #[test]
    fn rules_whose_names_join_equally_have_their_own_hits() {
        let directory = tempfile::tempdir().unwrap();
        let (mut usage, mut objects) = (self::usage(directory.path()), node());
        let twin = |namespace: &str, name: &str| {
            let ObjectChange::Set(Object::NetworkPolicy(policy)) = policy(name, &[80]) else { unreachable!() };
            let key = ObjectKey { namespace: namespace.into(), name: name.into() };
            ObjectChange::Set(Object::NetworkPolicy(NetworkPolicy { key, ..policy }))
        };
        // Only the second one selects the pod.
        let other =
            Pod { key: ObjectKey { namespace: "shop-ingress-a".into(), name: "other".into() }, ..pod([10, 0, 0, 2]) };
        let twins = [twin("shop-ingress-a", "b"), twin("shop", "a-ingress-b")];
        objects.apply([ObjectChange::Set(Object::Pod(other))].into_iter().chain(twins), &[]);
        usage.add(usage.read(&mut objects), true, at(1_000));
        open(&objects, 0, 80);
        usage.add(usage.read(&mut objects), true, at(2_000));
        let hits = |usage: &RuleUsage, objects: &NodeObjects| {
            let sources: Vec<RuleSource> = objects.engine().deciding_rules().collect();
            let rules = usage.list(&sources).rules;
            rules.into_iter().map(|rule| (rule.policy, rule.rule, rule.hits)).collect::<Vec<_>>()
        };
        let name = "shop-ingress-a-ingress-b-0";
        let expected = [("shop-ingress-a/b", name, 0), ("shop/a-ingress-b", name, 1)];
        let expected = expected.map(|(policy, rule, hits)| (policy.to_owned(), rule.to_owned(), hits));
        assert_eq!(hits(&usage, &objects), expected);
        objects.apply([policy("unrelated", &[99])], &[]);
        usage.add(usage.read(&mut objects), true, at(3_000));
        let kept: Vec<_> = hits(&usage, &objects).into_iter().filter(|(_, rule, _)| rule == name).collect();
        assert_eq!(kept, expected, "an unrelated change leaves them");
    }

    #[test]
    fn rules_beyond_the_limit_are_counted_as_left_out() {
        let directory = tempfile::tempdir().unwrap();
        let (mut usage, mut objects) = (self::usage(directory.path()), NodeObjects::new("here", &[]));
        let policies = (0..MOST_RULES / 25_000 + 1).map(|number| {
            let ports: Vec<u16> = (1..=25_000).collect();
            policy(&format!("p{number}"), &ports)
        });
        objects.apply(policies.collect::<Vec<_>>(), &[]);
        usage.add(usage.read(&mut objects), true, at(1));
        assert_eq!((usage.rules.len(), usage.left_out), (MOST_RULES, 25_000));
    }
}
