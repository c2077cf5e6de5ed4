//! The files of a support bundle.

use penstock_admin::types::{Dump, DumpFile};
use penstock_policy::listing;
use serde::Serialize;

use crate::logging;
use crate::preflight::PreflightFinding;
use crate::view::{DaemonView, LiveCounters};

impl DaemonView<'_> {
    /// All state except connections and metrics. `config` is the loaded configuration, `findings` the result of
    /// preflight now.
    ///
    /// No file holds a secret: the configuration has none (a kubeconfig is named, not read), and logs and tables refer
    /// to objects by name.
    pub(crate) fn dump(&self, config: &toml::Table, findings: &[PreflightFinding], counters: &LiveCounters) -> Dump {
        let preflight = findings.iter().map(|finding| format!("{:<8} {}\n", finding.level, finding.line));
        let (engine, status) = (self.objects.engine(), self.status(counters));
        let files = vec![
            text("versions.txt", versions()),
            text("config.toml", config.to_string()),
            file("status.json", &status),
            text("policy.json", listing::json(engine)),
            text("preflight.txt", preflight.collect()),
            text("log.txt", logging::recent()),
        ];
        Dump { files }
    }
}

pub(super) fn text(name: &str, content: String) -> DumpFile {
    DumpFile { name: name.to_owned(), content }
}

/// A file with this value as JSON.
pub(super) fn file(name: &str, value: &impl Serialize) -> DumpFile {
    text(name, pretty(value) + "\n")
}

fn pretty(value: &impl Serialize) -> String {
    serde_json::to_string_pretty(value).expect("strings and numbers are JSON")
}

fn versions() -> String {
    let kernel = nix::sys::utsname::uname().map(|name| {
        let part = |part: &std::ffi::OsStr| part.to_string_lossy().into_owned();
        format!("{} {} {}", part(name.sysname()), part(name.release()), part(name.machine()))
    });
    format!("penstock {}\n{}\n", env!("CARGO_PKG_VERSION"), kernel.unwrap_or_else(|error| format!("no uname: {error}")))
}
