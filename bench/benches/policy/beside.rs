//! How long small changes of one namespace take beside another namespace's big one, as the daemon's policy thread works: changes
//! first, then a few rules of what is built aside, whose tables another thread builds.

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use penstock_policy::engine::{Engine, EngineSettings};
use penstock_policy::model::*;
use penstock_policy::render::tables::TableJob;

use super::cluster::{block, namespace, node, pod, policy, selector, tcp};
use super::row;

/// As in the daemon's publisher.
const ENTRIES_AT_ONCE: usize = 8192;
const RULES_AT_ONCE: usize = 256;

/// The namespaces of the big change and of the small ones.
const TENANT: usize = 0;
const NEIGHBOUR: usize = 1;

/// How much the tenant writes, and how often its neighbour changes a policy.
#[derive(Clone, Copy)]
pub(crate) struct Load {
    pods: usize,
    rules: usize,
    policies: usize,
    changes: usize,
    every: Duration,
}

impl Load {
    pub(crate) const FULL: Self =
        Self { pods: 2_000, rules: 60_000, policies: 20, changes: 1_000, every: Duration::from_millis(4) };
    pub(crate) const SMOKE: Self =
        Self { pods: 50, rules: 200, policies: 2, changes: 20, every: Duration::from_micros(200) };
}

/// Who builds tables meanwhile, on another core if there is one.
struct Builder {
    jobs: mpsc::Sender<TableJob>,
    built: mpsc::Receiver<penstock_policy::render::tables::BuiltTables>,
}

impl Builder {
    fn start() -> Self {
        let ((jobs, to_build), (sender, built)) = (mpsc::channel::<TableJob>(), mpsc::channel());
        thread::spawn(move || {
            if let Some(core) = core_affinity::get_core_ids().and_then(|cores| cores.first().copied()) {
                core_affinity::set_for_current(core);
            }
            for job in to_build {
                if sender.send(job.build()).is_err() {
                    return;
                }
            }
        });
        Self { jobs, built }
    }
}

/// A cluster of a hundred namespaces; the tenant and its neighbour have pods on this node.
fn engine(load: Load) -> Engine {
    let mut engine = Engine::new(EngineSettings::for_node("node-0"));
    let namespaces = (0..100).map(namespace).chain([node(0), node(1)]);
    let pods = (0..load.pods)
        .map(|number| Object::Pod(pod(number, number % 100, usize::from(number >= 200), number / 100 % 5)));
    engine.apply(namespaces.chain(pods).chain([small(0)]).map(ObjectChange::Set));
    engine.build_aside(ENTRIES_AT_ONCE);
    engine
}

/// The neighbour's policy.
fn small(turn: usize) -> Object {
    let port = 1000 + (turn % 50_000) as u16;
    let from = Peer::Pods(selector(&[("app", "app-1".to_owned())]));
    let rule = Rule { peers: Peers::AnyOf(vec![from]), ports: PolicyPorts::AnyOf(vec![tcp(port, port)]) };
    policy(NEIGHBOUR, "small".to_owned(), Selector::default(), Some(vec![rule]), None)
}

/// What the tenant writes: a peer in each of its rules, in so many policies, of which each second one is for the same pod of this node.
fn big(load: Load, policies: usize, peer: fn(usize) -> Peer) -> Vec<ObjectChange> {
    let rule = |number: usize| {
        let port = 1 + (number % 60_000) as u16;
        Rule { peers: Peers::AnyOf(vec![peer(number)]), ports: PolicyPorts::AnyOf(vec![tcp(port, port)]) }
    };
    let each = load.rules / policies;
    let written = (0..policies).map(|number| {
        let rules = (number * each..(number + 1) * each).map(rule).collect();
        let pods = selector(&[("app", format!("app-{}", number % 2))]);
        policy(TENANT, format!("big-{number}"), pods, Some(rules), None)
    });
    written.map(ObjectChange::Set).collect()
}

fn address(number: usize) -> Peer {
    let [_, a, b, c] = (number as u32).to_be_bytes();
    block(&format!("11.{a}.{b}.{c}/32"), &[])
}

/// A selector of its own that every pod matches.
fn everybody(number: usize) -> Peer {
    let lacks = Requirement { key: format!("lacks-{number}"), operator: LabelOperator::DoesNotExist };
    Peer::PodsInNamespaces { namespaces: Selector::default(), pods: Selector { requirements: vec![lacks] } }
}

/// A selector of its own that no pod matches.
fn nobody(number: usize) -> Peer {
    let has = selector(&[("app", format!("none-{number}"))]);
    Peer::PodsInNamespaces { namespaces: Selector::default(), pods: has }
}

/// A selector of namespaces of its own, that every namespace matches.
fn every_namespace(number: usize) -> Peer {
    let lacks = Requirement { key: format!("lacks-{number}"), operator: LabelOperator::DoesNotExist };
    Peer::PodsInNamespaces {
        namespaces: Selector { requirements: vec![lacks] },
        pods: selector(&[("app", "app-0".to_owned())]),
    }
}

/// From when a change is due to when it is published, of each, and what the policy thread computed meanwhile.
#[derive(Default)]
struct Times {
    waited: Vec<Duration>,
    /// Its processor time for each small change.
    computed: Vec<Duration>,
    /// The same with the step that it was busy with when the change was due: what others on its core have no part in.
    with_step: Vec<Duration>,
    /// Its processor time for the longest of the steps between which it takes a change, and which it was.
    longest: (Duration, &'static str),
    /// Until the tenant's tables are in effect.
    big: Option<Duration>,
}

impl Times {
    /// Takes one step; returns its processor time.
    fn step(&mut self, what: &'static str, step: impl FnOnce()) -> Duration {
        let began = processor_time();
        step();
        let took = processor_time() - began;
        self.longest = self.longest.max((took, what));
        took
    }
}

/// Publishes the neighbour's changes as they are due, beside the tenant's.
fn publish(engine: &mut Engine, load: Load, tenant: Vec<ObjectChange>) -> Times {
    let builder = Builder::start();
    let mut times = Times::default();
    let begun = Instant::now();
    let mut tenant = Some(tenant).filter(|changes| !changes.is_empty());
    let (mut published, mut step) = (engine.policy_set().clone(), Duration::ZERO);
    while times.waited.len() < load.changes || engine.waiting_pods() > 0 {
        let due = begun + load.every * times.waited.len() as u32;
        if let Ok(built) = builder.built.try_recv() {
            step = times.step("taking built tables", || {
                engine.finish_tables(built);
                published = engine.policy_set().clone();
            });
        } else if Instant::now() >= due {
            let change = ObjectChange::Set(small(times.waited.len() + 1));
            let took = times.step("the small change", || {
                engine.apply([change]);
                published = engine.policy_set().clone();
            });
            times.with_step.push(took + std::mem::take(&mut step));
            times.computed.push(took);
            times.waited.push(due.elapsed());
        } else if let Some(changes) = tenant.take() {
            step = times.step("taking the big change", || {
                engine.apply(changes);
            });
        } else if engine.has_tables_to_prepare() {
            step = times.step("compiling some rules", || {
                if let Some(job) = engine.prepare_tables(RULES_AT_ONCE) {
                    builder.jobs.send(job).expect("the builder runs");
                }
            });
        } else {
            step = Duration::ZERO;
            thread::sleep(Duration::from_micros(200).min(due.saturating_duration_since(Instant::now())));
        }
        if times.big.is_none() && tenant.is_none() && engine.waiting_pods() == 0 {
            times.big = Some(begun.elapsed());
        }
    }
    drop(published);
    times
}

/// This thread's.
fn processor_time() -> Duration {
    let time = nix::time::clock_gettime(nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID).expect("a thread has a clock");
    Duration::from(time)
}

/// One row: the p99 of small changes beside a tenant's.
fn measure(load: Load, what: &str, tenant: Vec<ObjectChange>) -> bool {
    let mut engine = engine(load);
    let times = publish(&mut engine, load, tenant);
    let [waited, computed, with_step] = [times.waited, times.computed, times.with_step].map(|mut times| {
        times.sort_unstable();
        [50, 99, 100].map(|hundredths| times[(times.len() * hundredths / 100).min(times.len() - 1)])
    });
    println!(
        "  {what}: median {:.1?}, worst {:.1?}; by processor time {:.1?}, with the step before p99 {:.1?}, worst {:.1?}; \
         longest step {:.1?}, {}; the big change in effect after {:.0?}, {} pods closed",
        waited[0],
        waited[2],
        computed[0],
        with_step[1],
        with_step[2],
        times.longest.0,
        times.longest.1,
        times.big.unwrap_or_default(),
        engine.closed_pods().len(),
    );
    row(what, format!("{:.3} ms", waited[1].as_secs_f64() * 1e3), "<= 20 ms", waited[1] <= Duration::from_millis(20))
}

pub(crate) fn run(load: Load) -> Vec<bool> {
    let all = load.rules;
    let long = Load { rules: all * 31 / 12, ..load };
    println!("a small change every {:.1?}, from due to published, p99, beside another namespace's", load.every);
    vec![
        measure(load, "nothing", Vec::new()),
        measure(load, &format!("{all} blocks in one policy"), big(load, 1, address)),
        measure(load, &format!("{all} blocks in {} policies", load.policies), big(load, load.policies, address)),
        measure(load, &format!("{} blocks, 11 MiB", long.rules), big(long, load.policies, address)),
        measure(load, "selectors that nobody matches", big(load, load.policies, nobody)),
        measure(load, "selectors that every namespace matches", big(load, load.policies, every_namespace)),
        measure(load, "selectors that everybody matches", big(load, load.policies, everybody)),
    ]
}
