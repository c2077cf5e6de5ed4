//! The admin API's paths. All are read-only.

use std::collections::BTreeSet;

use axum::extract::{Query, State};
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use penstock_dataplane::conntrack::{ConnectionInfo, Timestamp};
use penstock_dataplane::packet::{Address, Protocol};
use serde::Serialize;
use tokio::net::UnixListener;

use super::question::{Asker, Listing, NoAnswer, Question};
use super::types::{ExplainQuery, Flows, FlowsQuery, Problem};
use crate::service::walks::Busy;
use crate::service::{metrics, words};

/// Connections that are listed unless more are asked for.
const SOME: usize = 1_000;
/// Most connections that are listed.
const MOST: usize = 100_000;

/// A request that is not answered.
struct Refusal(StatusCode, String);

impl Refusal {
    fn bad(error: impl ToString) -> Self {
        Self(StatusCode::BAD_REQUEST, error.to_string())
    }
}

impl From<NoAnswer> for Refusal {
    fn from(error: NoAnswer) -> Self {
        Self(StatusCode::SERVICE_UNAVAILABLE, error.to_string())
    }
}

impl From<Busy> for Refusal {
    fn from(error: Busy) -> Self {
        Self(StatusCode::SERVICE_UNAVAILABLE, error.to_string())
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        (self.0, Json(Problem { error: self.1 })).into_response()
    }
}

/// Answers on this socket until the runtime ends.
pub(super) async fn serve(listener: UnixListener, asker: Asker) {
    let router = Router::new()
        .route("/v1/status", get(status))
        .route("/v1/flows", get(flows))
        .route("/v1/explain", get(explain))
        .route("/v1/dump", get(dump))
        .fallback(|uri: Uri| async move {
            Refusal(StatusCode::NOT_FOUND, format!("{uri}: there is /v1/status, /v1/flows, /v1/explain and /v1/dump"))
        })
        .with_state(asker);
    if let Err(error) = axum::serve(listener, router).await {
        tracing::error!(%error, "the admin socket is not served any more");
    }
}

async fn status(State(asker): State<Asker>) -> Result<impl IntoResponse, Refusal> {
    Ok(Json(asker.ask(Question::Status).await?))
}

async fn explain(State(asker): State<Asker>, Query(query): Query<ExplainQuery>) -> Result<impl IntoResponse, Refusal> {
    let answer = asker.ask(|answer| Question::Explain { query, answer }).await?;
    Ok(Json(answer.map_err(Refusal::bad)?))
}

async fn flows(State(asker): State<Asker>, Query(query): Query<FlowsQuery>) -> Result<Json<Flows>, Refusal> {
    list(&asker, &query).await.map(Json)
}

async fn dump(State(asker): State<Asker>) -> Result<impl IntoResponse, Refusal> {
    let (mut dump, collected) = asker.ask(Question::Dump).await?;
    let metrics = metrics::encode(collected, asker.walks()).await?;
    dump.files.push(super::bundle::text("metrics.txt", metrics));
    let flows = list(&asker, &FlowsQuery { limit: Some(10 * SOME), ..Default::default() }).await?;
    dump.files.push(super::bundle::file("flows.json", &flows));
    Ok(Json(dump))
}

async fn list(asker: &Asker, query: &FlowsQuery) -> Result<Flows, Refusal> {
    let filter = Filter::new(query)?;
    let end = query.end.clone();
    let listing = asker.ask(|answer| Question::Connections { end, answer }).await?.map_err(Refusal::bad)?;
    let limit = query.limit.unwrap_or(SOME).min(MOST);
    // A full table takes some ten milliseconds: not on the thread that publishes policies.
    let (matching, connections) = asker.walks().run(move || filter.find(&listing, limit)).await?;
    let flows = asker.ask(|answer| Question::Describe { connections, answer }).await?;
    Ok(Flows { matching, flows })
}

/// Which connections are wanted, whoever has them.
struct Filter {
    protocol: Option<Protocol>,
    state: Option<String>,
    port: Option<u16>,
}

impl Filter {
    fn new(query: &FlowsQuery) -> Result<Self, Refusal> {
        let protocol = query.protocol.as_deref().map(|text| {
            words::protocol(text).ok_or_else(|| {
                Refusal::bad(format!("protocol {text:?}: give TCP, UDP, SCTP, ICMP, ICMPv6 or a number up to 255"))
            })
        });
        let state = query.state.as_deref().map(|text| {
            let text = text.to_ascii_uppercase();
            let known = words::states();
            match known.contains(text.as_str()) {
                true => Ok(text),
                false => Err(Refusal::bad(format!("state {text:?}: there is none; give one of {}", list_of(&known)))),
            }
        });
        Ok(Self { protocol: protocol.transpose()?, state: state.transpose()?, port: query.port })
    }

    fn takes(&self, connection: &ConnectionInfo) -> bool {
        self.protocol.is_none_or(|protocol| protocol == connection.original.protocol)
            && self.port.is_none_or(|port| port == connection.original.shown_ports().1)
            && self.state.as_deref().is_none_or(|state| state == connection.state.name())
    }

    /// How many there are, and the first of them.
    fn find(&self, listing: &Listing, limit: usize) -> (usize, Vec<ConnectionInfo>) {
        let addresses: Option<BTreeSet<Address>> =
            listing.addresses.as_ref().map(|addresses| addresses.iter().map(|&address| address.into()).collect());
        let of = |connection: &ConnectionInfo| match &addresses {
            Some(addresses) => {
                [connection.original.src, connection.original.dst].iter().any(|end| addresses.contains(end))
            }
            None => true,
        };
        let (mut matching, mut found) = (0, Vec::new());
        for connection in
            listing.table.iter(Timestamp::now()).filter(|connection| self.takes(connection) && of(connection))
        {
            matching += 1;
            if found.len() < limit {
                found.push(connection);
            }
        }
        (matching, found)
    }
}

fn list_of(names: &BTreeSet<&'static str>) -> String {
    names.iter().copied().collect::<Vec<_>>().join(", ")
}

/// An answer as it is sent, pretty enough to be read.
pub(super) fn pretty(value: &impl Serialize) -> String {
    serde_json::to_string_pretty(value).expect("strings and numbers are JSON")
}
