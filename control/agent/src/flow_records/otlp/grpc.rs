//! OTLP over gRPC.
//!
//! The client that `opentelemetry-proto` generates is used by itself: the exporter of `opentelemetry-otlp` does not tell the status
//! of an answer, by which a batch is sent again or given up.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use opentelemetry_proto::tonic::collector::logs::v1::ExportLogsServiceRequest;
use opentelemetry_proto::tonic::collector::logs::v1::logs_service_client::LogsServiceClient;
use opentelemetry_proto::transform::common::tonic::ResourceAttributesWithSchema;
use opentelemetry_proto::transform::logs::tonic::group_logs_by_resource_and_scope;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::logs::LogBatch;
use tonic::metadata::{AsciiMetadataKey, AsciiMetadataValue, MetadataMap};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tonic::{Code, Request, Status};

use super::{NotTaken, OtlpError, TIMEOUT, certificates};

/// Sends batches to the host and port of a collector.
pub(super) struct GrpcExporter {
    client: LogsServiceClient<Channel>,
    metadata: MetadataMap,
    resource: ResourceAttributesWithSchema,
}

impl GrpcExporter {
    /// To be called in the runtime that sends. It connects with the first batch.
    pub(super) fn new(
        url: &str,
        ca_file: Option<&Path>,
        (headers_file, headers): (Option<&PathBuf>, HashMap<String, String>),
        resource: &Resource,
    ) -> Result<Self, OtlpError> {
        let endpoint = Endpoint::from_shared(url.to_owned())?.timeout(TIMEOUT).connect_timeout(TIMEOUT);
        let endpoint = match (ca_file, url.starts_with("https:")) {
            (Some(path), _) => {
                // Read twice, for an error that names what is wrong.
                certificates(path)?;
                let pem = std::fs::read(path).map_err(|error| OtlpError::certificates(path, error.to_string()))?;
                endpoint.tls_config(ClientTlsConfig::new().ca_certificate(Certificate::from_pem(pem)))?
            }
            (None, true) => endpoint.tls_config(ClientTlsConfig::new().with_native_roots())?,
            (None, false) => endpoint,
        };
        let metadata = headers
            .iter()
            .map(|(name, value)| metadata_of(name, value).ok_or_else(|| name.clone()))
            .collect::<Result<Vec<_>, String>>()
            .map_err(|name| OtlpError::File {
                key: "otlp_headers_file",
                path: headers_file.cloned().unwrap_or_default(),
                why: format!("gRPC cannot send the header {name}"),
                remedy: "write values of ASCII, and no names that begin with `grpc-` or end in `-bin`",
            })?;
        let mut map = MetadataMap::with_capacity(metadata.len());
        metadata.into_iter().for_each(|(name, value)| drop(map.insert(name, value)));
        let client = LogsServiceClient::new(endpoint.connect_lazy());
        Ok(Self { client, metadata: map, resource: resource.into() })
    }

    /// Returns how many records the collector has rejected of a batch that it has taken.
    pub(super) async fn export(&self, batch: LogBatch<'_>) -> Result<u64, NotTaken> {
        let resource_logs = group_logs_by_resource_and_scope(&batch, &self.resource);
        let mut request = Request::new(ExportLogsServiceRequest { resource_logs });
        *request.metadata_mut() = self.metadata.clone();
        match self.client.clone().export(request).await {
            Ok(response) => {
                let partial = response.into_inner().partial_success.unwrap_or_default();
                Ok(partial.rejected_log_records.max(0).unsigned_abs())
            }
            Err(status) => Err(NotTaken { why: said(&status), is_final: is_final(&status) }),
        }
    }
}

/// A header as gRPC sends it; `None` if it cannot.
fn metadata_of(name: &str, value: &str) -> Option<(AsciiMetadataKey, AsciiMetadataValue)> {
    if name.to_ascii_lowercase().starts_with("grpc-") {
        return None;
    }
    Some((name.parse().ok()?, value.parse().ok()?))
}

/// The status, and for one that the transport has made, its cause.
fn said(status: &Status) -> String {
    let mut said = format!("{:?}: {}", status.code(), status.message());
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        let text = error.to_string();
        if !said.contains(&text) {
            said += &format!(": {text}");
        }
        cause = error.source();
    }
    said
}

/// Whether the collector's answer would be the same another time
/// (<https://opentelemetry.io/docs/specs/otlp/#failures>).
fn is_final(status: &Status) -> bool {
    const RETRY_INFO: &[u8] = b"google.rpc.RetryInfo";
    match status.code() {
        Code::Cancelled
        | Code::DeadlineExceeded
        | Code::Aborted
        | Code::OutOfRange
        | Code::Unavailable
        | Code::DataLoss => false,
        Code::ResourceExhausted => !status.details().windows(RETRY_INFO.len()).any(|part| part == RETRY_INFO),
        // The transport's own: there was no answer.
        _ => std::error::Error::source(status).is_none(),
    }
}
