//! The matrix as a page that needs nothing but itself.
//!
//! The page holds the verdicts and reasons of all ports as data, each different reason once; its script draws the table
//! and filters it.

use std::collections::HashMap;

use penstock_policy::engine::{DirectionExplanation, Engine};
use penstock_policy::flow::ProtocolPort;
use serde::Serialize;

use super::Matrix;

const PAGE: &str = include_str!("page.html");
/// Placeholder for the data in the page.
const PLACE: &str = "\"MATRIX DATA\"";

#[derive(Serialize)]
struct Data {
    pods: Vec<Pod>,
    unseen: Vec<String>,
    ports: Vec<String>,
    /// Every text that a side's explanation has.
    reasons: Vec<String>,
    /// A cell's outcome: allowed, reason of the egress side, reason of the ingress side.
    outcomes: Vec<(bool, usize, usize)>,
    /// By port, then row, then column: the outcome, or -1 where there is no such flow.
    cells: Vec<Vec<i64>>,
}

#[derive(Serialize)]
struct Pod {
    namespace: String,
    name: String,
    addresses: Vec<String>,
}

/// Different values, each once, by the order in which they came.
struct Distinct<T> {
    values: Vec<T>,
    places: HashMap<T, usize>,
}

impl<T: Clone + Eq + std::hash::Hash> Distinct<T> {
    fn new() -> Self {
        Self { values: Vec::new(), places: HashMap::new() }
    }

    fn place(&mut self, value: T) -> usize {
        *self.places.entry(value).or_insert_with_key(|value| {
            self.values.push(value.clone());
            self.values.len() - 1
        })
    }
}

pub(super) fn render(engine: &Engine, matrix: &Matrix) -> String {
    let (mut reasons, mut outcomes) = (Distinct::new(), Distinct::new());
    let places = 0..matrix.pods.len();
    let pairs: Vec<(usize, usize)> =
        places.clone().flat_map(|row| places.clone().map(move |column| (row, column))).collect();
    let mut cells_of = |service: &ProtocolPort| -> Vec<i64> {
        let cell = |(row, column): &(usize, usize)| {
            let flows = matrix.flows(engine, *row, *column, service);
            let explained = flows.iter().map(|flow| engine.explain(flow));
            // With several address families, one that is denied.
            let Some(explanation) = explained.min_by_key(|explanation| explanation.verdict.is_allowed()) else {
                return -1;
            };
            let (egress, ingress) = (reason(&explanation.egress), reason(&explanation.ingress));
            let outcome = (explanation.verdict.is_allowed(), reasons.place(egress), reasons.place(ingress));
            outcomes.place(outcome) as i64
        };
        pairs.iter().map(cell).collect()
    };
    let cells = matrix.services.iter().map(&mut cells_of).collect();
    let data = Data {
        pods: pods(engine, matrix),
        unseen: matrix.unseen.iter().map(|(pod, why)| format!("{pod} {why}")).collect(),
        ports: matrix.services.iter().map(ToString::to_string).collect(),
        reasons: reasons.values,
        outcomes: outcomes.values,
        cells,
    };
    let json = serde_json::to_string(&data).expect("strings and numbers are JSON");
    // Inside a script element, only `<` could end it.
    PAGE.replace(PLACE, &json.replace('<', "\\u003c"))
}

fn pods(engine: &Engine, matrix: &Matrix) -> Vec<Pod> {
    let pod = |key: &penstock_policy::model::ObjectKey| {
        let found = engine.state().find_pod(key).and_then(|pod| engine.state().pod(pod));
        let addresses = found.into_iter().flat_map(|pod| &pod.addresses).map(ToString::to_string).collect();
        Pod { namespace: key.namespace.clone(), name: key.name.clone(), addresses }
    };
    matrix.pods.iter().map(pod).collect()
}

fn reason(side: &DirectionExplanation) -> String {
    use penstock_dataplane::policy::DirectionVerdict;
    let policies = side.policies.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    match (&side.verdict, &side.rule, &side.nearest) {
        (DirectionVerdict::Open, ..) => "open: no policy isolates the pod".to_owned(),
        (DirectionVerdict::NotLocal, ..) => "not a pod: no policy applies to it".to_owned(),
        (DirectionVerdict::NotReady, ..) => "denied: the pod's policies are not known yet".to_owned(),
        (DirectionVerdict::Default, ..) => "allowed: no rule of any tier decides".to_owned(),
        (DirectionVerdict::Postponed, ..) => "allowed to the Service's address: policy is for what answers".to_owned(),
        (DirectionVerdict::DeniedBy(_), Some(rule), _) => format!("denied by {rule}"),
        (DirectionVerdict::DeniedBy(_), None, _) => "denied".to_owned(),
        (DirectionVerdict::Exempt, ..) => "always allowed: a pod with itself".to_owned(),
        (DirectionVerdict::Allowed(_), Some(rule), _) => format!("allowed by {rule}"),
        (DirectionVerdict::AllowedByPeer(_), Some(rule), _) => format!("allowed by {rule} of the other side"),
        (DirectionVerdict::Denied, _, Some(near)) => format!("denied, isolated by {policies}; nearest {}", near.rule),
        (DirectionVerdict::Denied, ..) if side.default_deny => {
            "denied by the DefaultDeny annotation of the namespace".to_owned()
        }
        (DirectionVerdict::Denied, ..) => format!("denied, isolated by {policies}, without a rule for this direction"),
        (DirectionVerdict::Allowed(_) | DirectionVerdict::AllowedByPeer(_), None, _) => "allowed".to_owned(),
    }
}
