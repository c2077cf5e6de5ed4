//! Penstock in a real cluster of two nodes on this machine: Kubernetes with kubelet, kube-proxy, containerd, runc and CNI
//! plugins, and Penstock's image and manifests. `make test-cluster` builds the parts and runs it; `make test-e2e` and `make conformance`
//! run upstream's suites there, and `make cluster` leaves one up.

mod conformance;
mod control_plane;
mod documented;
mod egress;
mod figures;
mod kubectl;
mod kubernetes;
mod machine;
mod node;
mod real_cluster;
mod records;
mod restarts;
mod rolling;
mod services;
mod shell;
mod side_by_side;
mod suites;
mod tiers;
mod uninstall;
mod whole;

use std::iter::repeat;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use anyhow::Context;
use libtest_mimic::{Arguments, Failed, Trial};

use kubernetes::Kubernetes;
use machine::Machine;
use node::Cni;
use real_cluster::{Parts, RealCluster};

type Test = fn(&mut RealCluster) -> anyhow::Result<()>;

/// Tests of Penstock as it is shipped, in their order; each leaves it so.
const TESTS: [(&str, Test); 26] = [
    ("pods_reach_each_other_as_policy_says", whole::pods_reach_each_other_as_policy_says),
    ("commands_answer_in_the_pods", whole::commands_answer_in_the_pods),
    ("a_deleted_pod_leaves_no_warning", whole::a_deleted_pod_leaves_no_warning),
    ("a_pod_that_starts_without_a_daemon_is_closed", whole::a_pod_that_starts_without_a_daemon_is_closed),
    ("what_policy_denies_stays_denied_without_a_daemon", whole::what_policy_denies_stays_denied_without_a_daemon),
    ("cluster_network_policies_are_in_force", tiers::cluster_network_policies_are_in_force),
    ("conformance_cases_hold", conformance::conformance_cases_hold),
    ("the_first_packet_of_a_new_pod_passes", whole::the_first_packet_of_a_new_pod_passes),
    ("a_cluster_ip_reaches_its_pod_on_this_and_on_another_node", services::a_cluster_ip_reaches_its_pod),
    ("a_first_egress_policy_by_labels_works", egress::a_first_egress_policy_by_labels_works),
    ("a_pod_reaches_itself_through_its_service", services::a_pod_reaches_itself_through_its_service),
    ("the_plugin_answers_for_all_nodes", kubectl::the_plugin_answers_for_all_nodes),
    ("the_plugin_waits_until_a_policy_is_in_force", kubectl::the_plugin_waits_until_a_policy_is_in_force),
    ("the_plugin_counts_hits_of_rules_of_all_nodes", kubectl::the_plugin_counts_hits_of_rules_of_all_nodes),
    ("the_plugin_needs_the_rights_that_are_shipped", kubectl::the_plugin_needs_the_rights_that_are_shipped),
    ("the_plugin_names_a_node_without_a_daemon", kubectl::the_plugin_names_a_node_without_a_daemon),
    ("the_node_reaches_services", services::the_node_reaches_services),
    ("policy_holds_for_clients_of_a_node_port", services::policy_holds_for_clients_of_a_node_port),
    ("policy_holds_for_clients_of_a_host_port", services::policy_holds_for_clients_of_a_host_port),
    (
        "egress_policy_holds_for_node_ports_of_the_own_node",
        services::egress_policy_holds_for_node_ports_of_the_own_node,
    ),
    ("connections_outlast_a_killed_daemon", restarts::connections_outlast_a_killed_daemon),
    ("connections_outlast_a_rolling_restart", restarts::connections_outlast_a_rolling_restart),
    (
        "a_rolling_restart_loses_no_connection_of_slow_pairs",
        restarts::a_rolling_restart_loses_no_connection_of_slow_pairs,
    ),
    ("policy_is_in_force_after_a_restart_without_api_server", restarts::policy_is_in_force_without_api_server),
    ("a_wrong_configuration_leaves_the_last_good_one", restarts::a_wrong_configuration_leaves_the_last_good_one),
    ("connections_pass_while_a_daemon_takes_over", restarts::connections_pass_while_a_daemon_takes_over),
];

/// Some of the suites that others wrote, of those with the CNI plugin that they run with.
const QUICK: [(&str, Test); 1] = [("ten_of_each_suite_pass", suites::ten_of_each_suite_pass)];

/// These suites whole, each if `PENSTOCK_SUITES` names it.
const SUITES: [(&str, Test); 3] = [
    ("network_policy", suites::network_policy),
    ("sig_network", suites::sig_network),
    ("cluster_network_policy", suites::cluster_network_policy),
];

/// Tests of what is off by default. They switch it on, and leave it so: an update takes a kubelet half a minute. The first one sees the
/// daemons start.
const OFF_BY_DEFAULT: [(&str, Test); 4] = [
    ("a_ready_daemon_removes_the_startup_taint", whole::a_ready_daemon_removes_the_startup_taint),
    ("flow_records_name_pods_and_their_nodes", records::flow_records_name_pods_and_their_nodes),
    ("the_plugin_captures_and_tries_on_all_nodes", kubectl::the_plugin_captures_and_tries_on_all_nodes),
    (
        "a_rolling_update_cuts_only_connections_of_ended_pods",
        rolling::a_rolling_update_cuts_only_connections_of_ended_pods,
    ),
];

/// Tests that take Penstock away.
const REMOVALS: [(&str, Test); 3] = [
    ("the_documented_commands_remove_and_install", uninstall::the_documented_commands_remove_and_install),
    ("helm_installs_changes_and_removes", uninstall::helm_installs_changes_and_removes),
    ("nothing_is_left_on_a_node_after_uninstall", uninstall::nothing_is_left_on_a_node),
];

/// The measurements of `make bench-cluster`.
const FIGURES: [(&str, Test); 1] = [("figures", figures::figures)];

/// `PENSTOCK_KUBERNETES`: the programs of Kubernetes, and etcd. `PENSTOCK_KUBE_PROXY_MODE`: iptables, or nftables.
/// `PENSTOCK_IMAGES`: archives of images.
fn parts() -> anyhow::Result<Parts> {
    let folder = |variable: &str| std::env::var_os(variable).map(PathBuf::from);
    let folders = folder("PENSTOCK_KUBERNETES").zip(folder("PENSTOCK_IMAGES"));
    let (programs, images) =
        folders.context("PENSTOCK_KUBERNETES and PENSTOCK_IMAGES are not set: run it by `make test-cluster`")?;
    let mode = std::env::var("PENSTOCK_KUBE_PROXY_MODE").ok();
    Ok(Parts { kubernetes: Kubernetes::find(&programs, mode.as_deref())?, images })
}

/// Tests that follow each other.
struct Group {
    tests: Vec<(&'static str, Test)>,
    /// With which CNI plugins.
    cnis: &'static [Cni],
    /// Whether they want Penstock as it is shipped.
    as_shipped: bool,
}

impl Group {
    fn new(tests: &[(&'static str, Test)], cnis: &'static [Cni], as_shipped: bool) -> Self {
        Self { tests: tests.to_vec(), cnis, as_shipped }
    }
}

/// The tests that run.
fn groups() -> Vec<Group> {
    if std::env::var_os("PENSTOCK_FIGURES").is_some() {
        return vec![Group::new(&FIGURES, &Cni::ALL, true)];
    }
    if let Ok(named) = std::env::var("PENSTOCK_SUITES") {
        let is_named = |(name, _): &&(&str, Test)| named.split(',').any(|one| one == *name);
        let tests: Vec<_> = SUITES.iter().filter(is_named).copied().collect();
        return vec![Group::new(&tests, &[Cni::Ptp], true)];
    }
    vec![
        Group::new(&TESTS, &Cni::ALL, true),
        Group::new(&QUICK, &[Cni::Ptp], true),
        Group::new(&OFF_BY_DEFAULT, &Cni::ALL, false),
        Group::new(&REMOVALS, &Cni::ALL, false),
    ]
}

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let parts = parts().map_err(|error| format!("{error:#}"));
    if std::env::var_os("PENSTOCK_STAY").is_some() {
        return stay(parts);
    }
    let is_whole = ["PENSTOCK_FIGURES", "PENSTOCK_SUITES"].iter().all(|variable| std::env::var_os(variable).is_none());
    let runs_all =
        arguments.filter.is_none() && arguments.skip.is_empty() && arguments.include_ignored && !arguments.list;
    if runs_all && is_whole {
        return side_by_side::run();
    }
    // One cluster at a time: the one of the tests that run. It ends with the process that the last test leaves.
    let running: Arc<Mutex<Option<RealCluster>>> = Arc::default();
    let mut trials = Vec::new();
    let groups = groups();
    for cni in Cni::ALL {
        let of_cni = groups.iter().filter(|group| group.cnis.contains(&cni));
        for (&(name, test), as_shipped) in of_cni.flat_map(|group| group.tests.iter().zip(repeat(group.as_shipped))) {
            let (running, parts) = (Arc::clone(&running), parts.clone());
            let run = move || {
                let began = Instant::now();
                let result = run(&running, &parts?, cni, as_shipped, test);
                eprintln!("{}::{name}: {:.0?}", cni.name(), began.elapsed());
                result
            };
            trials.push(Trial::test(format!("{}::{name}", cni.name()), run).with_ignored_flag(true));
        }
    }
    let before = Machine::now();
    let after = Arc::clone(&running);
    let nothing_is_left = move || {
        drop(after.lock().unwrap_or_else(PoisonError::into_inner).take());
        before.and_then(|machine| machine.expect_unchanged()).map_err(|error| format!("{error:#}").into())
    };
    trials.push(Trial::test("nothing_is_left_on_the_machine", nothing_is_left).with_ignored_flag(true));
    // In order, and on this thread: the cluster's processes end with the thread that has started them.
    let conclusion = libtest_mimic::run(&Arguments { test_threads: Some(1), ..arguments }, trials);
    drop(running.lock().unwrap_or_else(PoisonError::into_inner).take());
    conclusion.exit_code()
}

/// Runs a test in the cluster with this CNI plugin, which is started if it does not run.
fn run(
    running: &Mutex<Option<RealCluster>>,
    parts: &Parts,
    cni: Cni,
    as_shipped: bool,
    test: Test,
) -> Result<(), Failed> {
    let mut running = running.lock().unwrap_or_else(PoisonError::into_inner);
    if running.as_ref().is_none_or(|cluster| cluster.cni != cni) {
        *running = None;
        let cluster = RealCluster::start(parts, cni)?;
        cluster.install()?;
        *running = Some(cluster);
    }
    let cluster = running.as_mut().ok_or("no cluster")?;
    let prepared = if as_shipped { cluster.switch_to_defaults() } else { Ok(()) };
    prepared.and_then(|()| test(cluster)).map_err(|error| {
        if std::env::var_os("KEEP").is_some() {
            cluster.keep(&format!("{error:#}"));
        }
        format!("{error:#}").into()
    })
}

/// A cluster with Penstock as it is shipped, with names resolved, until Ctrl-C.
fn stay(parts: Result<Parts, String>) -> ExitCode {
    let started = parts.map_err(anyhow::Error::msg).and_then(|parts| {
        let cluster = RealCluster::start(&parts, Cni::Ptp)?;
        cluster.install()?;
        cluster.start_dns()?;
        Ok(cluster)
    });
    match started {
        Ok(cluster) => cluster.keep("Penstock is installed, and the workload of the tests runs."),
        Err(error) => eprintln!("{error:#}"),
    }
    ExitCode::FAILURE
}
