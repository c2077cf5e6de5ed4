//! OTLP over HTTP with protobuf, by the exporter of `opentelemetry-otlp`, which retries what the specification says.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use async_trait::async_trait;
use http::StatusCode;
use http_body_util::{BodyExt, Full, Limited};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{LogExporter, Protocol, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::logs::{LogBatch, LogExporter as _};
use rustls::{ClientConfig, RootCertStore};

use super::{NotTaken, OtlpError, TIMEOUT, certificates};

/// The most that is read of an answer, in bytes.
const LONGEST_ANSWER: usize = 1 << 20;

/// Sends batches to the URL of a collector.
pub(super) struct HttpExporter {
    exporter: LogExporter,
    /// The collector's last answer; 0 if there was none.
    status: Arc<AtomicU16>,
}

impl HttpExporter {
    pub(super) fn new(
        url: &str,
        ca_file: Option<&Path>,
        headers: HashMap<String, String>,
        resource: &Resource,
    ) -> Result<Self, OtlpError> {
        let status = Arc::<AtomicU16>::default();
        let mut exporter = LogExporter::builder()
            .with_http()
            .with_http_client(CollectorClient::new(ca_file, url, status.clone())?)
            .with_endpoint(url)
            .with_protocol(Protocol::HttpBinary)
            .with_headers(headers)
            .with_timeout(TIMEOUT)
            .build()?;
        exporter.set_resource(resource);
        Ok(Self { exporter, status })
    }

    pub(super) async fn export(&self, batch: LogBatch<'_>) -> Result<(), NotTaken> {
        self.status.store(0, Ordering::Relaxed);
        let sent = self.exporter.export(batch).await;
        sent.map_err(|error| NotTaken { why: error.to_string(), is_final: self.is_refused() })
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
}

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
