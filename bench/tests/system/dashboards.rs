//! The dashboards of Grafana ask a daemon for what it has.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use penstock_bench::probe::{self, ProbeOutcome, Protocol, RetryPolicy};
use penstock_dataplane::DropReason;
use promql_parser::label::{METRIC_NAME, MatchOp, Matcher};
use promql_parser::parser::{self, Expr, LabelModifier, VectorSelector};
use serde_json::Value;

use crate::fixture::{Fixture, pods, policy};

const LIMIT: Duration = Duration::from_secs(30);
const METRICS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 9469);

/// Names of samples, with the labels of all samples of the name.
type Labels = BTreeMap<String, BTreeSet<String>>;

/// The samples of a daemon that keeps flow records, has allowed a connection and denied another.
fn samples() -> Labels {
    let only = policy("only", "pod-1", "  ingress: [{ports: [{port: 8080}]}]\n");
    let fixture = Fixture::of(&(pods(2) + &only), |_, config| {
        config.metrics = Some(METRICS);
        let file = config.manifests.with_file_name("flows.jsonl");
        config.sections += &format!("[flow_records]\nfile = \"{}\"\n", file.display());
    });
    let (from, target) = (fixture.site("test/pod-0"), fixture.target("test/pod-1", false));
    let ask = |port| probe::run_one(from, target, Protocol::Tcp(port), RetryPolicy::default()).unwrap();
    assert_eq!([8080, 9090].map(ask), [ProbeOutcome::Reached, ProbeOutcome::Silent]);
    let deadline = Instant::now() + LIMIT;
    loop {
        // Empty if a busy machine keeps the daemon from answering.
        let page = fixture.http(METRICS, "/metrics");
        if page.trim_end().ends_with("# EOF") {
            let samples = page.split_once("\r\n\r\n").unwrap().1.lines().filter(|line| !line.starts_with('#'));
            return samples.map(|line| line.rsplit_once(' ').unwrap().0).fold(Labels::new(), |mut all, sample| {
                let (name, labels) = sample.split_once('{').unwrap_or((sample, ""));
                let names = labels.split(',').filter_map(|pair| Some(pair.split_once('=')?.0.to_owned()));
                all.entry(name.to_owned()).or_default().extend(names);
                all
            });
        }
        assert!(Instant::now() < deadline, "no metrics: {page}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The labels of an expression's result, or what it asks for and is not there.
fn result_labels(samples: &Labels, expression: &Expr) -> Result<BTreeSet<String>, String> {
    match expression {
        Expr::VectorSelector(selector) => selected(samples, selector),
        Expr::MatrixSelector(selector) => selected(samples, &selector.vs),
        Expr::Paren(inner) => result_labels(samples, &inner.expr),
        Expr::Unary(inner) => result_labels(samples, &inner.expr),
        Expr::Subquery(inner) => result_labels(samples, &inner.expr),
        Expr::Call(call) => {
            let mut all = BTreeSet::new();
            for argument in &call.args.args {
                all.extend(result_labels(samples, argument)?);
            }
            if call.func.name == "histogram_quantile" && !all.remove("le") {
                return Err("a quantile of what has no label le".to_owned());
            }
            Ok(all)
        }
        Expr::Aggregate(aggregate) => {
            let labels = result_labels(samples, &aggregate.expr)?;
            match &aggregate.modifier {
                // topk and bottomk choose samples, and keep their labels.
                None if aggregate.param.is_some() => Ok(labels),
                None => Ok(BTreeSet::new()),
                Some(modifier) => grouped(&labels, modifier),
            }
        }
        Expr::Binary(binary) => {
            let [left, right] = [result_labels(samples, &binary.lhs)?, result_labels(samples, &binary.rhs)?];
            if let Some(matching) = binary.modifier.as_ref().and_then(|modifier| modifier.matching.as_ref()) {
                grouped(&left, matching)?;
                grouped(&right, matching)?;
            }
            Ok(&left | &right)
        }
        Expr::NumberLiteral(_) | Expr::StringLiteral(_) => Ok(BTreeSet::new()),
        Expr::Extension(_) => Err("not understood".to_owned()),
    }
}

fn grouped(labels: &BTreeSet<String>, modifier: &LabelModifier) -> Result<BTreeSet<String>, String> {
    let named: BTreeSet<String> = modifier.labels().labels.iter().cloned().collect();
    if let Some(unknown) = named.difference(labels).next() {
        return Err(format!("no label {unknown} among {labels:?}"));
    }
    Ok(match modifier {
        LabelModifier::Include(_) => named,
        LabelModifier::Exclude(_) => labels - &named,
    })
}

/// The labels of a metric, with those that Prometheus adds.
fn selected(samples: &Labels, selector: &VectorSelector) -> Result<BTreeSet<String>, String> {
    let name = selector.name.as_deref().ok_or("a selector without a name")?;
    let mut labels = samples.get(name).ok_or_else(|| format!("no metric {name}"))?.clone();
    labels.extend(["instance", "job"].map(str::to_owned));
    for matcher in selector.matchers.matchers.iter().filter(|matcher| matcher.name != METRIC_NAME) {
        if !labels.contains(&matcher.name) {
            return Err(format!("{name} has no label {}", matcher.name));
        }
        if let Some(unknown) = unknown_reason(name, matcher) {
            return Err(format!("{name} has no reason {unknown}"));
        }
    }
    Ok(labels)
}

/// A reason in a matcher that no packet is dropped for.
fn unknown_reason(metric: &str, matcher: &Matcher) -> Option<String> {
    if matcher.name != "reason" || metric.contains("kernel") {
        return None;
    }
    let asked: Vec<&str> = match &matcher.op {
        MatchOp::Equal | MatchOp::NotEqual => vec![&matcher.value],
        MatchOp::Re(_) | MatchOp::NotRe(_) => matcher.value.split('|').collect(),
    };
    let is_known = |name: &&str| DropReason::ALL.iter().any(|reason| reason.name() == *name);
    asked.into_iter().find(|name| !is_known(name)).map(str::to_owned)
}

/// An expression of Grafana, with values in the place of its variables.
fn with_values(expression: &str) -> String {
    let numbers = [("$__rate_interval", "1m"), ("$__interval", "1m"), ("$__range", "1h")];
    let variables = [("$instance", ".*"), ("$namespace", ".*")];
    numbers.iter().chain(&variables).fold(expression.to_owned(), |text, (from, to)| text.replace(from, to))
}

/// Mistakes in a target's expression and in the labels of its legend.
fn check(samples: &Labels, expression: &str, legend: &str) -> Result<(), String> {
    let parsed = parser::parse(&with_values(expression))?;
    let labels = result_labels(samples, &parsed)?;
    let named = legend.split("{{").skip(1).map(|rest| rest.split("}}").next().unwrap_or(rest).trim());
    match named.into_iter().find(|name| !labels.contains(*name)) {
        Some(name) => Err(format!("its legend has {name}, the result only {labels:?}")),
        None => Ok(()),
    }
}

/// The panels of a dashboard, and those in its rows.
fn panels(dashboard: &Value) -> Vec<&Value> {
    let own = dashboard["panels"].as_array().unwrap();
    own.iter()
        .flat_map(|panel| std::iter::once(panel).chain(panel["panels"].as_array().into_iter().flatten()))
        .collect()
}

/// Panels have numbers of their own and do not overlap.
fn check_layout(name: &str, panels: &[&Value]) {
    let mut places = BTreeMap::new();
    let ids: BTreeSet<u64> = panels.iter().map(|panel| panel["id"].as_u64().unwrap()).collect();
    assert_eq!(ids.len(), panels.len(), "{name}: two panels with one number");
    for panel in panels {
        let [x, y, width, height] = ["x", "y", "w", "h"].map(|key| panel["gridPos"][key].as_u64().unwrap());
        assert!(x + width <= 24 && width * height > 0, "{name}: {panel:#}");
        for place in (x..x + width).flat_map(|x| (y..y + height).map(move |y| (x, y))) {
            let other = places.insert(place, &panel["title"]);
            assert_eq!(other, None, "{name}: {} is over another panel", panel["title"]);
        }
    }
}

#[test]
fn every_dashboard_asks_only_for_metrics_that_there_are() {
    let samples = samples();
    // Mistakes that the check must find.
    for (expression, legend, expected) in [
        ("sum by (reason) (rate(penstock_drops_total{instance=~\"$instance\"}[$__rate_interval]))", "{{reason}}", ""),
        ("sum by (reason (penstock_drops_total)", "", "unclosed left parenthesis"),
        ("penstock_drops", "", "no metric penstock_drops"),
        ("penstock_drops_total{cause=\"x\"}", "", "has no label cause"),
        ("penstock_drops_total{reason=~\"ingress_denied|bad_luck\"}", "", "has no reason bad_luck"),
        ("sum by (pod) (penstock_drops_total)", "", "no label pod"),
        ("sum(penstock_drops_total)", "{{reason}}", "its legend has reason"),
        ("penstock_epoch / on (worker) penstock_worker_epoch", "", "no label worker"),
    ] {
        let found = check(&samples, expression, legend).err().unwrap_or_default();
        assert!(found.contains(expected) && found.is_empty() == expected.is_empty(), "{expression}: {found}");
    }
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/grafana");
    let (mut dashboards, mut expressions, mut uids) = (0, 0, BTreeSet::new());
    for file in std::fs::read_dir(directory).unwrap() {
        let path = file.unwrap().path();
        let name = path.display().to_string();
        let text = std::fs::read_to_string(&path).unwrap();
        let dashboard: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(uids.insert(dashboard["uid"].as_str().unwrap().to_owned()), "{name}: its uid is another's");
        let panels = panels(&dashboard);
        check_layout(&name, &panels);
        let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().into_iter().flatten());
        for target in targets.filter(|target| target["datasource"]["type"] == "prometheus") {
            let expression = target["expr"].as_str().unwrap();
            let legend = target["legendFormat"].as_str().unwrap_or_default();
            check(&samples, expression, legend).unwrap_or_else(|error| panic!("{name}: {expression}: {error}"));
            expressions += 1;
        }
        for variable in dashboard["templating"]["list"].as_array().unwrap() {
            let query = variable["query"]["query"].as_str().and_then(|query| query.strip_prefix("label_values("));
            let Some((metric, label)) = query.and_then(|query| query.strip_suffix(')')?.split_once(", ")) else {
                continue;
            };
            check(&samples, metric, &format!("{{{{{label}}}}}")).unwrap_or_else(|error| panic!("{name}: {error}"));
        }
        dashboards += 1;
    }
    assert!(dashboards >= 2 && expressions > 30, "{dashboards} dashboards, {expressions} expressions");
}
