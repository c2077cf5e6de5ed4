//! Records as OpenTelemetry logs, to a collector by OTLP over HTTP.
//!
//! A thread of its own sends them. A collector that is away is tried again, with the same batch, while the queue behind it fills;
//! what does not fit is lost and counted. The SDK's batch processor counts what it loses nowhere, so the queue is here.

mod http;
mod log;

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ::http::{HeaderName, HeaderValue};
use opentelemetry::logs::{Logger as _, LoggerProvider as _};
use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_otlp::ExporterBuildError;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::logs::{LogBatch, LogProcessor, SdkLogRecord, SdkLogger, SdkLoggerProvider};
use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use tokio::runtime;
use tokio::sync::mpsc::{Receiver, Sender, channel};

use self::http::HttpExporter;
use super::record::FlowRecord;
use crate::config;
use crate::privileges;

/// Batches that wait for the collector, of a portion of records each.
const WAITING: usize = 64;
const TIMEOUT: Duration = Duration::from_secs(10);
/// First and longest wait before a batch is sent again after the exporter has given up; doubled each time.
const AGAIN: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(15));
/// How long the end waits for what is queued.
const FLUSH: Duration = Duration::from_secs(1);

#[derive(Debug, thiserror::Error)]
pub(crate) enum OtlpError {
    #[error("flow_records.{key} = {}: {why}; {remedy}", .path.display())]
    File { key: &'static str, path: PathBuf, why: String, remedy: &'static str },
    #[error(
        "flow_records.otlp: cannot read the certificates that the system trusts ({0}); set flow_records.otlp_ca_file"
    )]
    SystemCertificates(io::Error),
    /// The TLS library has refused the settings.
    #[error("flow_records.otlp: {0}; set flow_records.otlp_ca_file to certificates of X.509 version 3")]
    Tls(#[from] rustls::Error),
    #[error("flow_records.otlp: {0}; set the URL of a collector, or \"off\"")]
    Exporter(#[from] ExporterBuildError),
    #[error("flow_records.otlp: cannot start what sends records ({0}); the limit of open files may be too low")]
    Runtime(io::Error),
}

impl OtlpError {
    fn certificates(path: &Path, why: String) -> Self {
        Self::File { key: "otlp_ca_file", path: path.to_owned(), why, remedy: "name a file of PEM certificates" }
    }
}

struct NotTaken {
    why: String,
    /// Whether it would not be taken another time, either.
    is_final: bool,
}

/// The collector that the settings name. To be called in the runtime that sends.
fn collector(url: &str, settings: &config::FlowRecords, node: &str) -> Result<HttpExporter, OtlpError> {
    let headers = settings.otlp_headers_file.as_deref().map(headers).transpose()?.unwrap_or_default();
    HttpExporter::new(url, settings.otlp_ca_file.as_deref(), headers, &resource(node))
}

/// The sending end. Dropping it waits up to a second until all is sent.
pub(super) struct OtlpSender {
    batches: Option<Sender<Vec<FlowRecord>>>,
    stops: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

/// The thread's part.
struct Sending {
    collector: HttpExporter,
    logger: SdkLogger,
    made: Arc<Mutex<Vec<(SdkLogRecord, InstrumentationScope)>>>,
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
        let Some(url) = settings.otlp_url() else { return Ok(None) };
        let runtime = runtime::Builder::new_current_thread().enable_all().build().map_err(OtlpError::Runtime)?;
        let inside = runtime.enter();
        let collector = collector(&url, settings, node)?;
        drop(inside);
        let made = Arc::<Mutex<Vec<_>>>::default();
        let provider = SdkLoggerProvider::builder().with_log_processor(Kept(made.clone())).build();
        let stops = Arc::<AtomicBool>::default();
        let sending =
            Sending { collector, logger: provider.logger("penstock"), made, lost: lost.clone(), stops: stops.clone() };
        let (batches, receiver) = channel(WAITING);
        let thread = thread::Builder::new().name("flow-otlp".to_owned()).spawn(move || {
            privileges::drop_all();
            // The logger's records go to its provider.
            let _provider = provider;
            runtime.block_on(sending.run(receiver));
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
                let mut log = self.logger.create_log_record();
                log::fill_in(&mut log, record);
                self.logger.emit(log);
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
            let sent = self.collector.export(LogBatch::new(batch)).await;
            let failed_before = std::mem::replace(fails, sent.is_err());
            let NotTaken { why, is_final } = match sent {
                Err(not_taken) => not_taken,
                Ok(()) => {
                    if failed_before {
                        tracing::info!("flow_records.otlp: the collector takes records again");
                    }
                    return;
                }
            };
            if !failed_before {
                tracing::error!(error = %why, "cannot send records to flow_records.otlp; those that do not fit the queue are lost");
            }
            if self.stops.load(Ordering::Relaxed) || is_final {
                self.lost.fetch_add(batch.len() as u64, Ordering::Relaxed);
                return;
            }
            tokio::time::sleep(wait).await;
            wait = (2 * wait).min(AGAIN.1);
        }
    }
}

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

fn certificates(path: &Path) -> Result<RootCertStore, OtlpError> {
    let wrong = |why: String| OtlpError::certificates(path, why);
    let mut store = RootCertStore::empty();
    let found = CertificateDer::pem_file_iter(path).map_err(|error| wrong(format!("cannot be read ({error})")))?;
    for certificate in found {
        let certificate = certificate.map_err(|error| wrong(format!("is not PEM ({error})")))?;
        store.add(certificate).map_err(|error| wrong(format!("has a certificate that cannot be used ({error})")))?;
    }
    if store.is_empty() { Err(wrong("has no certificate".to_owned())) } else { Ok(store) }
}

#[cfg(test)]
mod tests;
