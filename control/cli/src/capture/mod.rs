//! `penstock capture`: packets of a running daemon with what was decided on them.

#[cfg(test)]
mod tests;

use std::io::{self, BufWriter, IsTerminal, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use penstock_admin::capture::{
    CaptureCounts, CaptureError, CaptureEvent, CaptureMessage, CaptureQuery, CaptureStream, DEFAULT_SOCKET, Verdict,
    encode,
};
use penstock_replay::bundle::BundleWriter;
use penstock_replay::capture::{VerdictFile, filter};
use penstock_text::arguments::{CaptureArgs, new_file};

use super::Failure;

/// Capture packets of a running daemon with their verdicts
///
/// Writes pcapng: one interface for each pod's port, and a comment for each packet with the verdict, the reason, the rules, the
/// connection and the epoch. A packet that workers translate is written as it came and as it leaves. The daemon offers captures
/// only where `capture.socket` is set in its configuration. Established connections that programs forward in the kernel go
/// through the workers while a capture wants them.
///
/// With `--bundle` a directory gets the packets, the cluster's objects as they are in effect when the capture begins, and each change
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
    #[arg(short, long, value_name = "FILE", required_unless_present_any = ["bundle", "messages"])]
    output: Option<PathBuf>,
    /// Write a bundle for penstock replay: packets, objects and their changes; the directory is created, or is empty
    #[arg(long, value_name = "DIR", conflicts_with = "output")]
    bundle: Option<PathBuf>,
    /// Write what the daemon sends to standard output as it is, for programs that make files of it
    #[arg(long, conflicts_with_all = ["output", "bundle"])]
    messages: bool,
    /// With --messages: the cluster's objects and their changes, too
    #[arg(long, requires = "messages")]
    objects: bool,
    /// Only packets from or to this pod of the node (NAMESPACE/POD)
    #[arg(long, value_name = "POD")]
    pod: Option<String>,
    #[command(flatten)]
    packets: CaptureArgs,
    /// Only packets of this connection, by the number that penstock flows shows
    #[arg(long, value_name = "NUMBER")]
    connection: Option<String>,
    /// End when standard input does, or has anything to read: for programs that run this at the other end of a connection
    #[arg(long)]
    end_with_input: bool,
    /// The daemon's capture socket (capture.socket of its configuration)
    #[arg(long, value_name = "PATH", default_value = DEFAULT_SOCKET)]
    socket: PathBuf,
}

/// How long the daemon may be silent: it sends its progress each second.
const SILENCE: Duration = Duration::from_secs(20);

pub(super) fn run(args: Args) -> Result<(), Failure> {
    let query = args.query()?;
    match (&args.bundle, &args.output) {
        (Some(directory), _) => run_bundle(directory, &args.socket, &query, args.end_with_input),
        (None, Some(output)) if output != Path::new("-") => run_file(output, &args.socket, &query, args.end_with_input),
        (None, _) => run_stdout(&args, &query),
    }
}

fn run_file(output: &Path, socket: &Path, query: &CaptureQuery, end_with_input: bool) -> Result<(), Failure> {
    // Before the capture: a file that cannot be written is no reason to look at packets.
    let file = new_file(output)?;
    let stream = open(socket, query, end_with_input).inspect_err(|_| _ = std::fs::remove_file(output))?;
    let written = Output::packets(file).map_err(CaptureFailure::Write);
    let ended = written.and_then(|mut written| capture(stream, &mut written).0);
    ended.map_err(|error| error.named(&output.display().to_string()))
}

fn run_stdout(args: &Args, query: &CaptureQuery) -> Result<(), Failure> {
    if io::stdout().is_terminal() {
        return Err(Failure::bad_input(
            "standard output is a terminal: write packets to a file (-o FILE), or pipe them to a program",
        ));
    }
    let mut stream = open(&args.socket, query, args.end_with_input)?;
    if let Ok(output) = io::stdout().as_fd().try_clone_to_owned() {
        stream.watch_output(output);
    }
    let stdout = io::stdout().lock();
    let output = if args.messages { Ok(Output::Messages(buffered(stdout))) } else { Output::packets(stdout) };
    match output.map_err(CaptureFailure::Write).and_then(|mut output| capture(stream, &mut output).0) {
        Err(CaptureFailure::Write(error)) => Failure::from_output(error),
        ended => ended.map_err(|error| error.named("standard output")),
    }
}

/// A capture that the daemon or a signal ends early leaves a bundle up to there.
fn run_bundle(directory: &Path, socket: &Path, query: &CaptureQuery, end_with_input: bool) -> Result<(), Failure> {
    let named = |error: CaptureFailure| error.named(&directory.display().to_string());
    let (mut bundle, packets) = BundleWriter::create(directory).map_err(Failure::bad_input)?;
    let stream = open(socket, query, end_with_input)?;
    let file = VerdictFile::new(buffered(packets)).map_err(|error| named(error.into()))?;
    let (ended, counts) = capture(stream, &mut Output::Packets(file, Some(&mut bundle)));
    if let Err(error @ CaptureFailure::Write(_)) = ended {
        return Err(named(error));
    }
    let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as u64;
    bundle.end(time, counts.packets, counts.lost).map_err(|error| named(CaptureFailure::Write(error)))?;
    ended.map_err(named)
}

fn buffered<W: Write>(output: W) -> BufWriter<W> {
    BufWriter::with_capacity(1 << 16, output)
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
        let CaptureArgs { verdict, reason, host, port, protocol, filter, program, snaplen, packets, seconds, bytes } =
            self.packets.clone();
        Ok(CaptureQuery {
            pod: self.pod.clone(),
            verdict: verdict.map(Verdict::from),
            reason,
            host,
            port,
            protocol,
            connection: self.connection.clone(),
            program: filter::program(filter.as_deref(), program.as_deref()).map_err(Failure::bad_input)?,
            snap_length: snaplen,
            packets,
            seconds,
            bytes,
            objects: self.bundle.is_some() || self.objects,
        })
    }
}

fn failure(error: CaptureError) -> Failure {
    match error {
        CaptureError::NotOffered { .. } | CaptureError::Refused(_) => Failure::bad_input(error),
        CaptureError::Broken { .. } | CaptureError::System(_) => Failure::Failed(error.into()),
    }
}

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

enum Output<'a, W: Write> {
    /// A file of packets, and the objects of a bundle.
    Packets(VerdictFile<BufWriter<W>>, Option<&'a mut BundleWriter>),
    Messages(BufWriter<W>),
}

impl<W: Write> Output<'_, W> {
    fn packets(output: W) -> io::Result<Self> {
        Ok(Self::Packets(VerdictFile::new(buffered(output))?, None))
    }

    /// Writes a message, after which so many packets are lost.
    fn message(&mut self, message: &CaptureMessage, content: &[u8], counts: CaptureCounts) -> io::Result<()> {
        match (self, message) {
            (Self::Packets(file, _), CaptureMessage::Packet(record)) => file.packet(0, record, content, counts.lost),
            (Self::Packets(_, Some(bundle)), message) => bundle.message(message, content),
            (Self::Packets(_, None), _) => Ok(()),
            (Self::Messages(output), message) => {
                let mut bytes = Vec::with_capacity(content.len() + 512);
                encode(message, content, &mut bytes);
                output.write_all(&bytes)
            }
        }
    }

    fn end(&mut self, reason: &str, counts: CaptureCounts) -> io::Result<()> {
        match self {
            Self::Packets(file, _) => file.end(&[(counts, reason.to_owned())]),
            Self::Messages(_) => {
                let end = CaptureMessage::End { reason: reason.to_owned(), counts };
                self.message(&end, &[], counts)?;
                self.flush()
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Packets(file, _) => file.flush(),
            Self::Messages(output) => output.flush(),
        }
    }
}

/// Writes what comes until the capture ends. What was written so far is whole whenever no message is on its way. Returns how many
/// packets are in it, and how many were lost.
fn capture(
    mut stream: CaptureStream,
    output: &mut Output<'_, impl Write>,
) -> (Result<(), CaptureFailure>, CaptureCounts) {
    let mut counts = CaptureCounts::default();
    let ended = receive(&mut stream, output, &mut counts).map(|reason| {
        let CaptureCounts { packets, lost, .. } = counts;
        eprintln!("penstock: {packets} packets captured, {lost} lost to the capture ({reason})");
    });
    (ended, counts)
}

/// Returns why it ended.
fn receive(
    stream: &mut CaptureStream,
    output: &mut Output<'_, impl Write>,
    counts: &mut CaptureCounts,
) -> Result<String, CaptureFailure> {
    output.flush()?;
    let (reason, error) = loop {
        match stream.next(SILENCE) {
            Ok(CaptureEvent::Message(CaptureMessage::End { reason, counts: last }, _)) => {
                counts.lost = last.lost;
                break (reason, None);
            }
            Ok(CaptureEvent::Message(message, content)) => {
                output.message(&message, content, *counts)?;
                match message {
                    CaptureMessage::Begin { node, .. } => eprintln!("penstock: capturing on {node}"),
                    CaptureMessage::Packet(_) => {
                        counts.packets += 1;
                        counts.bytes += content.len() as u64;
                    }
                    CaptureMessage::Progress(so_far) => counts.lost = so_far.lost,
                    _ => {}
                }
                // So that a reader of a pipe sees each packet at once.
                if !stream.has_next() {
                    output.flush()?;
                }
            }
            Ok(CaptureEvent::OutputClosed) => return Ok("its reader has left".to_owned()),
            Ok(CaptureEvent::Interrupted) => break ("interrupted".to_owned(), None),
            Ok(CaptureEvent::Quiet) => {
                let silent = format!("the daemon has sent nothing for {} s", SILENCE.as_secs());
                let error = CaptureError::System(io::Error::new(io::ErrorKind::TimedOut, silent));
                break ("the daemon is silent".to_owned(), Some(error));
            }
            Err(error) => break ("the daemon has ended".to_owned(), Some(error)),
        }
    };
    output.end(&reason, *counts)?;
    match error {
        None => Ok(reason),
        Some(error) => Err(error.into()),
    }
}
