//! What is measured, in the OpenMetrics text format.
//!
//! Names start with `penstock_`, units are base units, counters end in `_total`.

mod collected;
mod exposition;

use prometheus_client::encoding::text;
use prometheus_client::registry::Registry;

pub(super) use collected::Collected;

use super::walks::{Busy, Walks};

/// Everything in the OpenMetrics text format.
pub(super) async fn encode(mut collected: Collected, walks: &Walks) -> Result<String, Busy> {
    collected.by_state = walks.by_state(&collected.table).await?;
    walks.run(move || text_of(collected)).await
}

fn text_of(collected: Collected) -> String {
    let mut registry = Registry::default();
    let times = &collected.times;
    registry.register("penstock_compile_seconds", "From changed objects to tables", times.compile.clone());
    registry.register("penstock_publish_seconds", "From tables to a published snapshot", times.publish.clone());
    registry.register(
        "penstock_enforced_seconds",
        "From an event to a snapshot that is in force on every worker",
        times.enforced.clone(),
    );
    registry.register("penstock_changes", "Changes of objects taken in", times.changes.clone());
    registry.register_collector(Box::new(collected));
    let mut text = String::new();
    text::encode(&mut text, &registry).expect("writing to a string does not fail");
    text
}
