//! The daemon's answers to those who look into it, and its configuration read again.

use penstock_dataplane::conntrack::ConnectionInfo;

use super::super::admin::types::{Dump, Flow};
use super::super::admin::{Figures, Question, View};
use super::super::config::{Loaded, differences};
use super::super::metrics::Collected;
use super::super::operation::Next;
use super::super::publisher::Content;
use super::super::samples::Sample;
use super::super::{logging, preflight};
use super::Daemon;

/// Most connections or records that are named while the [`Content`] is held: policy waits for so many at most.
const AT_ONCE: usize = 200;

/// Keys that a running daemon takes in; all others need a restart.
const RELOADABLE: [&str; 3] = ["log.level", "node_addresses", "verdict_log."];

impl Daemon<'_> {
    /// What is to be seen of the daemon. Whatever waits for the kernel or a worker is read before `content` is held.
    fn view<'v>(&'v self, content: &'v Content) -> View<'v> {
        View {
            config: self.config,
            objects: &content.objects,
            ports: &self.ports,
            dataplane: &self.dataplane,
            epoch: content.epoch,
            progress: &content.progress,
            source: &self.operation.source,
            samples: &self.operation.samples,
            unwritten: self.operation.verdicts.unwritten(),
            started: self.operation.started,
        }
    }

    /// Does what is to be done next.
    pub(super) async fn operate(&mut self, next: Next) {
        match next {
            Next::Answer(question) => self.answer(question).await,
            Next::Sample => self.operation.samples.keep(Sample::take(&self.dataplane)),
            Next::Write => self.write_verdicts(),
        }
    }

    /// Has written what the workers have told so far.
    pub(super) fn write_verdicts(&mut self) {
        let records = self.operation.verdicts.take();
        let mut lines = Vec::with_capacity(records.len());
        for some in records.chunks(AT_ONCE) {
            let content = self.publisher.content();
            lines.extend(self.operation.verdicts.lines(&self.view(&content), some));
        }
        self.operation.verdicts.write(lines);
    }

    /// Answers. Whoever asked may have gone meanwhile, which is no matter.
    async fn answer(&self, question: Question) {
        match question {
            Question::Status(answer) => {
                let figures = self.figures();
                drop(answer.send(self.view(&self.publisher.content()).status(&figures)));
            }
            Question::Connections { end, answer } => {
                drop(answer.send(self.view(&self.publisher.content()).listing(end.as_deref())));
            }
            Question::Describe { connections, answer } => drop(answer.send(self.describe(&connections))),
            Question::Explain { query, answer } => {
                drop(answer.send(self.view(&self.publisher.content()).explain(&query)));
            }
            Question::Metrics(answer) => {
                let figures = self.figures();
                drop(answer.send(Collected::new(&self.view(&self.publisher.content()), figures)));
            }
            Question::Health(answer) => drop(answer.send(self.health())),
            Question::Readiness(answer) => drop(answer.send(self.readiness())),
            Question::Dump(answer) => drop(answer.send(self.dump().await)),
        }
    }

    fn figures(&self) -> Figures {
        Figures::read(&self.dataplane, &self.ports)
    }

    /// Some at a time, so that policy does not wait for a long list.
    fn describe(&self, connections: &[ConnectionInfo]) -> Vec<Flow> {
        let some = |some| self.view(&self.publisher.content()).describe(some);
        connections.chunks(AT_ONCE).flat_map(some).collect()
    }

    async fn dump(&self) -> (Dump, Collected) {
        let mut findings = preflight::machine(self.config);
        findings.extend(preflight::network(self.config, &self.netlink).await);
        let tenants = self.publisher.content().objects.tenants();
        findings.extend(preflight::pods(self.config, &self.facts, tenants));
        let figures = self.figures();
        let content = self.publisher.content();
        let view = self.view(&content);
        (view.dump(&self.operation.loaded.values, &findings, &figures), Collected::new(&view, figures))
    }

    fn health(&self) -> Result<(), String> {
        if let Some(died) = self.dataplane.failed() {
            return Err(died.to_string());
        }
        match self.operation.samples.stuck() {
            Some((worker, since)) => Err(format!("worker {worker} has not moved for {} s", since.as_secs())),
            None => Ok(()),
        }
    }

    fn readiness(&self) -> Result<(), String> {
        self.health()?;
        if !self.operation.source.is_synced() {
            return Err("not all objects have been read yet".to_owned());
        }
        match self.publisher.content().progress.is_programmed() {
            true => Ok(()),
            false => Err("no policy is in force on every worker yet".to_owned()),
        }
    }

    /// Reads the configuration again and takes in what can be taken in; of the rest it is told that it needs a restart.
    pub(super) fn reload(&mut self) {
        let loaded = match self.operation.layers.load() {
            Ok(loaded) => loaded,
            Err(error) => return tracing::error!("configuration not read again, all stays as it is: {error}"),
        };
        let changed = differences(&self.operation.loaded.values, &loaded.values);
        let (taken, kept): (Vec<_>, Vec<_>) = changed.into_iter().partition(|key| is_reloadable(key));
        self.take(&loaded);
        for key in &kept {
            tracing::warn!(key, "changed in the configuration, but not while the daemon runs; restart penstock");
        }
        let taken = if taken.is_empty() { "nothing to take in".to_owned() } else { taken.join(", ") };
        tracing::info!(target: logging::MILESTONES, "configuration read again: {taken}");
        // What needs a restart stays as it was, and is told again next time.
        copy_reloadable(&mut self.operation.loaded.values, loaded.values);
    }

    fn take(&mut self, loaded: &Loaded) {
        logging::set_level(loaded.config.log.level);
        // Also where its settings are as they were: the file may have been moved away to begin another.
        if let Err(error) = self.operation.verdicts.change(&loaded.config.verdict_log) {
            tracing::error!("the verdict log goes on as it was: {error}");
        }
        self.publisher.content().objects.set_configured(&loaded.config.node_addresses);
    }
}

fn is_reloadable(key: &str) -> bool {
    RELOADABLE.iter().any(|known| key == *known || known.ends_with('.') && key.starts_with(known))
}

/// Takes the reloadable keys over.
fn copy_reloadable(to: &mut toml::Table, mut from: toml::Table) {
    let mut set = |name: &str, value: Option<toml::Value>| match value {
        Some(value) => drop(to.insert(name.to_owned(), value)),
        None => drop(to.remove(name)),
    };
    set("node_addresses", from.remove("node_addresses"));
    set("verdict_log", from.remove("verdict_log"));
    let level = from.get_mut("log").and_then(|log| log.as_table_mut()).and_then(|log| log.remove("level"));
    let log = to.entry("log").or_insert_with(|| toml::Table::new().into());
    match (log.as_table_mut(), level) {
        (Some(log), Some(level)) => drop(log.insert("level".to_owned(), level)),
        (Some(log), None) => drop(log.remove("level")),
        (None, _) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_can_change_is_taken_over() {
        let table = |text: &str| text.parse::<toml::Table>().unwrap();
        let mut old = table("node = \"a\"\n[umem]\nframes = 5000\n[log]\nlevel = \"info\"\nformat = \"json\"\n");
        let new = table(
            "node = \"b\"\nnode_addresses = [\"10.0.0.1\"]\n[log]\nlevel = \"warn\"\n[verdict_log]\nopened = true\n",
        );
        let changed = differences(&old, &new);
        assert_eq!(changed, ["log.format", "log.level", "node", "node_addresses", "umem.frames", "verdict_log.opened"]);
        let taken: Vec<_> = changed.iter().filter(|key| is_reloadable(key)).collect();
        assert_eq!(taken, ["log.level", "node_addresses", "verdict_log.opened"]);
        copy_reloadable(&mut old, new.clone());
        assert_eq!(
            differences(&old, &new),
            ["log.format", "node", "umem.frames"],
            "what needs a restart is told again"
        );
    }
}
