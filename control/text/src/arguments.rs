//! Arguments that `penstock` and `kubectl penstock` share.

use std::fs::File;
use std::io;
use std::net::IpAddr;
use std::path::Path;

use clap::ValueEnum;
use penstock_admin::capture::Verdict;
use penstock_admin::types::FlowsQuery;
use serde::Serialize;

use crate::failure::Failure;
use crate::number::json;

/// Which connections are listed.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct FlowArgs {
    /// Only connections from or to this pod (NAMESPACE/POD) or address
    #[arg(long, visible_alias = "address", value_name = "END")]
    pub pod: Option<String>,
    /// Only connections in this state
    #[arg(long, value_name = "STATE")]
    pub state: Option<String>,
    /// Only connections of this protocol: TCP, UDP, SCTP, ICMP, ICMPv6 or a number
    #[arg(long, value_name = "PROTOCOL")]
    pub protocol: Option<String>,
    /// Only connections to this destination port
    #[arg(long, value_name = "NUMBER")]
    pub port: Option<u16>,
    /// List at most this many of a node
    #[arg(long, value_name = "COUNT", default_value_t = 1000)]
    pub limit: usize,
}

impl FlowArgs {
    pub fn query(self) -> FlowsQuery {
        let Self { pod: end, state, protocol, port, limit } = self;
        FlowsQuery { end, state, protocol, port, limit: Some(limit) }
    }

    /// As options of `penstock flows`.
    pub fn options(&self) -> Vec<String> {
        options([
            ("pod", self.pod.clone()),
            ("state", self.state.clone()),
            ("protocol", self.protocol.clone()),
            ("port", self.port.map(|port| port.to_string())),
            ("limit", Some(self.limit.to_string())),
        ])
    }
}

/// How a listing is printed, and how often.
#[derive(clap::Args, Clone, Copy, Debug, Default)]
pub struct ListingArgs {
    /// Print as JSON; with --watch one object per line
    #[arg(long)]
    pub json: bool,
    /// List again every so many seconds, until interrupted
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub watch: Option<u64>,
}

impl ListingArgs {
    /// The listing as it is printed: JSON of it, or this text.
    pub fn render(self, listing: &impl Serialize, text: impl FnOnce() -> String) -> String {
        match (self.json, self.watch) {
            (true, None) => json(listing),
            (true, Some(_)) => serde_json::to_string(listing).expect("strings and numbers are JSON") + "\n",
            (false, None) => text(),
            // From the top of an empty screen (ECMA-48: cursor to 1,1, then erase what is below).
            (false, Some(_)) => format!("\x1b[H\x1b[J{}", text()),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum, Debug)]
pub enum VerdictArg {
    Allow,
    Deny,
}

impl From<VerdictArg> for Verdict {
    fn from(verdict: VerdictArg) -> Self {
        match verdict {
            VerdictArg::Allow => Self::Allow,
            VerdictArg::Deny => Self::Deny,
        }
    }
}

/// Which packets a capture gets, and when it ends.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct CaptureArgs {
    /// Only packets with this verdict
    #[arg(long, value_name = "VERDICT")]
    pub verdict: Option<VerdictArg>,
    /// Only packets that were dropped for this reason, such as ingress_denied
    #[arg(long, value_name = "CAUSE")]
    pub reason: Option<String>,
    /// Only packets from or to this address
    #[arg(long, value_name = "ADDRESS")]
    pub host: Option<IpAddr>,
    /// Only packets from or to this port
    #[arg(long, value_name = "NUMBER")]
    pub port: Option<u16>,
    /// Only packets of this protocol: TCP, UDP, SCTP, ICMP, ICMPv6 or a number
    #[arg(long, value_name = "PROTOCOL")]
    pub protocol: Option<String>,
    /// Only packets that a filter expression of libpcap accepts (pcap-filter(7)); tcpdump compiles it here
    #[arg(long, value_name = "EXPRESSION")]
    pub filter: Option<String>,
    /// The same compiled, where there is no tcpdump: what `tcpdump -ddd -y EN10MB EXPRESSION` prints elsewhere
    #[arg(long, value_name = "PROGRAM", conflicts_with = "filter")]
    pub program: Option<String>,
    /// Bytes to keep of each packet, from 64 to 4096
    #[arg(long, value_name = "BYTES")]
    pub snaplen: Option<u32>,
    /// End after so many packets; those of several nodes count together
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    pub packets: Option<u64>,
    /// End after so many seconds, at most an hour
    #[arg(long, value_name = "SECONDS")]
    pub seconds: Option<u64>,
    /// End after so many bytes of a node's packets
    #[arg(long, value_name = "COUNT")]
    pub bytes: Option<u64>,
}

impl CaptureArgs {
    /// As options of `penstock capture`, with the filter as this program.
    pub fn options(&self, program: Option<String>) -> Vec<String> {
        let text = |number: Option<u64>| number.map(|number| number.to_string());
        options([
            ("verdict", self.verdict.map(|verdict| Verdict::from(verdict).name().to_owned())),
            ("reason", self.reason.clone()),
            ("host", self.host.map(|host| host.to_string())),
            ("port", text(self.port.map(u64::from))),
            ("protocol", self.protocol.clone()),
            ("program", program),
            ("snaplen", text(self.snaplen.map(u64::from))),
            ("packets", text(self.packets)),
            ("seconds", text(self.seconds)),
            ("bytes", text(self.bytes)),
        ])
    }
}

/// A file that is to be written; standard output is the alternative.
///
/// # Errors
/// It exists, or cannot be created.
pub fn new_file(path: &Path) -> Result<File, Failure> {
    File::create_new(path).map_err(|error| {
        let name = path.display();
        Failure::bad_input(match error.kind() {
            io::ErrorKind::AlreadyExists => format!("{name}: exists already; give another name"),
            io::ErrorKind::ReadOnlyFilesystem => {
                format!("{name}: the file system is read-only; write to standard output (-)")
            }
            _ => format!(
                "{name}: cannot be created ({error}); give a path that can be written, or - for standard output"
            ),
        })
    })
}

/// Each in one word, so that no value is an option.
fn options<const N: usize>(given: [(&str, Option<String>); N]) -> Vec<String> {
    given.into_iter().filter_map(|(name, value)| Some(format!("--{name}={}", value?))).collect()
}
