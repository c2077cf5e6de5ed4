//! A small API server inside this process, over HTTP: five resources with real list and watch semantics, bearer tokens,
//! the rights of the shipped ClusterRole, and fault injection.

use std::collections::{HashMap, HashSet};
use std::convert::Infallible;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use bytes::Bytes;
use futures_util::stream;
use http::{Method, Request, Response, StatusCode};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;

use super::faults::{Fault, Faults, Verb};
use super::object_store::{ApiError, Event, ObjectPath, ObjectStore};
use super::{Account, Resource, role};

/// Interval of bookmarks; a real server sends one a minute.
const BOOKMARKS: Duration = Duration::from_millis(200);

type Body = BoxBody<Bytes, io::Error>;

pub struct FakeServer {
    state: Arc<ServerState>,
    address: SocketAddr,
    running: Mutex<Option<ServerThread>>,
}

struct ServerThread {
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

/// State that survives a restart, as etcd's does.
struct ServerState {
    cluster: Mutex<ObjectStore>,
    /// Current resource version; watches wait for it to change.
    version: watch::Sender<u64>,
    tokens: Mutex<HashMap<String, Account>>,
    faults: Faults,
    streams: bool,
    defines_cluster_policies: AtomicBool,
    role: Vec<role::Rule>,
    /// Resources that the role does not contain any more.
    revoked: Mutex<HashSet<Resource>>,
    requests: Mutex<Vec<(Verb, Resource)>>,
}

impl FakeServer {
    /// Starts it on the loopback of the calling thread's network namespace.
    pub fn start(streams: bool) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let state = Arc::new(ServerState {
            cluster: Mutex::new(ObjectStore::new()),
            version: watch::Sender::new(0),
            tokens: Mutex::default(),
            faults: Faults::default(),
            streams,
            defines_cluster_policies: AtomicBool::new(false),
            role: role::shipped()?,
            revoked: Mutex::default(),
            requests: Mutex::default(),
        });
        let server = Self { state, address: listener.local_addr()?, running: Mutex::default() };
        server.run(listener)?;
        Ok(server)
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Sets an account's token; earlier tokens of the account become invalid.
    pub fn set_token(&self, account: Account, token: &str) {
        let mut tokens = lock(&self.state.tokens);
        tokens.retain(|_, owner| *owner != account);
        tokens.insert(token.to_owned(), account);
    }

    /// Sets whether ClusterNetworkPolicies are defined, as their CustomResourceDefinition does; they are not at first.
    pub fn define_cluster_policies(&self, defined: bool) {
        self.state.defines_cluster_policies.store(defined, Ordering::Relaxed);
    }

    /// Takes the right to read a resource out of the role, or grants it again.
    pub fn set_readable(&self, resource: Resource, is_readable: bool) {
        let mut revoked = lock(&self.state.revoked);
        if is_readable {
            revoked.remove(&resource)
        } else {
            revoked.insert(resource)
        };
    }

    /// Injects a fault into the next request of this kind.
    pub fn plan(&self, verb: Verb, resource: Resource, fault: Fault) {
        self.state.faults.plan(verb, resource, fault);
    }

    /// Number of faults that are still pending.
    pub fn faults_left(&self) -> usize {
        self.state.faults.left()
    }

    /// Number of requests of this kind so far.
    pub fn requests(&self, verb: Verb, resource: Resource) -> usize {
        lock(&self.state.requests).iter().filter(|request| **request == (verb, resource)).count()
    }

    /// Creates an object, status included, as through another server of the same cluster; also while this one is
    /// stopped.
    pub fn create_elsewhere(&self, object: &Value) -> Result<()> {
        let place = place_of(object)?;
        let refused = |(_, reason, message): ApiError| anyhow!("{reason}: {message}");
        let mut cluster = lock(&self.state.cluster);
        cluster.create(place.clone(), object.clone()).map_err(refused)?;
        if object["status"].is_object() {
            cluster.replace(place, object.clone(), true).map_err(refused)?;
        }
        self.state.version.send_replace(cluster.version());
        Ok(())
    }

    /// Deletes an object in the same way.
    pub fn delete_elsewhere(&self, object: &Value) -> Result<()> {
        let mut cluster = lock(&self.state.cluster);
        cluster.delete(&place_of(object)?).map_err(|(_, reason, message)| anyhow!("{reason}: {message}"))?;
        self.state.version.send_replace(cluster.version());
        Ok(())
    }

    pub fn compact(&self) {
        lock(&self.state.cluster).compact();
    }

    /// Creates or replaces objects, status included, as one step and without requests.
    pub fn put(&self, objects: impl IntoIterator<Item = Value>) -> Result<()> {
        let mut cluster = lock(&self.state.cluster);
        for object in objects {
            let text = |key: &str| object["metadata"][key].as_str().unwrap_or_default().to_owned();
            cluster.set((Resource::of(&object)?, text("namespace"), text("name")), object);
        }
        self.state.version.send_replace(cluster.version());
        Ok(())
    }

    /// Closes all connections and accepts no new ones.
    pub fn stop(&self) {
        if let Some(ServerThread { stop, thread }) = lock(&self.running).take() {
            // An error means that the thread has already ended.
            let _ = stop.send(());
            let _ = thread.join();
        }
    }

    /// Listens again on the same address, in the calling thread's network namespace.
    pub fn resume(&self) -> Result<()> {
        self.run(TcpListener::bind(self.address)?)
    }

    fn run(&self, listener: TcpListener) -> Result<()> {
        listener.set_nonblocking(true)?;
        let (stop, stopped) = oneshot::channel();
        let state = Arc::clone(&self.state);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let body = move || {
            runtime.block_on(async {
                tokio::select! {
                    _ = stopped => {}
                    () = serve(listener, state) => {}
                }
            });
        };
        let thread = thread::Builder::new().name("fake-apiserver".to_owned()).spawn(body).context("no thread")?;
        *lock(&self.running) = Some(ServerThread { stop, thread });
        Ok(())
    }
}

impl Drop for FakeServer {
    fn drop(&mut self) {
        self.stop();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn place_of(object: &Value) -> Result<ObjectPath> {
    let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default().to_owned();
    Ok((Resource::of(object)?, text("namespace"), text("name")))
}

/// Serves all connections until it is dropped, which closes them.
async fn serve(listener: TcpListener, state: Arc<ServerState>) {
    let listener = tokio::net::TcpListener::from_std(listener).expect("it does not block");
    let mut connections = JoinSet::new();
    loop {
        let Ok((stream, _)) = listener.accept().await else { continue };
        // Disable Nagle's algorithm, so that small events do not wait for an ACK.
        let _ = stream.set_nodelay(true);
        let state = Arc::clone(&state);
        connections.spawn(async move {
            let service = service_fn(move |request| answer(Arc::clone(&state), request));
            // A client may disconnect at any time.
            let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

async fn answer(state: Arc<ServerState>, request: Request<Incoming>) -> Result<Response<Body>, Infallible> {
    let defined = state.defines_cluster_policies.load(Ordering::Relaxed);
    if defined && request.uri().path().trim_start_matches("/apis/") == Resource::ClusterNetworkPolicies.api_version() {
        return Ok(json_response(200, &cluster_policies_resource()));
    }
    let asked =
        ApiRequest::read(&request).filter(|asked| defined || asked.resource != Resource::ClusterNetworkPolicies);
    let answered = match asked {
        Some(asked) => handle(&state, asked, request).await,
        None => Err((404, "NotFound", format!("no such path: {}", request.uri()))),
    };
    Ok(answered.unwrap_or_else(|(code, reason, message)| json_response(code, &status(code, reason, &message))))
}

/// The answer of discovery for the version of ClusterNetworkPolicies.
fn cluster_policies_resource() -> Value {
    let resource = Resource::ClusterNetworkPolicies;
    json!({
        "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": resource.api_version(),
        "resources": [{
            "name": resource.path(), "singularName": "", "kind": resource.kind(), "namespaced": false,
            "verbs": ["get", "list", "watch"],
        }],
    })
}

struct ApiRequest {
    resource: Resource,
    namespace: Option<String>,
    name: Option<String>,
    status_alone: bool,
    query: HashMap<String, String>,
}

impl ApiRequest {
    fn read(request: &Request<Incoming>) -> Option<Self> {
        let path = request.uri().path().trim_matches('/');
        let groups = ["api/v1/", "apis/networking.k8s.io/v1/", "apis/policy.networking.k8s.io/v1alpha2/"];
        let rest = groups.into_iter().find_map(|group| path.strip_prefix(group))?;
        let mut parts: Vec<&str> = rest.split('/').collect();
        let namespace = match parts[..] {
            ["namespaces", namespace, _, ..] if parts[2] != "status" => {
                parts.drain(..2);
                Some(namespace.to_owned())
            }
            _ => None,
        };
        let resource = Resource::ALL.into_iter().find(|resource| resource.path() == parts[0])?;
        let query = request.uri().query().unwrap_or_default();
        let query = query.split('&').filter_map(|pair| pair.split_once('='));
        Some(Self {
            resource,
            namespace,
            name: parts.get(1).map(|name| (*name).to_owned()),
            status_alone: parts.get(2) == Some(&"status"),
            query: query.map(|(key, value)| (key.to_owned(), value.to_owned())).collect(),
        })
    }

    fn is(&self, key: &str) -> bool {
        self.query.get(key).is_some_and(|value| value == "true")
    }

    fn place(&self, object: Option<&Value>) -> ObjectPath {
        let name = self.name.clone().or_else(|| object?["metadata"]["name"].as_str().map(str::to_owned));
        (self.resource, self.namespace.clone().unwrap_or_default(), name.unwrap_or_default())
    }
}

async fn handle(
    state: &Arc<ServerState>,
    asked: ApiRequest,
    request: Request<Incoming>,
) -> Result<Response<Body>, ApiError> {
    let method = request.method().clone();
    let verb = match (&method, &asked.name) {
        (&Method::GET, None) if asked.is("watch") => "watch",
        (&Method::GET, None) => "list",
        (&Method::GET, Some(_)) => "get",
        (&Method::POST, _) => "create",
        (&Method::PUT, _) => "update",
        (&Method::PATCH, Some(_)) => "patch",
        (&Method::DELETE, _) => "delete",
        _ => return Err((405, "MethodNotAllowed", format!("{method} is not served here"))),
    };
    allow(state, &request, verb, asked.resource)?;
    let fault = match verb {
        "list" | "watch" => {
            // A watch that starts with a list is a list that continues.
            let is_list = verb == "list" || asked.is("sendInitialEvents");
            let verb = if is_list { Verb::List } else { Verb::Watch };
            lock(&state.requests).push((verb, asked.resource));
            state.faults.take(verb, asked.resource)
        }
        _ => None,
    };
    match fault {
        Some(Fault::Silence) => return std::future::pending().await,
        Some(Fault::Nonsense) => return Ok(text_response(200, None, "<html>It works!</html>")),
        Some(Fault::Code(code, retry_after)) => return Ok(text_response(code, retry_after, "not now")),
        fault if verb == "watch" => return watch_response(state, &asked, fault),
        _ => {}
    }
    let body = request.into_body().collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let object: Option<Value> = serde_json::from_slice(&body).ok();
    let place = asked.place(object.as_ref());
    let mut cluster = lock(&state.cluster);
    let (code, answer) = match (method, object) {
        (Method::GET, _) if asked.name.is_none() => (200, list(&mut cluster, &asked)?),
        (Method::GET, _) => (200, cluster.get(&place)?),
        (Method::DELETE, Some(options)) if options["gracePeriodSeconds"].as_u64().is_some_and(|grace| grace > 0) => {
            (200, cluster.terminate(place, &options["gracePeriodSeconds"])?)
        }
        (Method::DELETE, _) => (200, cluster.delete(&place)?),
        (Method::POST, Some(object)) => (201, cluster.create(place, object)?),
        (Method::PATCH, Some(patch)) => {
            let mut object = cluster.get(&place)?;
            merge(&mut object, patch);
            (200, cluster.replace(place, object, asked.status_alone)?)
        }
        (_, Some(object)) => (200, cluster.replace(place, object, asked.status_alone)?),
        (_, None) => return Err((400, "BadRequest", "the body is no JSON".to_owned())),
    };
    state.version.send_replace(cluster.version());
    Ok(json_response(code, &answer))
}

/// Applies a merge patch (RFC 7386).
fn merge(target: &mut Value, patch: Value) {
    let Value::Object(fields) = patch else { return *target = patch };
    if !target.is_object() {
        *target = json!({});
    }
    for (name, value) in fields {
        match value {
            Value::Null => drop(target.as_object_mut().and_then(|object| object.remove(&name))),
            value => merge(&mut target[name.as_str()], value),
        }
    }
}

/// Rejects unknown accounts and those without the right.
fn allow(state: &ServerState, request: &Request<Incoming>, verb: &str, resource: Resource) -> Result<(), ApiError> {
    let token = request.headers().get(http::header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let token = token.and_then(|value| value.strip_prefix("Bearer ")).unwrap_or_default();
    let account = lock(&state.tokens).get(token).copied();
    match account {
        None => Err((401, "Unauthorized", "Unauthorized".to_owned())),
        Some(Account::Admin) => Ok(()),
        Some(Account::Penstock)
            if state.role.iter().any(|rule| rule.allows(verb, resource))
                && !lock(&state.revoked).contains(&resource) =>
        {
            Ok(())
        }
        Some(account) => {
            let message =
                format!("{}: User \"{account:?}\" cannot {verb} resource \"{}\"", resource.path(), resource.path());
            Err((403, "Forbidden", message))
        }
    }
}

fn list(cluster: &mut ObjectStore, asked: &ApiRequest) -> Result<Value, ApiError> {
    let limit = asked.query.get("limit").and_then(|limit| limit.parse().ok()).unwrap_or(usize::MAX);
    let token = asked.query.get("continue").map(String::as_str);
    let page = cluster.list(asked.resource, asked.namespace.as_deref(), limit, token)?;
    let mut metadata = json!({ "resourceVersion": page.version.to_string() });
    if let Some(next) = page.next {
        metadata["continue"] = json!(next);
        metadata["remainingItemCount"] = json!(page.remaining);
    }
    Ok(json!({
        "apiVersion": asked.resource.api_version(),
        "kind": format!("{}List", asked.resource.kind()),
        "metadata": metadata,
        "items": page.items,
    }))
}

fn watch_response(
    state: &Arc<ServerState>,
    asked: &ApiRequest,
    fault: Option<Fault>,
) -> Result<Response<Body>, ApiError> {
    let initial = asked.is("sendInitialEvents");
    if asked.query.contains_key("resourceVersionMatch") && !(initial && state.streams) {
        let message = "resourceVersionMatch: Forbidden: resourceVersionMatch is forbidden for watch";
        return Err((422, "Invalid", message.to_owned()));
    }
    let (lines, received) = mpsc::channel(16);
    let watcher = Watcher {
        state: Arc::clone(state),
        resource: asked.resource,
        bookmarks: asked.is("allowWatchBookmarks"),
        time: Duration::from_secs(asked.query.get("timeoutSeconds").and_then(|s| s.parse().ok()).unwrap_or(300)),
        lines,
    };
    let version = asked.query.get("resourceVersion").and_then(|version| version.parse().ok());
    if fault == Some(Fault::EndAtOnce) {
        return Ok(stream_response(received));
    }
    tokio::spawn(watcher.run(version.filter(|_| !initial), initial, fault));
    Ok(stream_response(received))
}

struct Watcher {
    state: Arc<ServerState>,
    resource: Resource,
    bookmarks: bool,
    time: Duration,
    lines: mpsc::Sender<io::Result<Bytes>>,
}

/// The client disconnected, or a fault closes the connection.
struct ConnectionClosed;

impl Watcher {
    async fn run(self, version: Option<u64>, initial: bool, fault: Option<Fault>) {
        // It ends when the client is gone or when its timeout passes.
        let _ = tokio::time::timeout(self.time, self.watch(version, initial, fault)).await;
    }

    async fn watch(&self, version: Option<u64>, initial: bool, fault: Option<Fault>) -> Result<(), ConnectionClosed> {
        if let Some(Fault::ErrorEvent(code)) = fault {
            let status = status(code, "InternalError", "this cannot be streamed");
            return self.send(&json!({ "type": "ERROR", "object": status })).await;
        }
        let mut versions = self.state.version.subscribe();
        let mut position = match version {
            Some(version) => version,
            None => self.send_all(initial).await?,
        };
        let mut bookmarks = tokio::time::interval(BOOKMARKS);
        bookmarks.tick().await;
        if fault == Some(Fault::Hang) {
            std::future::pending::<()>().await;
        }
        loop {
            versions.mark_unchanged();
            let found = lock(&self.state.cluster).since(self.resource, position);
            let (events, up_to) = match found {
                Ok(found) => found,
                Err((code, reason, message)) => {
                    return self.send(&json!({ "type": "ERROR", "object": status(code, reason, &message) })).await;
                }
            };
            position = up_to;
            self.send_events(&events, fault.as_ref()).await?;
            tokio::select! {
                _ = versions.changed() => {
                    if fault == Some(Fault::Shuffle) {
                        // Wait, so that there are several events to shuffle.
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                }
                _ = bookmarks.tick() => if self.bookmarks { self.bookmark(position, false).await? },
            }
        }
    }

    async fn send_events(&self, events: &[Event], fault: Option<&Fault>) -> Result<(), ConnectionClosed> {
        let line = |event: &Event| json!({ "type": event.kind, "object": event.object });
        match (fault, events.first()) {
            (Some(Fault::Cut), Some(event)) => {
                let text = line(event).to_string();
                let half = Bytes::copy_from_slice(&text.as_bytes()[..text.len() / 2]);
                self.lines.send(Ok(half)).await.map_err(|_| ConnectionClosed)?;
                // Pause, so that the client does not read both as one chunk.
                tokio::time::sleep(Duration::from_millis(20)).await;
                let _ = self.lines.send(Err(io::Error::other("cut"))).await;
                return Err(ConnectionClosed);
            }
            (Some(Fault::Shuffle), _) => {
                for event in events.iter().rev() {
                    self.send(&line(event)).await?;
                }
            }
            _ => {}
        }
        for event in events {
            self.send(&line(event)).await?;
        }
        Ok(())
    }

    /// Sends all current objects as ADDED; returns the version.
    async fn send_all(&self, initial: bool) -> Result<u64, ConnectionClosed> {
        let page =
            lock(&self.state.cluster).list(self.resource, None, usize::MAX, None).map_err(|_| ConnectionClosed)?;
        for mut object in page.items {
            (object["apiVersion"], object["kind"]) = (json!(self.resource.api_version()), json!(self.resource.kind()));
            self.send(&json!({ "type": "ADDED", "object": object })).await?;
        }
        if initial {
            self.bookmark(page.version, true).await?;
        }
        Ok(page.version)
    }

    async fn bookmark(&self, version: u64, ends_list: bool) -> Result<(), ConnectionClosed> {
        let mut metadata = json!({ "resourceVersion": version.to_string() });
        if ends_list {
            metadata["annotations"] = json!({ "k8s.io/initial-events-end": "true" });
        }
        let (version, kind) = (self.resource.api_version(), self.resource.kind());
        let object = json!({ "apiVersion": version, "kind": kind, "metadata": metadata });
        self.send(&json!({ "type": "BOOKMARK", "object": object })).await
    }

    async fn send(&self, line: &Value) -> Result<(), ConnectionClosed> {
        self.lines.send(Ok(Bytes::from(format!("{line}\n")))).await.map_err(|_| ConnectionClosed)
    }
}

fn status(code: u16, reason: &str, message: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Status", "metadata": {}, "status": "Failure",
        "message": message, "reason": reason, "code": code,
    })
}

fn json_response(code: u16, value: &Value) -> Response<Body> {
    response(code, Full::new(Bytes::from(value.to_string())).map_err(|never| match never {}).boxed())
}

fn text_response(code: u16, retry_after: Option<u32>, text: &'static str) -> Response<Body> {
    let mut response = response(code, Full::new(Bytes::from(text)).map_err(|never| match never {}).boxed());
    if let Some(seconds) = retry_after {
        response.headers_mut().insert(http::header::RETRY_AFTER, seconds.into());
    }
    response
}

fn stream_response(lines: mpsc::Receiver<io::Result<Bytes>>) -> Response<Body> {
    let frames = stream::unfold(lines, |mut lines| async {
        let line = lines.recv().await?;
        Some((line.map(Frame::data), lines))
    });
    response(200, BodyExt::boxed(StreamBody::new(frames)))
}

fn response(code: u16, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    response
}
