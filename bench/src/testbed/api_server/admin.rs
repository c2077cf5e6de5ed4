//! Plain API calls with full rights.

use std::path::Path;
use std::sync::mpsc::{Sender, channel};
use std::thread;

use anyhow::{Context, Result, anyhow};
use http::{Method, Request};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::Resource;
use crate::testbed::Namespace;

/// A client with full rights, usable from any thread. Its calls originate in the server's network namespace.
#[derive(Clone)]
pub struct Admin {
    calls: UnboundedSender<Call>,
}

struct Call {
    method: Method,
    path: String,
    body: Vec<u8>,
    answer: Sender<Result<Value>>,
}

impl Admin {
    pub(super) fn new(kubeconfig: &Path, namespace: Option<&Namespace>) -> Result<Self> {
        let (calls, received) = unbounded_channel();
        let kubeconfig = Kubeconfig::read_from(kubeconfig)?;
        let (ready, is_ready) = channel();
        let work = move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(async {
                match connect(kubeconfig).await {
                    Ok(client) => {
                        // The caller waits for this.
                        let _ = ready.send(Ok(()));
                        serve(client, received).await;
                    }
                    Err(error) => drop(ready.send(Err(error))),
                }
            });
        };
        match namespace {
            Some(namespace) => drop(namespace.spawn("admin", work)?),
            None => drop(thread::Builder::new().name("admin".to_owned()).spawn(work)?),
        }
        is_ready.recv().context("the client has ended")??;
        Ok(Self { calls })
    }

    /// Makes a call and waits for the answer.
    pub fn call(&self, method: Method, path: &str, body: &Value) -> Result<Value> {
        self.begin(method, path, body)?.recv().context("the client has ended")?
    }

    /// Starts a call; the answer arrives on the channel.
    fn begin(&self, method: Method, path: &str, body: &Value) -> Result<std::sync::mpsc::Receiver<Result<Value>>> {
        let (answer, answered) = channel();
        let body = if body.is_null() { Vec::new() } else { serde_json::to_vec(body)? };
        let call = Call { method, path: path.to_owned(), body, answer };
        self.calls.send(call).map_err(|_| anyhow!("the client has ended"))?;
        Ok(answered)
    }

    /// All current objects of a resource.
    pub fn list(&self, resource: Resource) -> Result<Vec<Value>> {
        let list = self.call(Method::GET, &resource.url(resource.api_version(), None, None), &Value::Null)?;
        Ok(list["items"].as_array().cloned().unwrap_or_default())
    }

    /// Creates an object, then sets its status if it has one.
    pub fn create(&self, object: &Value) -> Result<()> {
        self.create_all(std::slice::from_ref(object))
    }

    /// Creates objects concurrently, then sets the status of those that have one.
    pub fn create_all(&self, objects: &[Value]) -> Result<()> {
        let begun: Result<Vec<_>> = objects.iter().map(|object| self.begin_create(object)).collect();
        begun?.into_iter().try_for_each(|answer| answer.recv()?.map(drop))?;
        let with_status = objects.iter().filter(|object| object["status"].is_object());
        let begun: Result<Vec<_>> = with_status.map(|object| self.begin_status(object)).collect();
        begun?.into_iter().try_for_each(|answer| answer.recv()?.map(drop))
    }

    pub fn replace(&self, object: &Value) -> Result<()> {
        self.call(Method::PUT, &path_of(object)?, object).map(drop)
    }

    pub fn set_status(&self, object: &Value) -> Result<()> {
        self.begin_status(object)?.recv()?.map(drop)
    }

    /// Deletes a pod with a grace period, as everybody does: it is terminating from now on, and stays until its kubelet deletes it.
    pub fn terminate(&self, pod: &Value) -> Result<()> {
        let options = json!({ "apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 30 });
        self.call(Method::DELETE, &path_of(pod)?, &options).map(drop)
    }

    /// Deletes an object immediately; a pod without its grace period.
    pub fn delete(&self, object: &Value) -> Result<()> {
        self.delete_all(std::slice::from_ref(object))
    }

    pub fn delete_all(&self, objects: &[Value]) -> Result<()> {
        let begun: Result<Vec<_>> = objects
            .iter()
            .map(|object| {
                let path = path_of(object)?;
                let options = json!({ "apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0 });
                self.begin(Method::DELETE, &path, &options)
            })
            .collect();
        begun?.into_iter().try_for_each(|answer| answer.recv()?.map(drop))
    }

    fn begin_create(&self, object: &Value) -> Result<std::sync::mpsc::Receiver<Result<Value>>> {
        let path = Resource::of(object)?.url(api_version_of(object)?, namespace_of(object), None);
        self.begin(Method::POST, &path, object)
    }

    fn begin_status(&self, object: &Value) -> Result<std::sync::mpsc::Receiver<Result<Value>>> {
        self.begin(Method::PUT, &format!("{}/status", path_of(object)?), object)
    }
}

fn path_of(object: &Value) -> Result<String> {
    Ok(Resource::of(object)?.url(api_version_of(object)?, namespace_of(object), name_of(object)))
}

fn api_version_of(object: &Value) -> Result<&str> {
    object["apiVersion"].as_str().context("an object without apiVersion")
}

fn name_of(object: &Value) -> Option<&str> {
    object["metadata"]["name"].as_str()
}

fn namespace_of(object: &Value) -> Option<&str> {
    object["metadata"]["namespace"].as_str()
}

async fn connect(kubeconfig: Kubeconfig) -> Result<Client> {
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    Ok(Client::try_from(config)?)
}

async fn serve(client: Client, mut calls: UnboundedReceiver<Call>) {
    // A server handles many concurrent calls, but answers 429 beyond its limit.
    let places = std::sync::Arc::new(tokio::sync::Semaphore::new(64));
    while let Some(Call { method, path, body, answer }) = calls.recv().await {
        let (client, places) = (client.clone(), std::sync::Arc::clone(&places));
        tokio::spawn(async move {
            let _place = places.acquire().await;
            let request = Request::builder().method(&method).uri(&path).header("content-type", "application/json");
            let done = match request.body(body) {
                Ok(request) => client.request::<Value>(request).await.map_err(anyhow::Error::from),
                Err(error) => Err(error.into()),
            };
            // The caller may not wait for the answer.
            let _ = answer.send(done.with_context(|| format!("{method} {path}")));
        });
    }
}
