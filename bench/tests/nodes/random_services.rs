//! Services and policies made at random, on two nodes beside kube-proxy's rules: whoever translates, each pod reaches by a Service what policy
//! lets it reach without one.
//!
//! A failure prints its seed and the policies that are enough for it. `SERVICES_SEED` repeats it; the longer test runs for
//! `SERVICES_SECONDS`.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use penstock_bench::cluster::read_objects;
use penstock_bench::expectation::PolicyOracle;
use penstock_bench::matrix::{Matrix, MatrixEntry};
use penstock_bench::probe::{Frontend, ProbeOutcome, Protocol};
use penstock_bench::testbed::ProxyMode;
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use crate::nodes::fixture::{Fixture, SERVICES, Wiring};

const CLUSTER: &str = include_str!("two-nodes.yaml");
/// Where Services answer: pods of both nodes, and a node's own processes.
const BACKENDS: [[&str; 2]; 7] = [
    ["10.244.1.10", "fd00:10:244:1::10"],
    ["10.244.1.11", "fd00:10:244:1::11"],
    ["10.244.1.12", "fd00:10:244:1::12"],
    ["10.244.2.10", "fd00:10:244:2::10"],
    ["10.244.2.11", "fd00:10:244:2::11"],
    ["10.244.2.12", "fd00:10:244:2::12"],
    ["172.18.2.2", "fd00:172:18:2::2"],
];
const PODS: [(&str, &str); 4] = [("shop", "web"), ("shop", "db"), ("ops", "monitor"), ("ops", "lab")];
/// States of policies on one pair of nodes.
const STATES: usize = 3;

struct Maker(SmallRng);

impl Maker {
    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        *of.choose(&mut self.0).unwrap()
    }

    /// Four Services, each with one backend.
    fn services(&mut self) -> String {
        let mut yaml = String::new();
        for number in 0..4 {
            let backend = self.pick(&BACKENDS);
            let (last, node_port) = (10 + number, 30_000 + 10 * number);
            let _ = write!(
                yaml,
                "---\napiVersion: v1\nkind: Service\nmetadata: {{namespace: shop, name: s{number}}}\n\
                 spec: {{type: NodePort, clusterIPs: [10.96.0.{last}, \"fd00:10:96::{last}\"], ports: [\
                 {{name: http, port: 80, nodePort: {node_port}}}, {{name: dns, protocol: UDP, port: 53, nodePort: {node_port}}}, \
                 {{name: sctp, protocol: SCTP, port: 99, nodePort: {node_port}}}]}}\n"
            );
            for (family, address) in ["IPv4", "IPv6"].into_iter().zip(backend) {
                let _ = write!(
                    yaml,
                    "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
                     metadata: {{namespace: shop, name: s{number}-{}, labels: {{kubernetes.io/service-name: s{number}}}}}\n\
                     addressType: {family}\nendpoints: [{{addresses: ['{address}']}}]\n\
                     ports: [{{name: http, port: 8080}}, {{name: dns, protocol: UDP, port: 53}}, {{name: sctp, protocol: SCTP, port: 9090}}]\n",
                    family.to_lowercase()
                );
            }
        }
        yaml
    }

    fn rule(&mut self, side: &str) -> String {
        let (namespace, app) = self.pick(&PODS);
        let pods = format!(
            "{{namespaceSelector: {{matchLabels: {{team: {namespace}}}}}, podSelector: {{matchLabels: {{app: {app}}}}}}}"
        );
        let cluster_addresses = "{ipBlock: {cidr: 10.96.0.0/16}}, {ipBlock: {cidr: \"fd00:10:96::/112\"}}";
        let all_but_a_node = "{ipBlock: {cidr: 0.0.0.0/0, except: [10.244.2.0/24]}}, \
                              {ipBlock: {cidr: \"::/0\", except: [\"fd00:10:244:2::/64\"]}}";
        let peers = self.pick(&[pods.as_str(), &pods, &pods, cluster_addresses, all_but_a_node]);
        let ports = self.pick(&[
            "",
            "",
            ", ports: [{port: 8080}]",
            ", ports: [{port: 80}, {port: 53, protocol: UDP}]",
            ", ports: [{port: 8000, endPort: 9999, protocol: TCP}, {port: 9090, protocol: SCTP}]",
            ", ports: [{port: sql}]",
        ]);
        format!("{{{side}: [{peers}]{ports}}}")
    }

    fn policies(&mut self) -> Vec<String> {
        let count = self.0.random_range(2..7);
        (0..count)
            .map(|number| {
                let (namespace, app) = self.pick(&PODS);
                let (kind, field, side) = self.pick(&[("Ingress", "ingress", "from"), ("Egress", "egress", "to")]);
                let rules: Vec<String> = (0..self.0.random_range(0..3)).map(|_| self.rule(side)).collect();
                format!(
                    "---\napiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{namespace: {namespace}, name: n{number}}}\n\
                     spec: {{podSelector: {{matchLabels: {{app: {app}}}}}, policyTypes: [{kind}], {field}: [{}]}}\n",
                    rules.join(", ")
                )
            })
            .collect()
    }
}

/// Two nodes with Services.
struct Pair {
    fixture: Fixture,
    /// By node, where Services answer.
    frontends: Vec<Vec<Frontend>>,
}

impl Pair {
    fn start(services: &str, mode: ProxyMode) -> Self {
        // With the policies of its own.
        let cluster = CLUSTER.split("---\n").filter(|document| !document.contains("kind: NetworkPolicy"));
        let yaml = cluster.collect::<Vec<_>>().join("---\n") + services;
        let wiring = Wiring::tunnelled();
        let fixture = Fixture::start_with(&yaml, wiring, &SERVICES, |_| {});
        let frontends = fixture.nodes.proxy_services(&fixture.manifests, mode).unwrap();
        Self { fixture, frontends }
    }

    /// Where pods find something else than policy says, and how many probes were answered and how many were not. A node port is judged at both ends
    /// where both are on its node: another one sees the address of this.
    fn differences(&self, policies: &[String], number: usize) -> (Vec<String>, [usize; 2]) {
        // A change that every node notices.
        let mark = format!(
            "---\napiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{namespace: ops, name: mark-{number}}}\n\
             spec: {{podSelector: {{matchLabels: {{app: nobody}}}}}}\n"
        );
        self.fixture.publish("policies.yaml", &(policies.concat() + &mark));
        let oracle = PolicyOracle::new(&read_objects(&self.fixture.manifests).unwrap());
        let (mut differences, mut counts) = (Vec::new(), [0, 0]);
        for (node, frontends) in self.frontends.iter().enumerate() {
            let matrix = Matrix::between(&self.fixture.sites, frontends, &oracle, &[] as &[Protocol]).unwrap();
            let is_asked = |entry: &&MatrixEntry| {
                let (from, to) = (self.fixture.node_of(entry.probe.from), self.fixture.node_of(entry.probe.to));
                let is_node_port = entry.frontend.is_some_and(|at| frontends[at].name.starts_with("NodePort/"));
                let is_pod = self.fixture.sites[entry.probe.from].name.contains('/');
                is_pod && from == Some(node) && (!is_node_port || to == from)
            };
            for entry in matrix.entries().iter().filter(is_asked) {
                counts[usize::from(entry.outcome == ProbeOutcome::Silent)] += 1;
                if !entry.agrees() {
                    let from = &self.fixture.sites[entry.probe.from].name;
                    differences
                        .push(format!("{from} to {:?}: {entry:?}", entry.frontend.map(|at| &frontends[at].name)));
                }
            }
        }
        (differences, counts)
    }
}

/// Plays one seed on new nodes.
fn play(seed: u64) {
    let mut maker = Maker(SmallRng::seed_from_u64(seed));
    let services = maker.services();
    let mode = if seed.is_multiple_of(2) { ProxyMode::Nftables } else { ProxyMode::Iptables };
    let pair = Pair::start(&services, mode);
    let mut all = [0, 0];
    for state in 0..STATES {
        let policies = maker.policies();
        let (differences, counts) = pair.differences(&policies, state);
        if !differences.is_empty() {
            fail(seed, &pair, (&differences, &policies), &services);
        }
        all = [all[0] + counts[0], all[1] + counts[1]];
    }
    assert!(all[0] > 20 && all[1] > 20, "seed {seed}: {} answered, {} not", all[0], all[1]);
}

/// Fails with the policies that are enough for a difference.
fn fail(seed: u64, pair: &Pair, (differences, policies): (&[String], &[String]), services: &str) -> ! {
    let (mut enough, mut tries) = (policies.to_vec(), STATES);
    let mut at = 0;
    while at < enough.len() {
        let mut without = enough.clone();
        without.remove(at);
        tries += 1;
        if pair.differences(&without, tries).0.is_empty() {
            at += 1;
        } else {
            enough = without;
        }
    }
    panic!(
        "SERVICES_SEED={seed}:\n{}\n\nthese policies are enough:\n{}\nwith the Services\n{services}\n{}",
        differences.join("\n"),
        enough.concat(),
        pair.fixture.logs()
    );
}

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number")))
}

/// A seed for each mode of kube-proxy.
#[test]
fn random_services_are_judged_for_who_answers() {
    let seeds = variable("SERVICES_SEED").map_or_else(|| vec![0, 1], |seed| vec![seed]);
    seeds.into_iter().for_each(play);
}

#[test]
#[ignore = "takes minutes"]
fn random_services_are_judged_for_who_answers_for_long() {
    let until = Instant::now() + Duration::from_secs(variable("SERVICES_SECONDS").unwrap_or(120));
    let mut seed = variable("SERVICES_SEED").unwrap_or_else(|| rand::rng().random_range(100..u64::from(u32::MAX)));
    while Instant::now() < until {
        eprintln!("seed {seed}");
        play(seed);
        seed += 1;
    }
}
