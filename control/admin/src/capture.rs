//! A capture of a running daemon: the query, the stream of packets that answers it, and its client.
//!
//! `GET /v1/capture` on the capture socket (`capture.socket`) is answered with a stream of messages until the capture ends.
//! A message is two lengths in bytes, each 32 bits in little-endian order, then a [`CaptureMessage`] in JSON of the first
//! length, then the frame of the second.

use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt, Empty};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::{Request, Response, StatusCode, header};
use hyper_util::rt::TokioIo;
use serde::{Deserialize, Serialize};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::types::ErrorBody;

/// Where a daemon offers captures, if its configuration says so.
pub const DEFAULT_SOCKET: &str = "/run/penstock/capture.sock";
pub const MAX_PACKETS: u64 = 10_000_000;
/// Longest capture, in seconds.
pub const MAX_SECONDS: u64 = 3_600;
pub const MAX_BYTES: u64 = 4 << 30;
/// Most bytes that are kept of a frame; no frame is longer.
pub const MAX_SNAP_LENGTH: u32 = 4_096;
/// Fewest: the headers up to the ports.
pub const MIN_SNAP_LENGTH: u32 = 64;

/// How long the daemon may take to answer, and to send the next message: without packets it sends its progress each second.
const SILENCE: Duration = Duration::from_secs(20);
/// Longest message, both parts together. A longer one is none of this protocol.
/// An object of an API server has at most 1.5 MB there, and not much more here.
const LONGEST: usize = 16 << 20;

/// `GET /v1/capture`: the query. Packets fit that fit every part that is given.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CaptureQuery {
    /// Only packets from or to this pod of the node: `namespace/name`.
    pub pod: Option<String>,
    pub verdict: Option<Verdict>,
    pub reason: Option<String>,
    pub host: Option<IpAddr>,
    pub port: Option<u16>,
    /// Only packets of this protocol: by name or number.
    pub protocol: Option<String>,
    /// Only packets of the connection with this identifier, as the verdict log and `/v1/flows` show it.
    pub connection: Option<String>,
    /// Only packets that this classic BPF program accepts: the number of instructions, then each as `code jt jf k`, separated
    /// by commas.
    pub program: Option<String>,
    /// Bytes to keep of each frame, from [`MIN_SNAP_LENGTH`] to [`MAX_SNAP_LENGTH`]; all without it.
    pub snap_length: Option<u32>,
    /// End after so many packets; at most [`MAX_PACKETS`], as without it.
    pub packets: Option<u64>,
    /// End after so many seconds; at most [`MAX_SECONDS`], as without it.
    pub seconds: Option<u64>,
    /// End after so many bytes of frames; at most [`MAX_BYTES`], as without it.
    pub bytes: Option<u64>,
    /// Whether the cluster's objects come with the packets: first all that are in effect, then each change before the first packet
    /// that was processed under it. A daemon that does not know this part refuses it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub objects: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    Allow,
    Deny,
}

impl Verdict {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Allow => "allow",
            Self::Deny => "deny",
        }
    }
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CaptureMessage {
    /// The capture has begun: packets that workers receive from now on are in it. The first message.
    Begin {
        node: String,
        /// The cluster's objects that follow, if the query asks for them.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        objects: Option<ObjectsInForce>,
    },
    /// Some of the objects that are in effect when the capture begins, before all packets; a line of JSON for each follows.
    Objects { count: u64 },
    /// Objects have changed; a JSON array of the changes follows. A long batch comes as several messages.
    Changes {
        /// The first epoch under which all of them are in effect.
        epoch: u32,
        /// When that was published, in nanoseconds since 1970.
        time: u64,
    },
    /// A packet; its frame follows.
    Packet(PacketRecord),
    /// How much was captured so far; at least once a second.
    Progress(CaptureCounts),
    /// The capture has ended. The last message.
    End {
        /// Which limit was reached, or what else ended it.
        reason: String,
        counts: CaptureCounts,
    },
}

/// The objects under which packets of a capture are processed.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ObjectsInForce {
    pub version: String,
    /// The first epoch of the capture: the objects are those of this epoch.
    pub epoch: u32,
    /// When the capture began, in nanoseconds since 1970.
    pub time: u64,
    pub count: u64,
    pub service_cidrs: Vec<String>,
    /// When a segment from the middle of a connection opens one. A daemon that does not say it does so always.
    #[serde(default)]
    pub midstream_pickup: PickupInForce,
}

/// The setting `conntrack.midstream_pickup` as a daemon follows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PickupInForce {
    #[default]
    Always,
    Never,
    /// Up to this time, in nanoseconds since 1970.
    Until(u64),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct CaptureCounts {
    pub packets: u64,
    /// Bytes of their frames that were kept.
    pub bytes: u64,
    /// Packets that fit the query and are not in it, because its reader was too slow.
    pub lost: u64,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PacketRecord {
    /// When its batch was received, in nanoseconds since 1970.
    pub time: u64,
    /// The number of the port that it came in by.
    pub port: u16,
    /// The name of what is behind that port: a pod's `namespace/name`, `node`, or an interface's name.
    pub interface: String,
    /// Bytes of the frame, of which not all may have been kept.
    pub length: u32,
    pub verdict: Verdict,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The rule that decides the egress of the end that opened its connection, or the verdict; `None` if policy was not asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<String>,
    /// The same for the ingress of the other end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ingress: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connection: Option<String>,
    /// Whether policy was asked because the packet belongs to no connection yet: it opens one, or is denied.
    #[serde(default, skip_serializing_if = "is_false")]
    pub opens: bool,
    /// The verdict if everything that is staged were promoted, for a packet that opens a connection or tries to.
    /// `None` where nothing is staged, and of a daemon that does not know this part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub staged: Option<Box<StagedVerdict>>,
    /// The epoch under which it was processed.
    pub epoch: u32,
    pub worker: usize,
}

/// The verdict of policy if everything that is staged were promoted.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct StagedVerdict {
    /// Whether the packet would pass.
    pub verdict: Verdict,
    /// The rule that would decide the egress of the end that opens the connection, or the verdict.
    pub egress: String,
    /// The same for the ingress of the other end.
    pub ingress: String,
}

fn is_false(value: &bool) -> bool {
    !value
}

pub fn encode(message: &CaptureMessage, frame: &[u8], stream: &mut Vec<u8>) {
    let head = serde_json::to_vec(message).expect("strings and numbers are JSON");
    stream.extend_from_slice(&(head.len() as u32).to_le_bytes());
    stream.extend_from_slice(&(frame.len() as u32).to_le_bytes());
    stream.extend_from_slice(&head);
    stream.extend_from_slice(frame);
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DecodedMessage<'a> {
    pub message: CaptureMessage,
    pub frame: &'a [u8],
    /// Bytes that both take of the stream.
    pub length: usize,
}

/// The first message of a stream. `Ok(None)`: it is not complete yet.
///
/// # Errors
/// The stream is none of messages.
pub fn decode(stream: &[u8]) -> Result<Option<DecodedMessage<'_>>, String> {
    let Some((head, whole)) = message_length(stream)? else { return Ok(None) };
    let (head, frame) = stream[LENGTHS..whole].split_at(head);
    let parsed = serde_json::from_slice(head).map_err(|error| error.to_string())?;
    Ok(Some(DecodedMessage { message: parsed, frame, length: whole }))
}

/// Bytes of both lengths.
const LENGTHS: usize = 8;

/// The bytes of the first message's JSON, and of the whole message. `Ok(None)`: it is not complete yet.
fn message_length(stream: &[u8]) -> Result<Option<(usize, usize)>, String> {
    let Some((lengths, rest)) = stream.split_at_checked(LENGTHS) else { return Ok(None) };
    let length =
        |at: usize| u32::from_le_bytes([lengths[at], lengths[at + 1], lengths[at + 2], lengths[at + 3]]) as usize;
    let (head, both) = (length(0), length(0).saturating_add(length(4)));
    if both > LONGEST {
        return Err(format!("a message of {both} bytes, and none has more than {LONGEST}"));
    }
    Ok((rest.len() >= both).then_some((head, LENGTHS + both)))
}

#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    #[error("{}: no daemon offers captures there ({source}); set capture.socket in its configuration, which is \"off\" by default, and restart it, or give its path with --socket", .path.display())]
    NotOffered { path: PathBuf, source: io::Error },
    #[error("{0}")]
    Refused(String),
    /// The daemon sends no valid stream, or it ends early.
    #[error("{}: {what}", .path.display())]
    Broken { path: PathBuf, what: String },
    #[error("cannot capture: {0}")]
    System(#[from] io::Error),
}

/// Waits until a descriptor is ready for this; forever without one.
async fn ready(descriptor: Option<&AsyncFd<OwnedFd>>, interest: Interest) {
    match descriptor {
        Some(descriptor) => drop(descriptor.ready(interest).await),
        None => std::future::pending().await,
    }
}

#[derive(Debug)]
pub enum CaptureEvent<'a> {
    Message(CaptureMessage, &'a [u8]),
    /// SIGINT or SIGTERM asks to end, or the input has ended ([`CaptureStream::watch_input`]).
    Interrupted,
    /// Nobody reads the output any more ([`CaptureStream::watch_output`]).
    OutputClosed,
    /// Nothing has come for the time that the caller wanted to wait.
    Quiet,
}

/// A capture that runs. Dropping it ends it.
pub struct CaptureStream {
    path: PathBuf,
    runtime: Runtime,
    body: Incoming,
    connection: JoinHandle<Result<(), hyper::Error>>,
    interrupt: [Signal; 2],
    output: Option<AsyncFd<OwnedFd>>,
    input: Option<AsyncFd<OwnedFd>>,
    received: Vec<u8>,
    /// How much of it was read.
    read: usize,
}

impl CaptureStream {
    /// Begins a capture at this socket. From now on SIGINT and SIGTERM do not end the process, but are events.
    ///
    /// # Errors
    /// No daemon offers captures there, or it refuses the query.
    pub fn open(socket: &Path, query: &CaptureQuery) -> Result<Self, CaptureError> {
        let path = socket.to_owned();
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let broken = |what: String| CaptureError::Broken { path: path.clone(), what };
        let query = serde_urlencoded::to_string(query).map_err(|error| broken(error.to_string()))?;
        let opened = runtime.block_on(async {
            let interrupt = [signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?];
            let asked = timeout(SILENCE, ask(&path, &format!("/v1/capture?{query}"))).await;
            let (response, connection) = asked.unwrap_or_else(|_| Err(broken(silent())))?;
            Ok::<_, CaptureError>((response.into_body(), connection, interrupt))
        });
        let (body, connection, interrupt) = opened?;
        Ok(Self {
            path,
            runtime,
            body,
            connection,
            interrupt,
            output: None,
            input: None,
            received: Vec::new(),
            read: 0,
        })
    }

    /// From now on it is an event if the other end of this pipe or socket closes: a reader that leaves while no packet comes
    /// would not be noticed otherwise. A file has no other end, and is not watched.
    pub fn watch_output(&mut self, output: OwnedFd) {
        let _inside = self.runtime.enter();
        // SAFETY: the descriptor is open, and the value owns it and never gives it away.
        self.output = unsafe { AsyncFd::register_with_interest(output, Interest::ERROR) }.ok();
    }

    /// From now on it is an interrupt if this pipe or socket ends, or has something to read. A file, which has always, is not
    /// watched.
    pub fn watch_input(&mut self, input: OwnedFd) {
        let _inside = self.runtime.enter();
        // SAFETY: the descriptor is open, and the value owns it and never gives it away.
        self.input = unsafe { AsyncFd::register_with_interest(input, Interest::READABLE) }.ok();
    }

    /// Waits for the next message, at most as long as this.
    ///
    /// # Errors
    /// The daemon has ended, or sends what is no message.
    pub fn next(&mut self, patience: Duration) -> Result<CaptureEvent<'_>, CaptureError> {
        let broken = |path: &Path, what: String| CaptureError::Broken { path: path.to_owned(), what };
        let (message, frame) = loop {
            let decoded = decode(&self.received[self.read..]).map_err(|what| broken(&self.path, what))?;
            if let Some(DecodedMessage { message, frame, length }) = decoded {
                let frame = frame.len();
                self.read += length;
                break (message, self.read - frame..self.read);
            }
            self.received.drain(..std::mem::take(&mut self.read));
            let Self { runtime, body, interrupt: [int, term], output, input, .. } = self;
            let closed = ready(output.as_ref(), Interest::ERROR);
            let ended = ready(input.as_ref(), Interest::READABLE);
            let waited = runtime.block_on(async {
                tokio::select! {
                    frame = body.frame() => Ok(frame),
                    _ = int.recv() => Err(CaptureEvent::Interrupted),
                    _ = term.recv() => Err(CaptureEvent::Interrupted),
                    () = ended => Err(CaptureEvent::Interrupted),
                    () = closed => Err(CaptureEvent::OutputClosed),
                    () = tokio::time::sleep(patience) => Err(CaptureEvent::Quiet),
                }
            });
            match waited {
                Err(event) => return Ok(event),
                Ok(None) => return Err(broken(&self.path, "the daemon has ended the capture".to_owned())),
                Ok(Some(Err(error))) => return Err(broken(&self.path, format!("the daemon has ended: {error}"))),
                Ok(Some(Ok(frame))) => self.received.extend(frame.data_ref().into_iter().flatten()),
            }
        };
        Ok(CaptureEvent::Message(message, &self.received[frame]))
    }

    pub fn has_next(&self) -> bool {
        message_length(&self.received[self.read..]).is_ok_and(|length| length.is_some())
    }
}

impl Drop for CaptureStream {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

fn silent() -> String {
    format!("no answer within {} s", SILENCE.as_secs())
}

type Asked = (Response<Incoming>, JoinHandle<Result<(), hyper::Error>>);

async fn ask(path: &Path, target: &str) -> Result<Asked, CaptureError> {
    let stream = UnixStream::connect(path).await;
    let stream = stream.map_err(|source| CaptureError::NotOffered { path: path.to_owned(), source })?;
    let failed = |what: String| CaptureError::Broken { path: path.to_owned(), what };
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(|error| failed(error.to_string()))?;
    let connection = tokio::spawn(connection);
    let request = Request::get(target).header(header::HOST, "penstock").body(Empty::<Bytes>::new());
    let request = request.map_err(|error| failed(error.to_string()))?;
    let response = sender.send_request(request).await.map_err(|error| failed(error.to_string()))?;
    let status = response.status();
    if status == StatusCode::OK {
        return Ok((response, connection));
    }
    let body = response.into_body().collect().await.map_err(|error| failed(error.to_string()))?.to_bytes();
    let message = serde_json::from_slice::<ErrorBody>(&body).map(|body| body.error);
    Err(CaptureError::Refused(
        message.unwrap_or_else(|_| format!("HTTP status {status}; is it the capture socket of a penstock daemon?")),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packet(length: u32) -> CaptureMessage {
        CaptureMessage::Packet(PacketRecord {
            time: 1_700_000_000_123_456_789,
            port: 3,
            interface: "shop/web".to_owned(),
            length,
            verdict: Verdict::Deny,
            reason: Some("ingress_denied".to_owned()),
            egress: None,
            ingress: Some("denied".to_owned()),
            connection: Some("00c0ffee00c0ffee".to_owned()),
            opens: true,
            staged: Some(Box::new(StagedVerdict {
                verdict: Verdict::Allow,
                egress: "open".to_owned(),
                ingress: "shop-db".to_owned(),
            })),
            epoch: 7,
            worker: 0,
        })
    }

    #[test]
    fn packets_of_a_daemon_without_staged_policies_are_read() {
        let CaptureMessage::Packet(known) = packet(3) else { unreachable!("a packet") };
        let mut value = serde_json::to_value(&known).unwrap();
        assert_eq!(value["staged"], serde_json::json!({"verdict": "allow", "egress": "open", "ingress": "shop-db"}));
        value.as_object_mut().unwrap().remove("staged");
        let older = PacketRecord { staged: None, ..known };
        assert_eq!(serde_json::from_value::<PacketRecord>(value.clone()).unwrap(), older);
        assert_eq!(serde_json::to_value(&older).unwrap(), value, "a reader that does not know it is sent nothing new");
    }

    #[test]
    fn messages_come_back_whole_however_the_stream_is_cut() {
        let begin = CaptureMessage::Begin { node: "a".to_owned(), objects: None };
        let end = CaptureMessage::End { reason: "over".to_owned(), counts: CaptureCounts::default() };
        let messages = [(begin, &b""[..]), (packet(3), b"abc"), (packet(0), b""), (end, b"")];
        let mut stream = Vec::new();
        messages.iter().for_each(|(message, frame)| encode(message, frame, &mut stream));
        let (mut received, mut found) = (Vec::new(), Vec::new());
        for byte in stream {
            received.push(byte);
            if let Some(DecodedMessage { message, frame, length }) = decode(&received).unwrap() {
                found.push((message, frame.to_vec()));
                received.drain(..length);
            }
        }
        let expected: Vec<_> = messages.into_iter().map(|(message, frame)| (message, frame.to_vec())).collect();
        assert_eq!((found, received.len()), (expected, 0));
    }

    #[test]
    fn what_is_no_message_is_an_error_and_never_read_for_ever() {
        assert!(decode(&[0xff; 8]).unwrap_err().contains("none has more than"));
        let mut stream = 2_u32.to_le_bytes().to_vec();
        stream.extend_from_slice(&0_u32.to_le_bytes());
        assert_eq!(decode(&stream), Ok(None));
        stream.extend_from_slice(b"{]");
        assert!(decode(&stream).is_err());
    }

    #[test]
    fn without_a_daemon_the_error_names_the_setting() {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR"));
        let error = CaptureStream::open(&directory.join("none.sock"), &CaptureQuery::default()).err().unwrap();
        assert!(error.to_string().contains("set capture.socket in its configuration"), "{error}");
    }
}
