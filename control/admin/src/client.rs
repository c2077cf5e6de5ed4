//! The client side of the admin API.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::{Method, Request, StatusCode, header};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;
use tokio::runtime::{Builder, Runtime};

use super::types::ErrorBody;

pub const DEFAULT_SOCKET: &str = "/run/penstock/admin.sock";
/// Where it listens for the CNI plugin by default: beside [`DEFAULT_SOCKET`].
pub const DEFAULT_CNI_SOCKET: &str = "/run/penstock/admin.cni";
/// How long an answer may take: a bundle of a large node takes seconds.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("{}: no daemon listens there ({source}); start one (penstock run), or give its socket with --socket (the key admin.socket of its configuration)", .path.display())]
    NoDaemon { path: PathBuf, source: io::Error },
    #[error("{0}")]
    Rejected(String),
    /// A daemon listens, but sent no valid answer.
    #[error("{}: {what}", .path.display())]
    Failed { path: PathBuf, what: String },
}

pub struct Client {
    socket: PathBuf,
    runtime: Runtime,
}

impl Client {
    /// A client of the daemon that listens at `socket`. Does not connect yet.
    pub fn new(socket: &Path) -> io::Result<Self> {
        Ok(Self { socket: socket.to_owned(), runtime: Builder::new_current_thread().enable_all().build()? })
    }

    /// Requests `path` with `query`'s fields, and parses the answer.
    pub fn get<T: DeserializeOwned>(&self, path: &str, query: &impl Serialize) -> Result<T, ClientError> {
        let query = serde_urlencoded::to_string(query).map_err(|error| self.failed(error.to_string()))?;
        self.request(Method::GET, &format!("{path}?{query}"), Bytes::new())
    }

    pub fn post<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T, ClientError> {
        let body = serde_json::to_vec(body).map_err(|error| self.failed(error.to_string()))?;
        self.request(Method::POST, path, body.into())
    }

    /// Deletes what is at `path`, and parses the answer.
    pub fn delete<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.request(Method::DELETE, path, Bytes::new())
    }

    fn request<T: DeserializeOwned>(&self, method: Method, target: &str, body: Bytes) -> Result<T, ClientError> {
        let (status, body) = self.runtime.block_on(async {
            tokio::time::timeout(ANSWER_TIMEOUT, self.exchange(method, target, body))
                .await
                .unwrap_or_else(|_| Err(self.failed(format!("no answer within {} s", ANSWER_TIMEOUT.as_secs()))))
        })?;
        if status != StatusCode::OK {
            let message = serde_json::from_slice::<ErrorBody>(&body).map(|body| body.error);
            let message = message.unwrap_or_else(|_| format!("HTTP status {status}; is it a penstock daemon?"));
            return Err(ClientError::Rejected(message));
        }
        serde_json::from_slice(&body).map_err(|error| {
            self.failed(format!("cannot parse the answer ({error}); use the same penstock version as the daemon"))
        })
    }

    /// Whether the daemon that listens is a process of this process' PID namespace, or of one within it; not one of another
    /// container (`SO_PEERCRED` in unix(7)).
    pub fn reaches_visible_process(&self) -> Result<bool, ClientError> {
        self.runtime.block_on(async {
            let peer = self.connect().await?.peer_cred().map_err(|error| self.failed(error.to_string()))?;
            Ok(peer.pid().is_some_and(|process| process != 0))
        })
    }

    async fn connect(&self) -> Result<UnixStream, ClientError> {
        let stream = UnixStream::connect(&self.socket).await;
        stream.map_err(|source| ClientError::NoDaemon { path: self.socket.clone(), source })
    }

    async fn exchange(&self, method: Method, target: &str, body: Bytes) -> Result<(StatusCode, Bytes), ClientError> {
        let stream = self.connect().await?;
        let failed = |error: hyper::Error| self.failed(error.to_string());
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(failed)?;
        let connection = tokio::spawn(connection);
        let request = Request::builder().method(method).uri(target).header(header::HOST, "penstock");
        let request = request.header(header::CONTENT_TYPE, "application/json").body(Full::new(body));
        let request = request.map_err(|error| self.failed(error.to_string()))?;
        let response = sender.send_request(request).await.map_err(failed)?;
        let status = response.status();
        let body = response.into_body().collect().await.map_err(failed)?.to_bytes();
        connection.abort();
        Ok((status, body))
    }

    fn failed(&self, what: String) -> ClientError {
        ClientError::Failed { path: self.socket.clone(), what }
    }
}
