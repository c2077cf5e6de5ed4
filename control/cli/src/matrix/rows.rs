//! The rows of the matrix, which are its columns too: equal pods are one. What is asked of policy is asked once for each pair of
//! classes of pods, however many pods there are.

use std::collections::{BTreeMap, BTreeSet};

use penstock_dataplane::packet::{Flow, Protocol};
use penstock_policy::classes::{PodClasses, workload_labels};
use penstock_policy::engine::Engine;
use penstock_policy::flow::{self, FlowEndpoint, FlowError, ProtocolPort};
use penstock_policy::model::{Labels, ObjectKey, PolicyPorts, PortMatch, PortProtocol};
use penstock_policy::state::ClusterState;

/// Pods of one namespace with equal labels that policy does not tell apart.
pub(super) struct Row {
    /// By name, at least one.
    pub(super) pods: Vec<ObjectKey>,
    /// Its class, counted from 0 among those that are shown.
    pub(super) class: usize,
    /// Whether `--pod` names one of them, or nothing is chosen by `--pod`.
    pub(super) is_chosen: bool,
}

impl Row {
    pub(super) fn namespace(&self) -> &str {
        &self.pods[0].namespace
    }

    /// `web-1`, `web-1 (3)`.
    pub(super) fn name(&self) -> String {
        match self.pods.len() {
            1 => self.pods[0].name.clone(),
            count => format!("{} ({count})", self.pods[0].name),
        }
    }
}

/// The combined verdict of a cell for all ports.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Cell {
    Every,
    Some,
    No,
    /// The same pod.
    Itself,
    /// No such flow.
    Nothing,
}

pub(super) struct Matrix<'a> {
    pub(super) engine: &'a Engine,
    pub(super) rows: Vec<Row>,
    /// The pods that policy does not see, and why.
    pub(super) unseen: Vec<(ObjectKey, &'static str)>,
    pub(super) ports: Vec<ProtocolPort>,
    /// A pod of each class, and another if there is one.
    examples: Vec<(ObjectKey, Option<ObjectKey>)>,
    cells: Vec<Option<Cell>>,
}

impl<'a> Matrix<'a> {
    /// All pods, or those of some namespaces. Where pods are named, only what they reach and what reaches them is shown.
    pub(super) fn new(
        engine: &'a Engine,
        ports: Vec<ProtocolPort>,
        namespaces: &[String],
        pods: &[ObjectKey],
    ) -> Result<Self, NoSuchRow> {
        let (mut rows, mut unseen) = rows(engine, namespaces);
        let is_unknown = |namespace: &&String| {
            !rows.iter().any(|row| row.namespace() == *namespace)
                && !unseen.iter().any(|(pod, _)| pod.namespace == **namespace)
        };
        if let Some(namespace) = namespaces.iter().find(is_unknown) {
            return Err(NoSuchRow::Namespace(namespace.clone()));
        }
        for pod in pods {
            let found = rows.iter_mut().find(|row| row.pods.binary_search(pod).is_ok());
            match found {
                Some(row) => row.is_chosen = true,
                None => return Err(no_such_pod(engine.state(), &unseen, pod)),
            }
        }
        if pods.is_empty() {
            rows.iter_mut().for_each(|row| row.is_chosen = true);
        } else {
            unseen.clear();
        }
        let examples = number_classes(&mut rows);
        let ports = if ports.is_empty() { all_ports(engine) } else { ports };
        let cells = vec![None; examples.len() * examples.len()];
        Ok(Self { engine, rows, unseen, ports, examples, cells })
    }

    pub(super) fn classes(&self) -> usize {
        self.examples.len()
    }

    /// The combined verdict from the pods of one row to those of another.
    pub(super) fn cell(&mut self, row: usize, column: usize) -> Cell {
        if row == column && self.rows[row].pods.len() == 1 {
            return Cell::Itself;
        }
        let (from, to) = (self.rows[row].class, self.rows[column].class);
        let place = from * self.examples.len() + to;
        if let Some(known) = self.cells[place] {
            return known;
        }
        let (mut allowed, mut denied) = (false, false);
        for flow in self.ports.iter().flat_map(|port| self.flows(from, to, port)) {
            match self.engine.evaluate(&flow).is_allowed() {
                true => allowed = true,
                false => denied = true,
            }
        }
        let found = match (allowed, denied) {
            (true, false) => Cell::Every,
            (true, true) => Cell::Some,
            (false, true) => Cell::No,
            (false, false) => Cell::Nothing,
        };
        self.cells[place] = Some(found);
        found
    }

    /// The flows from a pod of one class to another pod, by each pair of their addresses. None where there can be none: the two
    /// have no address family in common, the receiver has no port of this name, or a class has one pod alone.
    pub(super) fn flows(&self, from: usize, to: usize, port: &ProtocolPort) -> Vec<Flow> {
        let ((sender, _), (first, second)) = (&self.examples[from], &self.examples[to]);
        let receiver = if from == to { second.as_ref() } else { Some(first) };
        let Some(receiver) = receiver else { return Vec::new() };
        let end = |pod: &ObjectKey| FlowEndpoint::Pod(pod.clone());
        flow::flows(self.engine.state(), &end(sender), &end(receiver), port).unwrap_or_default()
    }

    /// For how many pairs of classes policy was asked.
    #[cfg(test)]
    fn asked(&self) -> usize {
        self.cells.iter().flatten().count()
    }
}

#[derive(Debug, thiserror::Error)]
pub(super) enum NoSuchRow {
    #[error("--namespace {0}: no pod is in it: correct its name")]
    Namespace(String),
    #[error("--pod {0} {1}: name another pod")]
    Unseen(ObjectKey, &'static str),
    #[error("--pod {0} is in no namespace that --namespace names: name its own, too")]
    Left(ObjectKey),
    #[error("--pod: {0}")]
    Unknown(FlowError),
}

fn no_such_pod(state: &ClusterState, unseen: &[(ObjectKey, &'static str)], pod: &ObjectKey) -> NoSuchRow {
    match unseen.iter().find(|(other, _)| other == pod) {
        Some((_, why)) => NoSuchRow::Unseen(pod.clone(), why),
        None => match flow::addresses(state, &FlowEndpoint::Pod(pod.clone())) {
            Ok(_) => NoSuchRow::Left(pod.clone()),
            Err(error) => NoSuchRow::Unknown(error),
        },
    }
}

/// The pods of these namespaces, or of all, by namespace and name of the first of equal ones; and those that policy does not see.
fn rows(engine: &Engine, namespaces: &[String]) -> (Vec<Row>, Vec<(ObjectKey, &'static str)>) {
    let classes = PodClasses::of(engine);
    let mut found: BTreeMap<(&str, Labels, usize), Vec<ObjectKey>> = BTreeMap::new();
    let mut unseen = Vec::new();
    let is_wanted = |namespace: &String| namespaces.is_empty() || namespaces.contains(namespace);
    for (id, pod) in engine.state().pods().filter(|(_, pod)| is_wanted(&pod.key.namespace)) {
        let why = match (pod, classes.get(id)) {
            (pod, _) if pod.host_network => "is in the host network: to policy it is its node",
            (pod, _) if pod.finished => "has finished",
            (pod, Some(class)) if !pod.addresses.is_empty() => {
                let like = (pod.key.namespace.as_str(), workload_labels(&pod.labels), class);
                found.entry(like).or_default().push(pod.key.clone());
                continue;
            }
            _ => "has no address yet",
        };
        unseen.push((pod.key.clone(), why));
    }
    let row = |((_, _, class), mut pods): (_, Vec<ObjectKey>)| {
        pods.sort_unstable();
        Row { pods, class, is_chosen: false }
    };
    let mut rows: Vec<Row> = found.into_iter().map(row).collect();
    rows.sort_unstable_by(|a, b| a.pods.cmp(&b.pods));
    unseen.sort_unstable();
    (rows, unseen)
}

/// Counts the classes of these rows from 0. Returns two pods of each.
fn number_classes(rows: &mut [Row]) -> Vec<(ObjectKey, Option<ObjectKey>)> {
    let mut numbers: BTreeMap<usize, usize> = BTreeMap::new();
    let mut examples: Vec<(ObjectKey, Option<ObjectKey>)> = Vec::new();
    for row in rows {
        let number = *numbers.entry(row.class).or_insert(examples.len());
        let mut pods = row.pods.iter().cloned();
        if number == examples.len() {
            examples.push((pods.next().expect("a row has a pod"), None));
        }
        let second = &mut examples[number].1;
        *second = second.take().or_else(|| pods.next());
        row.class = number;
    }
    examples
}

/// Every port that a pod has a name for, and every number at which a policy's range begins. If there is none, all that
/// policy distinguishes is the pods, and any port shows that.
fn all_ports(engine: &Engine) -> Vec<ProtocolPort> {
    let number = |protocol: PortProtocol, number| {
        ProtocolPort::number(penstock_dataplane::policy::PortProtocol::from(protocol).number(), number)
    };
    let state = engine.state();
    let mut ports: BTreeSet<ProtocolPort> =
        state.pods().flat_map(|(_, pod)| &pod.ports).map(|port| number(port.protocol, port.number)).collect();
    let of_network = state.policies().flat_map(|(policy, _)| policy.ingress.iter().chain(&policy.egress).flatten());
    let of_cluster = state.cluster_policies().flat_map(|(policy, _)| policy.ingress.iter().chain(&policy.egress));
    for rule in of_network.chain(of_cluster.map(|rule| &rule.matches)) {
        if let PolicyPorts::AnyOf(of_rule) = &rule.ports {
            ports.extend(of_rule.iter().filter_map(|port| match port.which {
                PortMatch::Range { first, .. } => Some(number(port.protocol, first)),
                PortMatch::Every | PortMatch::Name(_) => None,
            }));
        }
    }
    if ports.is_empty() {
        ports.insert(ProtocolPort::number(Protocol::TCP, 80));
    }
    ports.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use penstock_policy::engine::EngineSettings;
    use penstock_policy::model::{Namespace, NetworkPolicy, Object, ObjectChange, Pod, Requirement, Selector, Staging};

    use super::*;

    const NAMESPACES: u8 = 10;
    const WORKLOADS: u8 = 10;
    const REPLICAS: u8 = 30;

    fn labels(app: u8) -> Labels {
        [("app".to_owned(), format!("app-{app}"))].into()
    }

    fn selecting(app: u8) -> Selector {
        let operator = penstock_policy::model::LabelOperator::In(vec![format!("app-{app}")]);
        Selector { requirements: vec![Requirement { key: "app".to_owned(), operator }] }
    }

    /// 3,000 pods: in each namespace the replicas of ten workloads, of which the first admits only the second.
    fn engine() -> Engine {
        use penstock_policy::model::{Peer, Peers, Rule};
        let mut objects = Vec::new();
        for space in 0..NAMESPACES {
            let (name, labels_of_namespace) = (format!("ns-{space}"), Labels::new());
            let namespace = Namespace {
                name: name.clone(),
                labels: labels_of_namespace,
                default_deny_ingress: false,
                terminating: false,
            };
            objects.push(Object::Namespace(namespace));
            let from = Rule { peers: Peers::AnyOf(vec![Peer::Pods(selecting(1))]), ports: PolicyPorts::Every };
            objects.push(Object::NetworkPolicy(NetworkPolicy {
                key: ObjectKey { namespace: name.clone(), name: "in".to_owned() },
                pod_selector: selecting(0),
                isolates: true,
                ingress: Some(vec![from]),
                egress: None,
                staging: Staging::InForce,
                notes: Default::default(),
            }));
            for (app, replica) in (0..WORKLOADS).flat_map(|app| (0..REPLICAS).map(move |replica| (app, replica))) {
                let mut labels = labels(app);
                labels.insert("pod-template-hash".to_owned(), format!("{}", replica % 2));
                objects.push(Object::Pod(Pod {
                    key: ObjectKey { namespace: name.clone(), name: format!("app-{app}-{replica}") },
                    labels,
                    node: Some(format!("n{replica}")),
                    addresses: vec![[10, space, app, replica + 1].into()],
                    ..Pod::default()
                }));
            }
        }
        let mut engine = Engine::new(EngineSettings::for_all_pods());
        engine.apply(objects.into_iter().map(ObjectChange::Set));
        engine
    }

    #[test]
    fn three_thousand_pods_are_a_hundred_rows_and_few_questions() {
        let engine = engine();
        assert_eq!(engine.state().pods().count(), 3000);
        let mut matrix = Matrix::new(&engine, Vec::new(), &[], &[]).unwrap();
        assert_eq!(matrix.rows.len(), 100);
        let text = super::super::table::render(&mut matrix);
        assert!(text.len() < 100_000, "{} bytes", text.len());
        // Two for each namespace, the isolated and the admitted workload, and one for all that no policy is about.
        assert_eq!(matrix.classes(), 21);
        assert_eq!(matrix.asked(), 21 * 21);
        let cells = text.rsplit_once("\n\n").unwrap().0;
        assert_eq!(cells.matches("  .").count(), 10 * 99, "each isolated workload denies all but one");
        let page = super::super::html::render(&matrix);
        assert!(page.len() < 200_000, "{} bytes", page.len());
    }

    #[test]
    fn chosen_namespaces_and_pods_are_all_that_is_shown() {
        let engine = engine();
        let shop = ["ns-3".to_owned()];
        let pod = |name: &str| ObjectKey { namespace: "ns-3".to_owned(), name: name.to_owned() };
        let matrix = Matrix::new(&engine, Vec::new(), &shop, &[]).unwrap();
        assert_eq!((matrix.rows.len(), matrix.classes()), (10, 3));
        let one = Matrix::new(&engine, Vec::new(), &shop, &[pod("app-1-7")]).unwrap();
        let chosen: Vec<String> = one.rows.iter().filter(|row| row.is_chosen).map(Row::name).collect();
        assert_eq!(chosen, ["app-1-0 (30)"]);
        for (namespaces, pods, error) in [
            (&["ns-30".to_owned()][..], None, "--namespace ns-30: no pod is in it: correct its name"),
            (&shop, Some("app-99"), "--pod: pod ns-3/app-99 is unknown: correct its name, or use an address"),
            (
                &["ns-4".to_owned()],
                Some("app-1-7"),
                "--pod ns-3/app-1-7 is in no namespace that --namespace names: name its own, too",
            ),
        ] {
            let pods: Vec<ObjectKey> = pods.into_iter().map(pod).collect();
            let found = Matrix::new(&engine, Vec::new(), namespaces, &pods).err().map(|error| error.to_string());
            assert_eq!(found.as_deref(), Some(error));
        }
    }
}
