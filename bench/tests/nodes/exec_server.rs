//! An API server that lists what it is given, and runs commands of `pods/exec` as processes of this machine: the WebSocket
//! protocol is Kubernetes' (`v4.channel.k8s.io`, and `v5.channel.k8s.io` of KEP-4006).

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use bytes::Bytes;
use futures_util::{SinkExt, StreamExt};
use http::header::{CONNECTION, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_PROTOCOL, UPGRADE};
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::Role;

/// Makes a process of a command's words.
pub(crate) type MakeCommand = Box<dyn Fn(&[String]) -> Command + Send + Sync>;

/// How a pod runs commands.
pub(crate) struct Runner {
    /// The subprotocol that its node's kubelet has.
    pub(crate) protocol: &'static str,
    pub(crate) command: MakeCommand,
}

/// Objects of the server.
#[derive(Default)]
pub(crate) struct Served {
    /// Objects and lists by path.
    pub(crate) objects: BTreeMap<String, Value>,
    /// By the pod's name.
    pub(crate) pods: BTreeMap<String, Runner>,
}

/// The server. Dropping it stops it.
pub(crate) struct ExecServer {
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// The user who may not run commands in pods.
pub(crate) const WITHOUT_EXEC: &str = "reader";

impl ExecServer {
    pub(crate) fn start(served: Served) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let body = move || {
            runtime.block_on(async {
                tokio::select! {
                    _ = stopped => {}
                    () = serve(listener, Arc::new(served)) => {}
                }
            });
            runtime.shutdown_background();
        };
        Self { address, stop: Some(stop), thread: Some(thread::spawn(body)) }
    }

    pub(crate) fn kubeconfig(&self) -> String {
        format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: test\n\
             clusters: [{{name: test, cluster: {{server: 'http://{}'}}}}]\n\
             users: [{{name: test, user: {{}}}}]\ncontexts: [{{name: test, context: {{cluster: test, user: test}}}}]\n",
            self.address
        )
    }
}

impl Drop for ExecServer {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

async fn serve(listener: TcpListener, served: Arc<Served>) {
    let listener = tokio::net::TcpListener::from_std(listener).unwrap();
    loop {
        let Ok((stream, _)) = listener.accept().await else { continue };
        let served = Arc::clone(&served);
        tokio::spawn(async move {
            let service = service_fn(move |request| {
                let answer = answer(&served, request);
                async { Ok::<_, Infallible>(answer) }
            });
            // A client may leave at any time.
            let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).with_upgrades().await;
        });
    }
}

fn answer(served: &Arc<Served>, request: Request<Incoming>) -> Response<Full<Bytes>> {
    let path = request.uri().path().to_owned();
    if let Some(pod) = path.strip_suffix("/exec").and_then(|path| path.rsplit('/').next()) {
        return exec(served, pod, request);
    }
    match served.objects.get(&path) {
        Some(object) => respond(200, object),
        None => respond(404, &status(404, "NotFound", &format!("{path} not found"))),
    }
}

fn respond(code: u16, value: &Value) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(value.to_string())));
    *response.status_mut() = StatusCode::from_u16(code).unwrap();
    response
}

fn status(code: u16, reason: &str, message: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Status", "metadata": {}, "status": "Failure", "message": message, "reason": reason, "code": code})
}

fn exec(served: &Arc<Served>, pod: &str, mut request: Request<Incoming>) -> Response<Full<Bytes>> {
    let text = |headers: &HeaderMap, name| {
        headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
    };
    let headers = request.headers();
    if text(headers, "impersonate-user".parse::<http::HeaderName>().unwrap()) == WITHOUT_EXEC {
        let message = format!("pods \"{pod}\" is forbidden: User \"{WITHOUT_EXEC}\" cannot get resource \"pods/exec\"");
        return respond(403, &status(403, "Forbidden", &message));
    }
    let Some(runner) = served.pods.get(pod) else {
        return respond(404, &status(404, "NotFound", &format!("pods \"{pod}\" not found")));
    };
    let offered = text(headers, SEC_WEBSOCKET_PROTOCOL);
    if text(headers, UPGRADE) != "websocket" || !offered.split(", ").any(|offered| offered == runner.protocol) {
        return respond(400, &status(400, "BadRequest", &format!("{offered:?}: not a protocol of this server")));
    }
    let accept = derive_accept_key(text(headers, SEC_WEBSOCKET_KEY).as_bytes());
    let query: Vec<(String, String)> =
        serde_urlencoded::from_str(request.uri().query().unwrap_or_default()).unwrap_or_default();
    let words: Vec<String> = query.iter().filter(|(key, _)| key == "command").map(|(_, value)| value.clone()).collect();
    let mut command = (runner.command)(&words);
    let upgraded = hyper::upgrade::on(&mut request);
    tokio::spawn(async move {
        let Ok(upgraded) = upgraded.await else { return };
        let socket = WebSocketStream::from_raw_socket(TokioIo::new(upgraded), Role::Server, None).await;
        run(socket, &mut command).await;
    });
    Response::builder()
        .status(101)
        .header(CONNECTION, "Upgrade")
        .header(UPGRADE, "websocket")
        .header(SEC_WEBSOCKET_ACCEPT, accept)
        .header(SEC_WEBSOCKET_PROTOCOL, runner.protocol)
        .body(Full::default())
        .unwrap()
}

/// Runs a command with its streams as channels 0 to 2, and its end as a Status on channel 3. Its standard input ends with the
/// connection, or by the message of version 5.
async fn run(socket: WebSocketStream<TokioIo<hyper::upgrade::Upgraded>>, command: &mut Command) {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let (sender, mut messages) = mpsc::channel::<Vec<u8>>(16);
    let mut stdin = match command.spawn() {
        Ok(mut child) => {
            let stdin = child.stdin.take();
            thread::spawn(move || follow(child, &sender));
            stdin
        }
        Err(error) => {
            let failed = status(500, "InternalError", &format!("executable file not found: {error}"));
            let _ = sender.try_send([&[3], failed.to_string().as_bytes()].concat());
            None
        }
    };
    let (mut write, mut read) = socket.split();
    loop {
        tokio::select! {
            message = messages.recv() => match message {
                Some(message) => if write.send(Message::binary(message)).await.is_err() { return },
                None => break,
            },
            message = read.next() => match message {
                Some(Ok(Message::Binary(bytes))) => match bytes.split_first() {
                    Some((0, data)) => if let Some(stdin) = &mut stdin {
                        let _ = stdin.write_all(data).and_then(|()| stdin.flush());
                    },
                    Some((255, [0])) => stdin = None,
                    _ => {}
                },
                Some(Ok(Message::Close(_)) | Err(_)) | None => return,
                Some(Ok(_)) => {}
            },
        }
    }
    let _ = write.close().await;
}

/// Passes on what a process prints, then how it has ended.
fn follow(mut child: Child, sender: &mpsc::Sender<Vec<u8>>) {
    let pump = |channel: u8, mut output: Box<dyn Read + Send>| {
        let sender = sender.clone();
        thread::spawn(move || {
            let mut buffer = vec![0; 1 << 14];
            while let Ok(count) = output.read(&mut buffer) {
                // Nobody listens any more: the process sees a closed pipe.
                if count == 0 || sender.blocking_send([&[channel], &buffer[..count]].concat()).is_err() {
                    return;
                }
            }
        })
    };
    let (stdout, stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    for pump in [pump(1, Box::new(stdout)), pump(2, Box::new(stderr))] {
        let _ = pump.join();
    }
    let code = child.wait().ok().and_then(|status| status.code()).unwrap_or(137);
    let status = match code {
        0 => json!({"metadata": {}, "status": "Success"}),
        code => json!({
            "metadata": {}, "status": "Failure", "reason": "NonZeroExitCode",
            "message": format!("command terminated with non-zero exit code: {code}"),
            "details": {"causes": [{"reason": "ExitCode", "message": code.to_string()}]},
        }),
    };
    let _ = sender.blocking_send([&[3], status.to_string().as_bytes()].concat());
}
