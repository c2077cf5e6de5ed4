//! `penstock capture`: packets of a running daemon with what was decided on them.

mod file;
mod filter;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::ValueEnum;
use penstock_admin::capture::{
    CaptureCounts, CaptureError, CaptureEvent, CaptureMessage, CaptureQuery, CaptureStream, DEFAULT_SOCKET, Verdict,
};

use super::Failure;
use file::PacketFile;
use penstock_replay::bundle::{BundleStart, BundleWriter};

/// Capture packets of a running daemon with their verdicts
///
/// Writes pcapng: one interface for each pod's port, and a comment for each packet with the verdict, the reason, the rules, the
/// connection and the epoch. A packet that workers translate is written as it came and as it leaves. The daemon offers captures
/// only where `capture.socket` is set in its configuration. Established connections that programs forward in the kernel go
/// through the workers while a capture wants them.
///
/// With `--bundle` a directory gets the packets, the cluster's objects as they are in force when the capture begins, and each change
/// of them meanwhile. `penstock replay DIR` evaluates the packets again, and says whether it decides as the daemon did.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Comments:
  verdict=allow    it passes; it may still be lost on the way out, which the port's counters tell
  verdict=deny     it is dropped; reason= has the drop reason
  egress=          the rule that decides the egress of the end that opened the connection, or
                   open, exempt, default, denied, not here
  ingress=         the same for the ingress of the other end
  connection=      the number that penstock flows and the verdict log have for it
  service=         the Service that the connection is to
  opens            the packet belonged to no connection yet: it opens one, or is denied
  translated       the packet as it leaves, with other addresses or ports than it came with
  lost=            packets before this one that are not in the capture

Exit codes:
  0  ended at a limit, by SIGINT or SIGTERM, or because the reader of standard output has left
  1  the file cannot be written in full, or the daemon has ended
  2  bad input: a filter, a file that exists, a directory with files, a terminal, or the daemon offers no captures

Examples:
  penstock capture --pod shop/web-1 -o web.pcapng
  penstock capture --pod shop/web-1 --seconds 60 --bundle incident/ && penstock replay incident/
  penstock capture --verdict deny --seconds 30 -o denied.pcapng
  penstock capture --reason spoofed_source --snaplen 128 --packets 1000 -o spoofed.pcapng
  penstock capture --connection 00c0ffee00c0ffee -o - | tcpdump -n -r -
  penstock capture --pod shop/web-1 --filter 'tcp port 80' -o - | wireshark -k -i -
  penstock capture --program '1,6 0 0 1' --bytes 1000000 -o some.pcapng")]
pub(super) struct Args {
    /// The file to write, or - for standard output; an existing file is not overwritten
    #[arg(short, long, value_name = "FILE", required_unless_present = "bundle")]
    output: Option<PathBuf>,
    /// Write a bundle for penstock replay: packets, objects and their changes; the directory is created, or is empty
    #[arg(long, value_name = "DIR", conflicts_with = "output")]
    bundle: Option<PathBuf>,
    /// Only packets from or to this pod of the node (NAMESPACE/POD)
    #[arg(long, value_name = "POD")]
    pod: Option<String>,
    /// Only packets with this verdict
    #[arg(long, value_name = "VERDICT")]
    verdict: Option<VerdictArg>,
    /// Only packets that were dropped for this reason, such as ingress_denied
    #[arg(long, value_name = "CAUSE")]
    reason: Option<String>,
    /// Only packets from or to this address
    #[arg(long, value_name = "ADDRESS")]
    host: Option<IpAddr>,
    /// Only packets from or to this port
    #[arg(long, value_name = "NUMBER")]
    port: Option<u16>,
    /// Only packets of this protocol: TCP, UDP, SCTP, ICMP, ICMPv6 or a number
    #[arg(long, value_name = "PROTOCOL")]
    protocol: Option<String>,
    /// Only packets of this connection, by the number that penstock flows shows
    #[arg(long, value_name = "NUMBER")]
    connection: Option<String>,
    /// Only packets that a filter expression of libpcap accepts (pcap-filter(7)); tcpdump compiles it
    #[arg(long, value_name = "EXPRESSION")]
    filter: Option<String>,
    /// The same compiled, where there is no tcpdump: what `tcpdump -ddd -y EN10MB EXPRESSION` prints elsewhere
    #[arg(long, value_name = "PROGRAM", conflicts_with = "filter")]
    program: Option<String>,
    /// Bytes to keep of each packet, from 64 to 4096
    #[arg(long, value_name = "BYTES")]
    snaplen: Option<u32>,
    /// End after so many packets
    #[arg(long, value_name = "COUNT")]
    packets: Option<u64>,
    /// End after so many seconds, at most an hour
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<u64>,
    /// End after so many bytes of packets
    #[arg(long, value_name = "COUNT")]
    bytes: Option<u64>,
    /// End when standard input does, or has anything to read: for programs that run this at the other end of a connection
    #[arg(long)]
    end_with_input: bool,
    /// The daemon's capture socket (capture.socket of its configuration)
    #[arg(long, value_name = "PATH", default_value = DEFAULT_SOCKET)]
    socket: PathBuf,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum, Debug)]
enum VerdictArg {
    Allow,
    Deny,
}

/// How long the daemon may be silent: it sends its progress each second.
const SILENCE: Duration = Duration::from_secs(20);

pub(super) fn run(args: Args) -> Result<(), Failure> {
    let query = args.query()?;
    match (&args.bundle, &args.output) {
        (Some(directory), _) => run_bundle(directory, &args.socket, &query, args.end_with_input),
        (None, Some(output)) => run_file(output, &args.socket, &query, args.end_with_input),
        (None, None) => Err(Failure::bad_input("neither -o FILE nor --bundle DIR is given; give one of them")),
    }
}

fn run_file(output: &Path, socket: &Path, query: &CaptureQuery, end_with_input: bool) -> Result<(), Failure> {
    let is_stdout = output == Path::new("-");
    if is_stdout && io::stdout().is_terminal() {
        return Err(Failure::bad_input(
            "standard output is a terminal: write packets to a file (-o FILE), or pipe them to a program",
        ));
    }
    // Before the capture: a file that cannot be written is no reason to look at packets.
    let file = if is_stdout { None } else { Some(create(output)?) };
    let stream = open(socket, query, end_with_input);
    let mut stream = stream.inspect_err(|_| _ = file.as_ref().map(|_| std::fs::remove_file(output)))?;
    if let Ok(output) = io::stdout().as_fd().try_clone_to_owned()
        && is_stdout
    {
        stream.watch_output(output);
    }
    match file {
        None => match capture(stream, io::stdout().lock(), None).0 {
            Err(CaptureFailure::Write(error)) => Failure::from_output(error),
            ended => ended.map_err(|error| error.named("standard output")),
        },
        Some(file) => capture(stream, file, None).0.map_err(|error| error.named(&output.display().to_string())),
    }
}

/// A capture that the daemon or a signal ends early leaves a bundle up to there.
fn run_bundle(directory: &Path, socket: &Path, query: &CaptureQuery, end_with_input: bool) -> Result<(), Failure> {
    let (mut bundle, packets) = BundleWriter::create(directory).map_err(Failure::bad_input)?;
    let stream = open(socket, query, end_with_input)?;
    let named = |error: CaptureFailure| error.named(&directory.display().to_string());
    let (ended, counts) = capture(stream, packets, Some(&mut bundle));
    if let Err(error @ CaptureFailure::Write(_)) = ended {
        return Err(named(error));
    }
    let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as u64;
    bundle.end(time, counts.packets, counts.lost).map_err(|error| named(CaptureFailure::Write(error)))?;
    ended.map_err(named)
}

/// Begins a capture, which with `end_with_input` ends as by an interrupt when standard input does.
fn open(socket: &Path, query: &CaptureQuery, end_with_input: bool) -> Result<CaptureStream, Failure> {
    let mut stream = CaptureStream::open(socket, query).map_err(failure)?;
    if let Ok(input) = io::stdin().as_fd().try_clone_to_owned()
        && end_with_input
    {
        stream.watch_input(input);
    }
    Ok(stream)
}

impl Args {
    fn query(&self) -> Result<CaptureQuery, Failure> {
        Ok(CaptureQuery {
            pod: self.pod.clone(),
            verdict: self.verdict.map(|verdict| match verdict {
                VerdictArg::Allow => Verdict::Allow,
                VerdictArg::Deny => Verdict::Deny,
            }),
            reason: self.reason.clone(),
            host: self.host,
            port: self.port,
            protocol: self.protocol.clone(),
            connection: self.connection.clone(),
            program: match (&self.filter, &self.program) {
                (Some(expression), _) => Some(filter::compile(expression).map_err(Failure::bad_input)?),
                (None, Some(program)) => Some(filter::in_one_line(program)),
                (None, None) => None,
            },
            snap_length: self.snaplen,
            packets: self.packets,
            seconds: self.seconds,
            bytes: self.bytes,
            objects: self.bundle.is_some(),
        })
    }
}

fn create(path: &Path) -> Result<File, Failure> {
    File::create_new(path).map_err(|error| {
        let name = path.display();
        Failure::bad_input(match error.kind() {
            io::ErrorKind::AlreadyExists => format!("{name}: exists already; give another name"),
            _ => format!(
                "{name}: cannot be created ({error}); give a path that can be written, or - for standard output"
            ),
        })
    })
}

fn failure(error: CaptureError) -> Failure {
    match error {
        CaptureError::NotOffered { .. } | CaptureError::Refused(_) => Failure::bad_input(error),
        CaptureError::Broken { .. } | CaptureError::System(_) => Failure::Failed(error.into()),
    }
}

/// Why a capture ended before its end.
#[derive(Debug, thiserror::Error)]
enum CaptureFailure {
    #[error("cannot write: {0}")]
    Write(#[from] io::Error),
    #[error(transparent)]
    Daemon(#[from] CaptureError),
}

impl CaptureFailure {
    fn named(self, output: &str) -> Failure {
        match self {
            Self::Write(error) => Failure::Failed(anyhow::Error::new(error).context(format!("cannot write {output}"))),
            Self::Daemon(error) => failure(error),
        }
    }
}

/// Writes packets until the capture ends, and objects if there is a bundle for them. What was written so far is a whole file
/// whenever no packet is on its way. Returns how many packets are in the file, and how many were lost.
fn capture(
    mut stream: CaptureStream,
    output: impl Write,
    bundle: Option<&mut BundleWriter>,
) -> (Result<(), CaptureFailure>, CaptureCounts) {
    let mut counts = CaptureCounts::default();
    let file = PacketFile::new(BufWriter::with_capacity(1 << 16, output));
    let mut file = match file {
        Ok(file) => file,
        Err(error) => return (Err(error.into()), counts),
    };
    let ended = receive(&mut stream, &mut file, bundle, &mut counts);
    counts.packets = file.packets();
    (ended, counts)
}

fn receive(
    stream: &mut CaptureStream,
    file: &mut PacketFile<impl Write>,
    mut bundle: Option<&mut BundleWriter>,
    counts: &mut CaptureCounts,
) -> Result<(), CaptureFailure> {
    file.flush()?;
    loop {
        let message = match stream.next(SILENCE) {
            Ok(CaptureEvent::Message(message, frame)) => {
                match (&message, bundle.as_deref_mut()) {
                    (CaptureMessage::Packet(record), _) => file.packet(record, frame)?,
                    (message, Some(bundle)) => write_objects(bundle, message, frame)?,
                    _ => {}
                }
                message
            }
            Ok(CaptureEvent::OutputClosed) => {
                summary(file.packets(), counts.lost, "its reader has left");
                return Ok(());
            }
            Ok(CaptureEvent::Interrupted) => {
                file.end(counts.lost, "interrupted")?;
                summary(file.packets(), counts.lost, "interrupted");
                return Ok(());
            }
            Ok(CaptureEvent::Quiet) => {
                file.end(counts.lost, "the daemon is silent")?;
                return Err(CaptureFailure::Daemon(CaptureError::System(io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!("the daemon has sent nothing for {} s", SILENCE.as_secs()),
                ))));
            }
            Err(error) => {
                file.end(counts.lost, "the daemon has ended")?;
                return Err(error.into());
            }
        };
        match message {
            CaptureMessage::Begin { node, .. } => eprintln!("penstock: capturing on {node}"),
            CaptureMessage::Packet(_) | CaptureMessage::Objects { .. } | CaptureMessage::Changes { .. } => {}
            CaptureMessage::Progress(so_far) => {
                *counts = so_far;
                file.lost(counts.lost);
            }
            CaptureMessage::End { reason, counts: last } => {
                *counts = last;
                file.end(counts.lost, &reason)?;
                summary(file.packets(), counts.lost, &reason);
                return Ok(());
            }
        }
        // So that a reader of a pipe sees each packet at once.
        if !stream.has_next() {
            file.flush()?;
        }
    }
}

/// Writes what a message says of the cluster's objects into a bundle.
fn write_objects(bundle: &mut BundleWriter, message: &CaptureMessage, content: &[u8]) -> io::Result<()> {
    match message {
        CaptureMessage::Begin { node, objects } => {
            let Some(objects) = objects.clone() else { return Ok(()) };
            let blocks = objects.service_cidrs.iter().map(|block| block.parse().map_err(io::Error::other));
            bundle.begin(BundleStart {
                version: objects.version,
                node: node.clone(),
                began: objects.time,
                epoch: objects.epoch,
                objects: objects.count,
                services: objects.services,
                service_cidrs: blocks.collect::<io::Result<_>>()?,
            });
            Ok(())
        }
        CaptureMessage::Objects { count } => bundle.objects(content, *count),
        CaptureMessage::Changes { epoch, time } => bundle.changes(*epoch, *time, content),
        CaptureMessage::Packet(_) | CaptureMessage::Progress(_) | CaptureMessage::End { .. } => Ok(()),
    }
}

fn summary(packets: u64, lost: u64, reason: &str) {
    eprintln!("penstock: {packets} packets captured, {lost} lost to the capture ({reason})");
}
