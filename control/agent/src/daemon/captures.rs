//! The capture of packets, if one runs.

use penstock_admin::capture::CaptureQuery;
use penstock_dataplane::worker::CapturedPod;
use penstock_policy::model::ObjectKey;

use super::Daemon;
use super::queries::NAMED_PER_LOCK;
use crate::capture::{CaptureChunks, CapturedObjects, RunningCapture};
use crate::ports::CapturedPorts;

impl Daemon<'_> {
    /// Begins a capture. There is one at a time.
    pub(super) fn start_capture(&mut self, query: &CaptureQuery) -> Result<CaptureChunks, String> {
        if self.operation.capture.as_ref().is_some_and(|running| !running.is_abandoned()) {
            return Err(
                "another capture runs, and there is one at a time: end it, or wait until it has ended".to_owned()
            );
        }
        if let Some(abandoned) = self.operation.capture.take() {
            self.stop_capture(&abandoned);
        }
        let (mut running, chunks) = RunningCapture::new(query)?;
        if let Some(pod) = running.pod() {
            self.check_pod(pod)?;
        }
        if query.objects {
            // Before the first packet.
            running.with_objects(self.publisher.subscribe(CapturedObjects::begin));
        }
        let pod = running.pod().map(|pod| self.captured_pod(pod));
        if let Some(capture) = running.for_workers(pod)
            && let Err(error) = self.dataplane.capture(Some(&capture))
        {
            self.stop_capture(&running);
            return Err(format!("cannot capture: {error}"));
        }
        self.set_captured(&running);
        running.begun(self.config, self.dataplane.connections().midstream_pickup());
        tracing::info!(?query, "a capture begins");
        self.operation.capture = Some(running);
        Ok(chunks)
    }

    /// Whether this node has such a pod, with packets of its own.
    fn check_pod(&self, pod: &ObjectKey) -> Result<(), String> {
        let inputs = self.publisher.inputs();
        let node = &self.config.node;
        match inputs.objects.pods().find(|known| known.key == *pod) {
            None => Err(format!(
                "pod {pod}: not on this node ({node}); capture on its node, or find the name with penstock status"
            )),
            Some(found) if found.host_network => Err(format!(
                "pod {pod}: is in the host network, whose packets do not meet workers; use tcpdump on the node"
            )),
            Some(_) => Ok(()),
        }
    }

    /// A pod as workers know it now.
    fn captured_pod(&self, pod: &ObjectKey) -> CapturedPod {
        let port = self.ports.port_of(pod).map(|(id, _)| id);
        let inputs = self.publisher.inputs();
        let found = inputs.objects.pods().find(|known| known.key == *pod);
        let addresses = found.into_iter().flat_map(|pod| pod.addresses.iter().map(|&address| address.into())).collect();
        CapturedPod { port, addresses }
    }

    /// Keeps the capture in line with the pods and ports.
    pub(super) fn follow_capture(&mut self) {
        let Some(mut running) = self.operation.capture.take() else { return };
        if let Some(pod) = running.pod().map(|pod| self.captured_pod(pod))
            && let Some(capture) = running.for_workers(Some(pod))
            && let Err(error) = self.dataplane.capture(Some(&capture))
        {
            tracing::warn!(%error, "the capture does not follow its pod");
        }
        self.set_captured(&running);
        self.operation.capture = Some(running);
    }

    fn set_captured(&mut self, running: &RunningCapture) {
        let ports = running.ports(|address| self.ports.pod_with(address).cloned());
        self.ports.set_captured(&ports);
    }

    /// Passes packets on to the client; ends the capture at its limits, or once the client is gone.
    pub(super) fn forward_capture(&mut self) {
        let Some(mut running) = self.operation.capture.take() else { return };
        if running.is_abandoned() {
            tracing::info!("the capture has ended: its client is gone");
            return self.stop_capture(&running);
        }
        let ended = running.forward(
            |named, objects, packets| {
                let inputs = self.publisher.inputs();
                named.name(&self.names(&inputs), objects, packets)
            },
            NAMED_PER_LOCK,
        );
        match ended {
            None => self.operation.capture = Some(running),
            Some(reason) => {
                self.stop_capture(&running);
                tracing::info!("the capture has ended after {reason}");
                running.end(reason);
            }
        }
    }

    /// Gives established connections back to the programs, and takes the capture from the workers.
    fn stop_capture(&mut self, ended: &RunningCapture) {
        self.ports.set_captured(&CapturedPorts::None);
        if let Err(error) = self.dataplane.capture(None) {
            tracing::warn!(%error, "a worker does not end the capture");
        }
        let (sum, counts) = (&mut self.operation.captured, ended.counts());
        sum.packets += counts.packets;
        sum.bytes += counts.bytes;
        sum.lost += counts.lost;
    }
}
