//! The admin API's paths. All are read-only, but for trials of policies from files, which the configuration must allow.

use std::collections::BTreeSet;

use axum::extract::rejection::JsonRejection;
use axum::extract::{DefaultBodyLimit, Query, State};
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use penstock_admin::types::{
    ErrorBody, ExplainQuery, Flows, FlowsQuery, Names, NamesQuery, Rules, TrialPolicies, TrialRequest, TrialStatus,
};
use penstock_dataplane::conntrack::{self, ConnectionInfo, Timestamp};
use penstock_dataplane::packet::{Address, Flow, Protocol};
use penstock_policy::flow;
use penstock_policy::model::Object;
use tokio::net::UnixListener;

use super::trial::policies_of;
use crate::query::{FlowScan, NotAllowed, QueryError, QueryHandle, StateQuery};
use crate::scans::ScansBusy;
use crate::{metrics, scans};

/// The most bytes of a request: manifests of a trial.
const MOST_BYTES: usize = 8 << 20;
const DEFAULT_LIMIT: usize = 1_000;
const MAX_LIMIT: usize = 100_000;

/// A response other than 200.
pub(super) struct HttpError(pub(super) StatusCode, pub(super) String);

impl HttpError {
    pub(super) fn bad(error: impl ToString) -> Self {
        Self(StatusCode::BAD_REQUEST, error.to_string())
    }
}

impl From<QueryError> for HttpError {
    fn from(error: QueryError) -> Self {
        Self(StatusCode::SERVICE_UNAVAILABLE, error.to_string())
    }
}

impl From<NotAllowed> for HttpError {
    fn from(error: NotAllowed) -> Self {
        Self(StatusCode::FORBIDDEN, error.to_string())
    }
}

impl From<ScansBusy> for HttpError {
    fn from(error: ScansBusy) -> Self {
        Self(StatusCode::SERVICE_UNAVAILABLE, error.to_string())
    }
}

impl IntoResponse for HttpError {
    fn into_response(self) -> Response {
        (self.0, Json(ErrorBody { error: self.1 })).into_response()
    }
}

/// Serves this socket until the runtime ends.
pub(super) async fn serve(listener: UnixListener, handle: QueryHandle) {
    let router = Router::new()
        .route("/v1/status", get(status))
        .route("/v1/flows", get(flows))
        .route("/v1/explain", get(explain))
        .route("/v1/dump", get(dump))
        .route("/v1/ready", get(ready))
        .route("/v1/rules", get(rules))
        .route("/v1/names", get(names))
        .route("/v1/trial", get(trial).post(start_trial).delete(stop_trial))
        .layer(DefaultBodyLimit::max(MOST_BYTES))
        .fallback(|uri: Uri| async move {
            HttpError(
                StatusCode::NOT_FOUND,
                format!("{uri}: not found; use /v1/status, /v1/flows, /v1/explain, /v1/rules, /v1/names, /v1/trial, /v1/ready or /v1/dump"),
            )
        })
        .with_state(handle);
    if let Err(error) = axum::serve(listener, router).await {
        tracing::error!(%error, "the admin API has stopped serving");
    }
}

async fn status(State(handle): State<QueryHandle>) -> Result<impl IntoResponse, HttpError> {
    Ok(Json(handle.query(StateQuery::Status).await?))
}

async fn ready(State(handle): State<QueryHandle>) -> Result<Json<()>, HttpError> {
    let readiness = handle.query(StateQuery::Readiness).await?;
    readiness.map(Json).map_err(|problem| HttpError(StatusCode::SERVICE_UNAVAILABLE, problem))
}

async fn explain(
    State(handle): State<QueryHandle>,
    Query(query): Query<ExplainQuery>,
) -> Result<impl IntoResponse, HttpError> {
    let answer = handle.query(|answer| StateQuery::Explain { query, answer }).await?;
    Ok(Json(answer.map_err(HttpError::bad)?))
}

async fn flows(State(handle): State<QueryHandle>, Query(query): Query<FlowsQuery>) -> Result<Json<Flows>, HttpError> {
    list(&handle, &query).await.map(Json)
}

async fn dump(State(handle): State<QueryHandle>) -> Result<impl IntoResponse, HttpError> {
    let (mut dump, scrape) = handle.query(StateQuery::Dump).await?;
    let metrics = metrics::encode(scrape, handle.scans()).await?;
    dump.files.push(super::bundle::text("metrics.txt", metrics));
    let trial = handle.query(StateQuery::Trial).await?;
    dump.files.push(super::bundle::file("trial.json", &trial));
    let flows = list(&handle, &FlowsQuery { limit: Some(10 * DEFAULT_LIMIT), ..Default::default() }).await?;
    dump.files.push(super::bundle::file("flows.json", &flows));
    Ok(Json(dump))
}

async fn rules(State(handle): State<QueryHandle>) -> Result<Json<Rules>, HttpError> {
    Ok(Json(handle.query(StateQuery::Rules).await?))
}

async fn names(State(handle): State<QueryHandle>, Query(query): Query<NamesQuery>) -> Result<Json<Names>, HttpError> {
    let answer = handle.query(|answer| StateQuery::Names { query, answer }).await?;
    Ok(Json(answer.map_err(HttpError::bad)?))
}

async fn trial(State(handle): State<QueryHandle>) -> Result<Json<TrialStatus>, HttpError> {
    Ok(Json(handle.query(StateQuery::Trial).await?))
}

async fn start_trial(
    State(handle): State<QueryHandle>,
    request: Result<Json<TrialRequest>, JsonRejection>,
) -> Result<Json<TrialPolicies>, HttpError> {
    let Json(request) = request.map_err(|refused| HttpError(refused.status(), refused.body_text()))?;
    // Reading may take long: not on the thread that answers.
    let read = tokio::task::spawn_blocking(move || policies_of(&request)).await.map_err(HttpError::bad)?;
    let (policies, left_out) = read.map_err(HttpError::bad)?;
    try_policies(&handle, policies, left_out).await
}

async fn stop_trial(State(handle): State<QueryHandle>) -> Result<Json<TrialPolicies>, HttpError> {
    try_policies(&handle, Vec::new(), 0).await
}

async fn try_policies(
    handle: &QueryHandle,
    policies: Vec<Object>,
    left_out: usize,
) -> Result<Json<TrialPolicies>, HttpError> {
    let named = crate::trial::named(&policies);
    handle.query(|answer| StateQuery::Try { policies, answer }).await??;
    Ok(Json(TrialPolicies { policies: named, left_out }))
}

async fn list(handle: &QueryHandle, query: &FlowsQuery) -> Result<Flows, HttpError> {
    let filter = Filter::new(query)?;
    let end = query.end.clone();
    let listing = handle.query(|answer| StateQuery::Connections { end, answer }).await?;
    let listing = listing.map_err(HttpError::bad)?;
    let limit = query.limit.unwrap_or(DEFAULT_LIMIT).min(MAX_LIMIT);
    // A scan of a full table takes some ten milliseconds: not on the thread that publishes policies.
    let (matching, connections) = handle.scans().run(move || filter.find(&listing, limit)).await?;
    let flows = handle.query(|answer| StateQuery::Describe { connections, answer }).await?;
    Ok(Flows { matching, flows })
}

/// Which connections are listed, besides the addresses of their ends.
struct Filter {
    protocol: Option<Protocol>,
    state: Option<String>,
    port: Option<u16>,
}

impl Filter {
    fn new(query: &FlowsQuery) -> Result<Self, HttpError> {
        let protocol = query.protocol.as_deref().map(|text| {
            flow::protocol(text).map_err(|_| {
                HttpError::bad(format!(
                    "protocol {text:?}: unknown; use TCP, UDP, SCTP, ICMP, ICMPv6 or a number up to 255"
                ))
            })
        });
        let state = query.state.as_deref().map(|text| {
            let text = text.to_ascii_uppercase();
            let known = states();
            match known.contains(text.as_str()) {
                true => Ok(text),
                false => Err(HttpError::bad(format!("state {text:?}: unknown; use one of {}", list_of(&known)))),
            }
        });
        Ok(Self { protocol: protocol.transpose()?, state: state.transpose()?, port: query.port })
    }

    fn matches(&self, connection: &ConnectionInfo) -> bool {
        self.protocol.is_none_or(|protocol| protocol == connection.original.protocol)
            && self.port.is_none_or(|port| port == connection.original.shown_ports().1)
            && self.state.as_deref().is_none_or(|state| state == connection.state.name())
    }

    /// How many match, and the first `limit` of them.
    fn find(&self, listing: &FlowScan, limit: usize) -> (usize, Vec<ConnectionInfo>) {
        let addresses = listing.addresses.as_ref();
        let addresses: Option<BTreeSet<Address>> =
            addresses.map(|addresses| addresses.iter().map(|&address| address.into()).collect());
        let of = |connection: &ConnectionInfo| {
            let Flow { src, dst, .. } = connection.original;
            addresses.as_ref().is_none_or(|addresses| [src, dst].iter().any(|end| addresses.contains(end)))
        };
        let (mut matching, mut found) = (0, Vec::new());
        for connection in
            listing.table.iter(Timestamp::now()).filter(|connection| self.matches(connection) && of(connection))
        {
            matching += 1;
            if found.len() < limit {
                found.push(connection);
            }
        }
        (matching, found)
    }
}

/// The names of all states that a connection can be in.
fn states() -> BTreeSet<&'static str> {
    scans::all_states().map(conntrack::State::name).collect()
}

fn list_of(names: &BTreeSet<&'static str>) -> String {
    names.iter().copied().collect::<Vec<_>>().join(", ")
}
