//! Changes of objects during a replay.
//!
//! A TOML file of steps in order of time:
//!
//! ```toml
//! [[step]]
//! at = "+1.5s"                          # after the first packet; or a time: "2026-03-01T12:00:00Z"
//! apply = ["allow-web.yaml"]            # objects created or replaced
//! delete = ["NetworkPolicy shop/web"]   # objects deleted
//!
//! [[step]]
//! at = "+10s"
//! replace = ["after/"]                  # from now on these are all the objects
//! ```
//!
//! Paths are relative to the file.

use std::path::{Path, PathBuf};

use penstock_dataplane::Epoch;
use penstock_policy::model::{ObjectChange, ObjectKey, ObjectRef};
use penstock_sources::manifest::{ManifestErrors, Options};
use serde::Deserialize;

use super::capture::Time;
use super::objects::ReplayObjects;

#[derive(Debug, thiserror::Error)]
pub enum TimelineError {
    #[error("{}: cannot be read: {cause}", file.display())]
    Unreadable { file: PathBuf, cause: std::io::Error },
    #[error("{}: is not a timeline: {problem}", file.display())]
    Form { file: PathBuf, problem: String },
    #[error("{}: step {step}: {problem}", file.display())]
    Step {
        file: PathBuf,
        /// Its number, from 1.
        step: usize,
        problem: String,
    },
    #[error(transparent)]
    Manifests(#[from] ManifestErrors),
}

#[derive(Debug, Default)]
pub struct Timeline {
    file: PathBuf,
    steps: Vec<TimelineStep>,
    next: usize,
}

#[derive(Debug)]
struct TimelineStep {
    at: StepTime,
    changes: Vec<ObjectChange>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum StepTime {
    /// Nanoseconds after the first packet.
    After(u64),
    At(Time),
    /// Before the first packet that a daemon processed under this epoch, or a later one.
    Epoch(Epoch),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTimeline {
    #[serde(default)]
    step: Vec<RawStep>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawStep {
    at: String,
    #[serde(default)]
    apply: Vec<PathBuf>,
    #[serde(default)]
    delete: Vec<String>,
    replace: Option<Vec<PathBuf>>,
}

impl Timeline {
    /// Reads a timeline and all manifests it names. `objects` are those at the start.
    ///
    /// # Errors
    /// The file or a manifest cannot be read or is invalid; a step is earlier than the one before it.
    pub(super) fn read(file: &Path, objects: &ReplayObjects, options: &Options) -> Result<Self, TimelineError> {
        let form = |problem: String| TimelineError::Form { file: file.to_owned(), problem };
        let text = std::fs::read_to_string(file)
            .map_err(|cause| TimelineError::Unreadable { file: file.to_owned(), cause })?;
        let parsed: RawTimeline = toml::from_str(&text).map_err(|error| form(in_one_line(&error, &text)))?;
        let mut known = objects.clone();
        let mut steps: Vec<TimelineStep> = Vec::new();
        for (place, step) in parsed.step.into_iter().enumerate() {
            let wrong = |problem: String| TimelineError::Step { file: file.to_owned(), step: place + 1, problem };
            let at = step_time(&step.at).map_err(&wrong)?;
            if steps.last().is_some_and(|before| is_before(at, before.at)) {
                return Err(wrong(format!("at = {:?} is before the previous step: sort the steps by time", step.at)));
            }
            let changes = changes(file, &step, &mut known, options).map_err(|problem| match problem {
                TimelineProblem::Manifests(errors) => TimelineError::Manifests(errors),
                TimelineProblem::Step(problem) => wrong(problem),
            })?;
            steps.push(TimelineStep { at, changes });
        }
        Ok(Self { file: file.to_owned(), steps, next: 0 })
    }

    /// Changes in the order in which a daemon published them, each with the first epoch under which it is in effect.
    pub(super) fn of_epochs(file: &Path, steps: impl IntoIterator<Item = (Epoch, Vec<ObjectChange>)>) -> Self {
        let steps = steps.into_iter().map(|(epoch, changes)| TimelineStep { at: StepTime::Epoch(epoch), changes });
        Self { file: file.to_owned(), steps: steps.collect(), next: 0 }
    }

    /// Resolves the steps relative to the first packet, which has this time.
    ///
    /// # Errors
    /// Relative and absolute steps turn out to be out of order.
    pub fn begin(&mut self, first: Time) -> Result<(), TimelineError> {
        let mut before = Time(0);
        for (place, step) in self.steps.iter_mut().enumerate() {
            let at = match step.at {
                StepTime::After(nanoseconds) => Time(first.0.saturating_add(nanoseconds)),
                StepTime::At(time) => time,
                StepTime::Epoch(_) => continue,
            };
            if at < before {
                let problem = "is before the previous step, given the first packet's time: sort the steps by time";
                return Err(TimelineError::Step {
                    file: self.file.clone(),
                    step: place + 1,
                    problem: problem.to_owned(),
                });
            }
            step.at = StepTime::At(at);
            before = at;
        }
        Ok(())
    }

    /// The changes of the next step if it is due before a packet of this time, and of this epoch, if that is known.
    #[inline]
    pub fn due(&mut self, time: Time, epoch: Option<Epoch>) -> Option<Vec<ObjectChange>> {
        let step = self.steps.get_mut(self.next)?;
        let is_due = match step.at {
            StepTime::At(at) => at <= time,
            StepTime::Epoch(first) => epoch.is_some_and(|epoch| !epoch.is_before(first)),
            StepTime::After(_) => false,
        };
        if !is_due {
            return None;
        }
        self.next += 1;
        Some(std::mem::take(&mut step.changes))
    }

    pub fn remaining(&self) -> usize {
        self.steps.len() - self.next
    }
}

enum TimelineProblem {
    Step(String),
    Manifests(ManifestErrors),
}

fn changes(
    file: &Path,
    step: &RawStep,
    known: &mut ReplayObjects,
    options: &Options,
) -> Result<Vec<ObjectChange>, TimelineProblem> {
    if step.replace.is_some() && !(step.apply.is_empty() && step.delete.is_empty()) {
        return Err(TimelineProblem::Step("has replace together with apply or delete: use either".to_owned()));
    }
    if step.replace.is_none() && step.apply.is_empty() && step.delete.is_empty() {
        return Err(TimelineProblem::Step("changes nothing: add apply, delete or replace".to_owned()));
    }
    let read = |paths: &[PathBuf]| {
        let directory = file.parent().unwrap_or(Path::new("."));
        let paths: Vec<PathBuf> = paths.iter().map(|path| directory.join(path)).collect();
        ReplayObjects::read(&paths, options).map_err(TimelineProblem::Manifests)
    };
    let mut after = known.clone();
    if let Some(paths) = &step.replace {
        after = read(paths)?;
    }
    for text in &step.delete {
        if !after.remove(&reference(text).map_err(TimelineProblem::Step)?) {
            return Err(TimelineProblem::Step(format!("delete: {text} does not exist at that time")));
        }
    }
    if !step.apply.is_empty() {
        after.add(read(&step.apply)?);
    }
    let changes = known.changes_to(&after);
    *known = after;
    Ok(changes)
}

/// `Kind name` or `Kind namespace/name`.
fn reference(text: &str) -> Result<ObjectRef, String> {
    let wrong = || {
        format!(
            "delete: {text:?} is not an object: write \"NetworkPolicy NAMESPACE/NAME\", Pod, Service, \
             EndpointSlice, or \"Namespace NAME\", Node, \
             ClusterNetworkPolicy"
        )
    };
    let (kind, name) = text.split_once(' ').ok_or_else(wrong)?;
    let key = || ObjectKey::parse(name).ok_or_else(wrong);
    match kind {
        "Namespace" => Ok(ObjectRef::Namespace(name.to_owned())),
        "Node" => Ok(ObjectRef::Node(name.to_owned())),
        "ClusterNetworkPolicy" => Ok(ObjectRef::ClusterNetworkPolicy(name.to_owned())),
        "Pod" => key().map(ObjectRef::Pod),
        "Service" => key().map(ObjectRef::Service),
        "EndpointSlice" => key().map(ObjectRef::EndpointSlice),
        "NetworkPolicy" => key().map(ObjectRef::NetworkPolicy),
        _ => Err(wrong()),
    }
}

fn step_time(text: &str) -> Result<StepTime, String> {
    let wrong =
        || format!("at = {text:?} is not a time: write \"+1.5s\" after the first packet, or \"2026-03-01T12:00:00Z\"");
    if let Some(after) = text.strip_prefix('+') {
        let duration: jiff::SignedDuration = after.parse().map_err(|_| wrong())?;
        return u64::try_from(duration.as_nanos()).map(StepTime::After).map_err(|_| wrong());
    }
    let timestamp: jiff::Timestamp = text.parse().map_err(|_| wrong())?;
    u64::try_from(timestamp.as_nanosecond()).map(|nanoseconds| StepTime::At(Time(nanoseconds))).map_err(|_| wrong())
}

/// Whether two times are in order, as far as that is known before the first packet.
fn is_before(a: StepTime, b: StepTime) -> bool {
    match (a, b) {
        (StepTime::After(a), StepTime::After(b)) => a < b,
        (StepTime::At(a), StepTime::At(b)) => a < b,
        _ => false,
    }
}

fn in_one_line(error: &toml::de::Error, text: &str) -> String {
    let line = error.span().map(|span| text[..span.start.min(text.len())].matches('\n').count() + 1);
    let message = error.message().replace('\n', " ");
    line.map_or(message.clone(), |line| format!("line {line}: {message}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeline_times_parse_in_both_forms() {
        assert_eq!(step_time("+1.5s"), Ok(StepTime::After(1_500_000_000)));
        assert_eq!(step_time("+2m"), Ok(StepTime::After(120_000_000_000)));
        assert_eq!(step_time("1970-01-01T00:00:01.5Z"), Ok(StepTime::At(Time(1_500_000_000))));
        for wrong in ["5", "+", "+-5s", "later", "1969-12-31T23:59:59Z"] {
            assert!(step_time(wrong).is_err(), "{wrong}");
        }
    }
}
