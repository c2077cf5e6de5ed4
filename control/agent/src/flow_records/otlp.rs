//! Records as OpenTelemetry logs, to a collector by OTLP over HTTP.
//!
//! A thread of its own sends them with the exporter of `opentelemetry-otlp`, which retries what the specification says. A
//! collector that is away longer is tried again, with the same batch, while the queue behind it fills; what does not fit is
//! lost and counted. The SDK's batch processor counts what it loses nowhere, so the queue is here.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use http::{HeaderName, HeaderValue, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use opentelemetry::logs::{AnyValue, LogRecord as _, Logger as _, LoggerProvider as _, Severity};
use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{ExporterBuildError, LogExporter, Protocol, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::logs::{LogBatch, LogExporter as _, LogProcessor, SdkLogRecord, SdkLogger, SdkLoggerProvider};
use penstock_privileges as privileges;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use tokio::sync::mpsc::{Receiver, Sender, channel};

use super::record::{FlowEvent, FlowRecord, RecordedEnd};
use crate::config;

/// Batches that wait for the collector, of a portion of records each.
const WAITING: usize = 64;
/// How long a request may take.
const TIMEOUT: Duration = Duration::from_secs(10);
/// First and longest wait before a batch is sent again after the exporter has given up; doubled each time.
const AGAIN: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(15));
/// How long the end waits for what is queued.
const FLUSH: Duration = Duration::from_secs(1);
/// The most that is read of an answer.
const LONGEST_ANSWER: usize = 1 << 20;

/// The collector's settings cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OtlpError {
    /// A file that is named there.
    #[error("flow_records.{key} = {}: {why}; {remedy}", .path.display())]
    File {
        /// The key.
        key: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
        /// What to do.
        remedy: &'static str,
    },
    /// The system has no certificates.
    #[error(
        "flow_records.otlp: cannot read the certificates that the system trusts ({0}); set flow_records.otlp_ca_file"
    )]
    SystemCertificates(io::Error),
    /// The TLS library has refused the settings.
    #[error("flow_records.otlp: {0}; set flow_records.otlp_ca_file to certificates of X.509 version 3")]
    Tls(#[from] rustls::Error),
    /// The exporter has.
    #[error("flow_records.otlp: {0}; set the URL of a collector, or \"off\"")]
    Exporter(#[from] ExporterBuildError),
}

/// The sending end. Dropping it waits up to a second until all is sent.
pub(super) struct OtlpSender {
    batches: Option<Sender<Vec<FlowRecord>>>,
    stops: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

/// The thread's part.
struct Sending {
    exporter: LogExporter,
    logger: SdkLogger,
    made: Arc<Mutex<Vec<(SdkLogRecord, InstrumentationScope)>>>,
    /// The collector's last answer; 0 if there was none.
    status: Arc<AtomicU16>,
    lost: Arc<AtomicU64>,
    stops: Arc<AtomicBool>,
}

impl OtlpSender {
    /// Starts the thread, which has no capabilities; `None` if no collector is configured. Nothing waits for the collector.
    /// `lost` counts the records that are not sent.
    pub(super) fn start(
        settings: &config::FlowRecords,
        node: &str,
        lost: &Arc<AtomicU64>,
    ) -> Result<Option<Self>, OtlpError> {
        let Some(url) = settings.otlp.url() else { return Ok(None) };
        let status = Arc::<AtomicU16>::default();
        let client = CollectorClient::new(settings.otlp_ca_file.as_deref(), url, status.clone())?;
        let headers = settings.otlp_headers_file.as_deref().map(headers).transpose()?.unwrap_or_default();
        let mut exporter = LogExporter::builder()
            .with_http()
            .with_http_client(client)
            .with_endpoint(url)
            .with_protocol(Protocol::HttpBinary)
            .with_headers(headers)
            .with_timeout(TIMEOUT)
            .build()?;
        exporter.set_resource(&resource(node));
        let made = Arc::<Mutex<Vec<_>>>::default();
        let provider = SdkLoggerProvider::builder().with_log_processor(Kept(made.clone())).build();
        let stops = Arc::<AtomicBool>::default();
        let sending = Sending {
            exporter,
            logger: provider.logger("penstock"),
            made,
            status,
            lost: lost.clone(),
            stops: stops.clone(),
        };
        let (batches, receiver) = channel(WAITING);
        let thread = thread::Builder::new().name("flow-otlp".to_owned()).spawn(move || {
            privileges::drop_all();
            // The logger's records go to its provider.
            let _provider = provider;
            match tokio::runtime::Builder::new_current_thread().enable_all().build() {
                Ok(runtime) => runtime.block_on(sending.run(receiver)),
                Err(error) => {
                    tracing::error!(%error, "cannot start the thread that sends records to flow_records.otlp")
                }
            }
        });
        match thread {
            Ok(thread) => Ok(Some(Self { batches: Some(batches), stops, thread })),
            Err(error) => {
                tracing::error!(%error, "cannot start the thread that sends records to flow_records.otlp");
                Ok(None)
            }
        }
    }

    /// Queues records if there is room. Never waits.
    pub(super) fn try_send(&self, records: Vec<FlowRecord>) -> bool {
        self.batches.as_ref().is_some_and(|batches| batches.try_send(records).is_ok())
    }
}

impl Drop for OtlpSender {
    fn drop(&mut self) {
        self.stops.store(true, Ordering::Relaxed);
        self.batches = None;
        let until = Instant::now() + FLUSH;
        while !self.thread.is_finished() && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Sending {
    async fn run(self, mut batches: Receiver<Vec<FlowRecord>>) {
        let mut fails = false;
        while let Some(records) = batches.recv().await {
            for record in &records {
                self.logger.emit(self.log_record(record));
            }
            let made = std::mem::take(&mut *self.made.lock().unwrap_or_else(PoisonError::into_inner));
            let batch: Vec<_> = made.iter().map(|(record, scope)| (record, scope)).collect();
            self.deliver(&batch, &mut fails).await;
        }
    }

    /// Sends a batch until the collector takes it, refuses it for good, or the daemon ends. The first error of a row is
    /// logged.
    async fn deliver(&self, batch: &[(&SdkLogRecord, &InstrumentationScope)], fails: &mut bool) {
        let mut wait = AGAIN.0;
        loop {
            self.status.store(0, Ordering::Relaxed);
            let sent = self.exporter.export(LogBatch::new(batch)).await;
            let failed_before = std::mem::replace(fails, sent.is_err());
            let Err(error) = sent else {
                if failed_before {
                    tracing::info!("flow_records.otlp: the collector takes records again");
                }
                return;
            };
            if !failed_before {
                tracing::error!(%error, "cannot send records to flow_records.otlp; those that do not fit the queue are lost");
            }
            if self.stops.load(Ordering::Relaxed) || self.is_refused() {
                self.lost.fetch_add(batch.len() as u64, Ordering::Relaxed);
                return;
            }
            tokio::time::sleep(wait).await;
            wait = (2 * wait).min(AGAIN.1);
        }
    }

    /// Whether the collector's answer would be the same another time
    /// (<https://opentelemetry.io/docs/specs/otlp/#otlphttp-response>).
    fn is_refused(&self) -> bool {
        let status = StatusCode::from_u16(self.status.load(Ordering::Relaxed));
        status.is_ok_and(|status| {
            let may_pass = [
                StatusCode::TOO_MANY_REQUESTS,
                StatusCode::BAD_GATEWAY,
                StatusCode::SERVICE_UNAVAILABLE,
                StatusCode::GATEWAY_TIMEOUT,
            ];
            !status.is_success() && !may_pass.contains(&status)
        })
    }

    fn log_record(&self, record: &FlowRecord) -> SdkLogRecord {
        let mut log = self.logger.create_log_record();
        log.set_event_name(match record.event {
            FlowEvent::End => "penstock.flow.end",
            FlowEvent::Interval => "penstock.flow.interval",
            FlowEvent::Denied => "penstock.flow.denied",
        });
        let (severity, text) = match record.event {
            FlowEvent::Denied => (Severity::Warn, "WARN"),
            FlowEvent::End | FlowEvent::Interval => (Severity::Info, "INFO"),
        };
        log.set_severity_number(severity);
        log.set_severity_text(text);
        log.set_timestamp(record.last.into());
        log.set_observed_timestamp(record.time.into());
        log.set_body(AnyValue::from(body(record)));
        log.add_attributes(attributes(record));
        log
    }
}

/// Keeps what the logger emits, for the batch.
#[derive(Debug)]
struct Kept(Arc<Mutex<Vec<(SdkLogRecord, InstrumentationScope)>>>);

impl LogProcessor for Kept {
    fn emit(&self, record: &mut SdkLogRecord, scope: &InstrumentationScope) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push((record.clone(), scope.clone()));
    }

    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
        Ok(())
    }
}

/// Who sends the records (<https://opentelemetry.io/docs/specs/semconv/resource/>).
fn resource(node: &str) -> Resource {
    Resource::builder_empty()
        .with_service_name("penstock")
        .with_attributes([
            KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
            KeyValue::new("k8s.node.name", node.to_owned()),
        ])
        .build()
}

fn body(record: &FlowRecord) -> String {
    let name = |end: &RecordedEnd| match &end.identity {
        Some(identity) => identity.name.clone(),
        None => end.address.to_string(),
    };
    let FlowRecord { protocol, from, to, .. } = record;
    let what = record.ended.or(record.reason).or(record.state).unwrap_or_default();
    format!("{protocol} {} to {} port {}: {what}", name(from), name(to), to.port)
}

/// The record's fields, by the names of the semantic conventions where there are such
/// (<https://opentelemetry.io/docs/specs/semconv/registry/attributes/>).
fn attributes(record: &FlowRecord) -> Vec<(String, AnyValue)> {
    let mut all: Vec<(String, AnyValue)> = Vec::with_capacity(48);
    let mut add = |name: &str, value: Option<AnyValue>| {
        all.extend(value.map(|value| (name.to_owned(), value)));
    };
    let text = |text: &str| Some(AnyValue::from(text.to_owned()));
    let some_text = |text: Option<&str>| text.map(|text| AnyValue::from(text.to_owned()));
    let number = |number: u64| Some(AnyValue::from(i64::try_from(number).unwrap_or(i64::MAX)));
    add("network.transport", text(&record.protocol.to_lowercase()));
    add("network.type", text(if record.from.address.is_ipv4() { "ipv4" } else { "ipv6" }));
    for (side, end) in [("source", &record.from), ("destination", &record.to)] {
        add(&format!("{side}.address"), text(&end.address.to_string()));
        add(&format!("{side}.port"), number(end.port.into()));
        let Some(identity) = &end.identity else { continue };
        let k8s = |name: &str| format!("{side}.k8s.{name}.name");
        add(&k8s("namespace"), some_text(identity.namespace.as_deref()));
        add(&k8s("pod"), some_text(identity.pod.as_deref()));
        add(&k8s("node"), some_text(identity.node.as_deref()));
        if let Some(workload) = &identity.workload {
            add(&k8s(&workload.kind.to_lowercase()), text(&workload.name));
        }
    }
    if let Some(service) = &record.service {
        add("penstock.service.name", some_text(service.name.as_deref()));
        add("penstock.service.address", text(&service.address.to_string()));
        add("penstock.service.port", number(service.port.into()));
    }
    add("penstock.verdict", text(record.verdict.name()));
    add("penstock.reason", some_text(record.reason));
    add("penstock.egress.rule", some_text(record.rules.egress.as_deref()));
    add("penstock.egress.tier", some_text(record.rules.egress_tier));
    add("penstock.ingress.rule", some_text(record.rules.ingress.as_deref()));
    add("penstock.ingress.tier", some_text(record.rules.ingress_tier));
    add("penstock.connection.id", some_text(record.connection.as_deref()));
    add("penstock.connection.state", some_text(record.state));
    add("penstock.connection.ended", some_text(record.ended));
    if let Some(counts) = &record.counts {
        for (name, traffic) in [
            ("sent", counts.sent),
            ("received", counts.received),
            ("sent_since", counts.sent_since),
            ("received_since", counts.received_since),
        ] {
            add(&format!("penstock.{name}.packets"), number(traffic.packets));
            add(&format!("penstock.{name}.bytes"), number(traffic.bytes));
        }
    }
    add("penstock.denied.packets", record.packets.and_then(number));
    add("penstock.first", some_text(record.first.map(|first| format!("{first:.3}")).as_deref()));
    if !record.tcp_flags.is_empty() {
        add("penstock.tcp.flags", text(&record.tcp_flags.join(",")));
    }
    all
}

/// Headers, one `Name: value` a line. Empty lines, and those that begin with `#`, are left out.
fn headers(path: &Path) -> Result<HashMap<String, String>, OtlpError> {
    let wrong = |why: String| OtlpError::File {
        key: "otlp_headers_file",
        path: path.to_owned(),
        why,
        remedy: "write one header a line, such as `Authorization: Bearer TOKEN`",
    };
    let text = fs::read_to_string(path).map_err(|error| wrong(format!("cannot be read ({error})")))?;
    let lines = (1..).zip(text.lines().map(str::trim)).filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    let header = |(number, line): (usize, &str)| {
        // Not what it says: that may be a secret.
        let is_no_header = || wrong(format!("line {number} is no header"));
        let (name, value) = line.split_once(':').ok_or_else(is_no_header)?;
        let (name, value) = (name.trim(), value.trim());
        let is_valid = HeaderName::from_bytes(name.as_bytes()).is_ok() && HeaderValue::from_str(value).is_ok();
        if is_valid { Ok((name.to_owned(), value.to_owned())) } else { Err(is_no_header()) }
    };
    lines.map(header).collect()
}

/// The exporter's connection to the collector.
#[derive(Debug)]
struct CollectorClient {
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    status: Arc<AtomicU16>,
}

impl CollectorClient {
    fn new(ca_file: Option<&Path>, url: &str, status: Arc<AtomicU16>) -> Result<Self, OtlpError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = HttpsConnectorBuilder::new();
        let builder = match ca_file {
            Some(path) => {
                let tls = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
                builder.with_tls_config(tls.with_root_certificates(certificates(path)?).with_no_client_auth())
            }
            None if url.starts_with("https:") => {
                builder.with_provider_and_native_roots(provider).map_err(OtlpError::SystemCertificates)?
            }
            // No certificate is ever checked.
            None => {
                let tls = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
                builder.with_tls_config(tls.with_root_certificates(RootCertStore::empty()).with_no_client_auth())
            }
        };
        let connector = builder.https_or_http().enable_http1().build();
        Ok(Self { client: Client::builder(TokioExecutor::new()).build(connector), status })
    }
}

fn certificates(path: &Path) -> Result<RootCertStore, OtlpError> {
    let wrong = |why: String| OtlpError::File {
        key: "otlp_ca_file",
        path: path.to_owned(),
        why,
        remedy: "name a file of PEM certificates",
    };
    let mut store = RootCertStore::empty();
    let found = CertificateDer::pem_file_iter(path).map_err(|error| wrong(format!("cannot be read ({error})")))?;
    for certificate in found {
        let certificate = certificate.map_err(|error| wrong(format!("is not PEM ({error})")))?;
        store.add(certificate).map_err(|error| wrong(format!("has a certificate that cannot be used ({error})")))?;
    }
    if store.is_empty() { Err(wrong("has no certificate".to_owned())) } else { Ok(store) }
}

#[async_trait]
impl HttpClient for CollectorClient {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let exchange = async {
            let response = self.client.request(request.map(Full::new)).await?;
            self.status.store(response.status().as_u16(), Ordering::Relaxed);
            let (parts, body) = response.into_parts();
            let body = Limited::new(body, LONGEST_ANSWER).collect().await?.to_bytes();
            Ok(Response::from_parts(parts, body))
        };
        tokio::time::timeout(TIMEOUT, exchange).await?
    }
}

#[cfg(test)]
mod tests;
