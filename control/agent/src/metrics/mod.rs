//! Metrics in the OpenMetrics text format.
//!
//! Names start with `penstock_`, units are base units, counters end in `_total`.

mod exposition;
mod scrape;

use prometheus_client::encoding::text;
use prometheus_client::registry::Registry;

pub(super) use scrape::Scrape;

use super::scans::{ScansBusy, TableScans};

pub(super) async fn encode(mut scrape: Scrape, scans: &TableScans) -> Result<String, ScansBusy> {
    scrape.counts = scans.counts(&scrape.table).await?;
    scans.run(move || text_of(scrape)).await
}

fn text_of(scrape: Scrape) -> String {
    let mut registry = Registry::default();
    let times = &scrape.times;
    registry.register("penstock_compile_seconds", "From changed objects to tables", times.compile.clone());
    registry.register("penstock_publish_seconds", "From tables to a published snapshot", times.publish.clone());
    registry.register(
        "penstock_enforced_seconds",
        "From an event to a snapshot that is in effect on every worker",
        times.enforced.clone(),
    );
    registry.register("penstock_changes", "Changes of objects taken in", times.changes.clone());
    registry.register_collector(Box::new(scrape));
    let mut text = String::new();
    text::encode(&mut text, &registry).expect("writing to a string does not fail");
    text
}
