//! Answers to queries, the verdict log's writes, and configuration reload.

use jiff::Timestamp;
use penstock_admin::types::{ConnectionFlow, Dump};
use penstock_dataplane::conntrack::ConnectionInfo;
use penstock_policy::model::Object;

use super::{Daemon, keep_as_last_good};
use crate::admin::names;
use crate::config::{LoadedConfig, changed_keys};
use crate::flow_records::FlowRecorder;
use crate::metrics::Scrape;
use crate::naming::PacketNames;
use crate::operation::OperationEvent;
use crate::publisher::SnapshotInputs;
use crate::query::{NotAllowed, StateQuery};
use crate::recorded_objects::StaleObjects;
use crate::samples::CounterSample;
use crate::view::{DaemonView, LiveCounters};
use crate::{logging, preflight, report};

/// How many connections or records are named under one lock of the [`SnapshotInputs`]: policy waits for that many at
/// most.
pub(super) const NAMED_PER_LOCK: usize = 200;

/// Keys that a running daemon reloads; all others need a restart.
const RELOADABLE: [&str; 4] = ["admin.trials", "log.level", "node_addresses", "verdict_log."];

impl Daemon<'_> {
    /// The daemon's state to read. Whatever waits for the kernel or a worker is read before `inputs` is locked.
    pub(super) fn view<'v>(&'v self, inputs: &'v SnapshotInputs) -> DaemonView<'v> {
        DaemonView {
            config: self.config,
            objects: &inputs.objects,
            ports: &self.ports,
            dataplane: &self.dataplane,
            epoch: inputs.epoch,
            progress: &inputs.progress,
            source: &self.operation.source,
            stale: inputs.stale,
            has_resolver: !inputs.resolvers.is_empty(),
            rejected: self.operation.rejected.as_ref(),
            samples: &self.operation.samples,
            capture: self.operation.capture.as_ref(),
            captured: self.operation.captured,
            unwritten: self.operation.verdicts.unwritten(),
            flow_records: self.records.as_ref().map(FlowRecorder::totals),
            staged: self.trial.counters(),
            usage: &self.operation.usage,
            started: self.operation.started,
        }
    }

    /// The objects and ports that packets are named by.
    pub(super) fn names<'v>(&'v self, inputs: &'v SnapshotInputs) -> PacketNames<'v> {
        PacketNames { engine: inputs.objects.engine(), ports: &self.ports, epoch: inputs.epoch }
    }

    pub(super) async fn operate(&mut self, next: OperationEvent) {
        match next {
            OperationEvent::Answer(StateQuery::Capture { query, answer }) => {
                drop(answer.send(self.start_capture(&query)));
            }
            OperationEvent::Capture => self.forward_capture(),
            OperationEvent::Answer(StateQuery::NewPod { pod, addresses, interfaces, answer }) => {
                if self.bindings.told(&pod, interfaces) {
                    self.publisher.pods.notify_one();
                }
                drop(answer.send(self.publisher.announce(&pod, &addresses)));
            }
            OperationEvent::Answer(query) => {
                if matches!(query, StateQuery::Rules(_)) {
                    self.count_use();
                }
                self.answer(query).await;
            }
            OperationEvent::Sample => {
                self.operation.samples.keep(CounterSample::take(&self.dataplane, &self.ports));
                self.announce_ready();
                self.tell_service_manager();
            }
            OperationEvent::Write => self.write_verdicts(),
            OperationEvent::CountUse => {
                self.count_use();
                self.operation.usage.keep();
            }
        }
    }

    pub(super) fn count_use(&mut self) {
        let mut inputs = self.publisher.inputs();
        // Objects of an earlier run may not be all.
        let is_synced = self.operation.source.is_synced() && inputs.stale.is_none();
        let counted = self.operation.usage.read(&mut inputs.objects);
        drop(inputs);
        self.operation.usage.add(counted, is_synced, Timestamp::now());
    }

    pub(super) fn write_verdicts(&mut self) {
        let records = self.operation.verdicts.take();
        let mut lines = Vec::with_capacity(records.len());
        for some in records.chunks(NAMED_PER_LOCK) {
            let inputs = self.publisher.inputs();
            lines.extend(self.operation.verdicts.lines(&self.names(&inputs), some));
        }
        self.operation.verdicts.write(lines);
    }

    pub(super) fn report(&self) {
        let mut text =
            report::statistics(&self.dataplane.statistics(), &self.ports.outcomes(), &self.ports.closed_interfaces());
        // Workers that have left the table to another daemon are not asked.
        if !self.has_left {
            match self.dataplane.frames() {
                Ok(frames) => text.push_str(&report::frames(&frames)),
                Err(error) => tracing::warn!(%error, "could not count the frames"),
            }
        }
        if !logging::print(text) {
            tracing::warn!("statistics not printed: the previous ones have not been read");
        }
    }

    /// Answers a query. The client may have disconnected meanwhile; then nobody reads the answer.
    async fn answer(&self, query: StateQuery) {
        match query {
            StateQuery::Status(answer) => {
                let counters = self.counters();
                drop(answer.send(self.view(&self.publisher.inputs()).status(&counters)));
            }
            StateQuery::Connections { end, answer } => {
                let inputs = self.publisher.inputs();
                drop(answer.send(self.view(&inputs).listing(end.as_deref())));
            }
            StateQuery::Describe { connections, answer } => drop(answer.send(self.describe(&connections))),
            StateQuery::Explain { query, answer } => {
                drop(answer.send(self.view(&self.publisher.inputs()).explain(&query)));
            }
            StateQuery::Names { query, answer } => {
                let inputs = self.publisher.inputs();
                let (table, has_resolver) = (inputs.objects.names().cloned(), !inputs.resolvers.is_empty());
                drop(inputs);
                let listed = table.map_or_else(|| Err(names::off()), |table| names::list(&table, &query));
                let resolvers = &self.config.domain_names.resolvers;
                drop(answer.send(listed.map(|listed| names::answer(listed, resolvers, has_resolver))));
            }
            StateQuery::Metrics(answer) => {
                let counters = self.counters();
                drop(answer.send(Scrape::new(&self.view(&self.publisher.inputs()), counters)));
            }
            StateQuery::Rules(answer) => {
                // Policy does not wait for the list.
                let sources: Vec<_> = self.publisher.inputs().objects.engine().deciding_rules().collect();
                drop(answer.send(self.operation.usage.list(&sources)));
            }
            StateQuery::Trial(answer) => self.trial.ask(answer),
            StateQuery::Try { policies, answer } => {
                let is_allowed = self.operation.loaded.config.admin.trials;
                if is_allowed {
                    self.try_policies(policies);
                }
                let _ = answer.send(is_allowed.then_some(()).ok_or(NotAllowed));
            }
            StateQuery::Health(answer) => drop(answer.send(self.health())),
            StateQuery::Readiness(answer) => drop(answer.send(self.readiness())),
            // `operate` has answered these, because they change the daemon's state.
            StateQuery::Capture { .. } | StateQuery::NewPod { .. } => {}
            StateQuery::Dump(answer) => drop(answer.send(self.dump().await)),
        }
    }

    /// Judges policies from files beside what is in effect, instead of those before; none: no more.
    fn try_policies(&self, policies: Vec<Object>) {
        self.trial.set_files(policies);
        self.publisher.tell_subscribers();
    }

    fn counters(&self) -> LiveCounters {
        LiveCounters::read(&self.dataplane, &self.ports)
    }

    /// In portions, so that policy does not wait for a long list.
    fn describe(&self, connections: &[ConnectionInfo]) -> Vec<ConnectionFlow> {
        let describe = |portion: &[ConnectionInfo]| self.view(&self.publisher.inputs()).describe(portion);
        connections.chunks(NAMED_PER_LOCK).flat_map(describe).collect()
    }

    async fn dump(&self) -> (Dump, Scrape) {
        let mut findings = preflight::machine(self.settings);
        findings.extend(preflight::network());
        let resolved_pods = self.publisher.inputs().objects.resolved_pods();
        findings.extend(preflight::pods(self.settings, &self.netstate, self.bindings.bindings(), resolved_pods));
        let counters = self.counters();
        let inputs = self.publisher.inputs();
        let view = self.view(&inputs);
        (view.dump(&self.operation.loaded.values, &findings, &counters), Scrape::new(&view, counters))
    }

    /// Notifies of it, once.
    fn announce_ready(&mut self) {
        if let Some(ready) = self.operation.ready.take() {
            // Whoever waits for it can do nothing about a pod that cannot be served.
            match self.policy_readiness() {
                Ok(()) => drop(ready.send(())),
                Err(_) => self.operation.ready = Some(ready),
            }
        }
    }

    /// Tells a service manager, once, that the first policy is in effect. By which objects and settings does not matter: those of an
    /// earlier run are no reason to end this one.
    fn tell_service_manager(&mut self) {
        if self.health().is_ok() && self.publisher.inputs().progress.is_programmed() {
            self.operation.service_manager.tell_ready();
        }
    }

    fn health(&self) -> Result<(), String> {
        if let Some(died) = self.dataplane.failed() {
            return Err(died.to_string());
        }
        match self.operation.samples.stuck() {
            Some((worker, since)) => Err(format!("worker {worker} has not polled for {} s", since.as_secs())),
            None => Ok(()),
        }
    }

    fn readiness(&self) -> Result<(), String> {
        self.policy_readiness()?;
        let inputs = self.publisher.inputs();
        let not_enforced = inputs.progress.not_enforced();
        let Some(first) = not_enforced.first() else { return Ok(()) };
        let others = match not_enforced.len() - 1 {
            0 => String::new(),
            others => format!(" (and {others} more: see penstock status)"),
        };
        Err(format!("policy is not enforced everywhere: {}{others}", first.reason))
    }

    /// Whether policy is in effect, wherever it can be enforced.
    fn policy_readiness(&self) -> Result<(), String> {
        self.health()?;
        if let Some(rejected) = &self.operation.rejected {
            let reason = rejected.reasons.first().map_or("", String::as_str);
            return Err(format!("the configuration is refused, and the last good one is in effect: {reason}"));
        }
        let inputs = self.publisher.inputs();
        if let Some(StaleObjects { recorded, .. }) = inputs.stale {
            return Err(format!("the API server has not been read yet; what was recorded at {recorded} is in effect"));
        }
        if !self.operation.source.is_synced() {
            return Err("not all objects have been read yet".to_owned());
        }
        match inputs.progress.is_programmed() {
            true => Ok(()),
            false => Err("no policy is in effect on every worker yet".to_owned()),
        }
    }

    /// Reads the configuration again and applies the reloadable keys. Logs each other changed key: it needs a restart.
    pub(super) fn reload(&mut self) {
        let loaded = match self.operation.layers.load() {
            Ok(loaded) => loaded,
            Err(error) => return tracing::error!("configuration not reloaded, all settings stay: {error}"),
        };
        let changed = changed_keys(&self.operation.loaded.values, &loaded.values);
        let (taken, kept): (Vec<_>, Vec<_>) = changed.into_iter().partition(|key| is_reloadable(key));
        self.take(&loaded);
        for key in &kept {
            tracing::warn!(key, "changed in the configuration, but needs a restart to apply; restart penstock");
        }
        let taken =
            if taken.is_empty() { "nothing changed that applies at run time".to_owned() } else { taken.join(", ") };
        tracing::info!(target: logging::MILESTONES, "configuration reloaded: {taken}");
        // Keys that need a restart keep their old value, so that the next reload reports them again.
        copy_reloadable(&mut self.operation.loaded.values, loaded.values.clone());
        if kept.is_empty() {
            keep_as_last_good(&self.operation.layers, &loaded);
            if self.operation.rejected.take().is_some() {
                tracing::info!(target: logging::MILESTONES, "the configuration is good again, and in effect");
            }
        }
    }

    fn take(&mut self, loaded: &LoadedConfig) {
        logging::set_level(loaded.config.log.level);
        // Reopened even if the settings are the same: the file may have been rotated.
        if let Err(error) = self.operation.verdicts.change(&loaded.config.verdict_log) {
            tracing::error!("the verdict log keeps its old settings: {error}");
        }
        self.publisher.inputs().objects.set_configured(&loaded.config.node_addresses);
        let trials = loaded.config.admin.trials;
        if std::mem::replace(&mut self.operation.loaded.config.admin.trials, trials) && !trials {
            // Nobody could end one that runs.
            self.try_policies(Vec::new());
        }
    }
}

fn is_reloadable(key: &str) -> bool {
    RELOADABLE.iter().any(|known| key == *known || known.ends_with('.') && key.starts_with(known))
}

/// Copies the reloadable keys from one table to the other.
fn copy_reloadable(to: &mut toml::Table, mut from: toml::Table) {
    let mut set = |name: &str, value: Option<toml::Value>| match value {
        Some(value) => drop(to.insert(name.to_owned(), value)),
        None => drop(to.remove(name)),
    };
    set("node_addresses", from.remove("node_addresses"));
    set("verdict_log", from.remove("verdict_log"));
    for (section, key) in [("log", "level"), ("admin", "trials")] {
        let value = from.get_mut(section).and_then(|table| table.as_table_mut()).and_then(|table| table.remove(key));
        match (to.get_mut(section).and_then(|table| table.as_table_mut()), value) {
            (Some(table), Some(value)) => drop(table.insert(key.to_owned(), value)),
            (Some(table), None) => drop(table.remove(key)),
            (None, Some(value)) => {
                drop(to.insert(section.to_owned(), toml::Table::from_iter([(key.to_owned(), value)]).into()));
            }
            (None, None) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_reloadable_keys_are_copied() {
        let table = |text: &str| text.parse::<toml::Table>().unwrap();
        let mut old = table("node = \"a\"\n[umem]\nframes = 5000\n[log]\nlevel = \"info\"\nformat = \"json\"\n");
        let new = table(
            "node = \"b\"\nnode_addresses = [\"10.0.0.1\"]\n[log]\nlevel = \"warn\"\n[verdict_log]\nopened = true\n[admin]\ntrials = true\nsocket = \"s\"\n",
        );
        let changed = changed_keys(&old, &new);
        assert_eq!(
            changed,
            [
                "admin.socket",
                "admin.trials",
                "log.format",
                "log.level",
                "node",
                "node_addresses",
                "umem.frames",
                "verdict_log.opened"
            ]
        );
        let taken: Vec<_> = changed.iter().filter(|key| is_reloadable(key)).collect();
        assert_eq!(taken, ["admin.trials", "log.level", "node_addresses", "verdict_log.opened"]);
        copy_reloadable(&mut old, new.clone());
        assert_eq!(
            changed_keys(&old, &new),
            ["admin.socket", "log.format", "node", "umem.frames"],
            "keys that need a restart are reported again"
        );
    }
}
