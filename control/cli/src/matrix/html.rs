//! The matrix as a page that needs nothing but itself.
//!
//! The page holds the verdicts and reasons of all ports as data, each different reason once, and each pair of classes of
//! pods once; its script draws the table and filters it.

use std::collections::HashMap;

use penstock_policy::engine::DirectionExplanation;
use penstock_policy::flow::ProtocolPort;
use serde::Serialize;

use super::rows::{Matrix, Row};

const PAGE: &str = include_str!("page.html");
const PLACE: &str = "\"MATRIX DATA\"";

#[derive(Serialize)]
struct Data {
    rows: Vec<PageRow>,
    classes: usize,
    unseen: Vec<String>,
    ports: Vec<String>,
    /// Every text that a side's explanation has.
    reasons: Vec<String>,
    /// A cell's outcome: allowed, reason of the egress side, reason of the ingress side.
    outcomes: Vec<(bool, usize, usize)>,
    /// By port, then class of the sender, then of the receiver: the outcome, or -1 where there is no such flow.
    cells: Vec<Vec<i64>>,
}

/// Equal pods.
#[derive(Serialize)]
struct PageRow {
    namespace: String,
    name: String,
    pods: Vec<String>,
    class: usize,
    /// The addresses of a pod that is alone.
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

pub(super) fn render(matrix: &Matrix) -> String {
    let (mut reasons, mut outcomes) = (Distinct::new(), Distinct::new());
    let classes = 0..matrix.classes();
    let pairs: Vec<(usize, usize)> =
        classes.clone().flat_map(|from| classes.clone().map(move |to| (from, to))).collect();
    let mut cells_of = |port: &ProtocolPort| -> Vec<i64> {
        let cell = |(from, to): &(usize, usize)| {
            let flows = matrix.flows(*from, *to, port);
            let explained = flows.iter().map(|flow| matrix.engine.explain(flow));
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
    let cells = matrix.ports.iter().map(&mut cells_of).collect();
    let data = Data {
        rows: matrix.rows.iter().map(|row| page_row(matrix, row)).collect(),
        classes: matrix.classes(),
        unseen: matrix.unseen.iter().map(|(pod, why)| format!("{pod} {why}")).collect(),
        ports: matrix.ports.iter().map(ToString::to_string).collect(),
        reasons: reasons.values,
        outcomes: outcomes.values,
        cells,
    };
    let json = serde_json::to_string(&data).expect("strings and numbers are JSON");
    // Inside a script element, only `<` could end it.
    PAGE.replace(PLACE, &json.replace('<', "\\u003c"))
}

fn page_row(matrix: &Matrix, row: &Row) -> PageRow {
    let state = matrix.engine.state();
    let alone = row.pods.first().filter(|_| row.pods.len() == 1);
    let found = alone.and_then(|key| state.pod(state.find_pod(key)?));
    PageRow {
        namespace: row.namespace().to_owned(),
        name: row.name(),
        pods: row.pods.iter().map(|pod| pod.name.clone()).collect(),
        class: row.class,
        addresses: found.into_iter().flat_map(|pod| &pod.addresses).map(ToString::to_string).collect(),
    }
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
