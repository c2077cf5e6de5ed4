//! A process evaluates the first packet of each connection (NFQUEUE), as kube-network-policies does.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use anyhow::{Context, Result};
use penstock_dataplane::packet::{Address, Flow, Protocol};
use penstock_dataplane::policy::PolicySet;
use penstock_policy::engine::Engine;

use super::tools::{find, run};
use crate::load::pin;
use crate::testbed::Namespace;

const QUEUE: u16 = 0;
/// A datagram to this port of the node's loopback wakes the thread, which blocks in a system call otherwise.
const WAKE: u16 = 9;

pub(super) struct VerdictThread {
    node: Namespace,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl VerdictThread {
    /// Starts it on this core and adds the iptables rules that queue packets which open a connection.
    pub(super) fn start(node: &Namespace, engine: Engine, core: usize) -> Result<Self> {
        let restore = find("iptables-restore", "iptables")?;
        let mut queue = node.run(open).context("the kernel lacks NFQUEUE (nfnetlink_queue)")?;
        let rules = format!(
            "*filter\n:FORWARD ACCEPT [0:0]\n-A FORWARD -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT\n\
             -A FORWARD -j NFQUEUE --queue-num {QUEUE}\n\
             -A OUTPUT -o lo -p udp --dport {WAKE} -j NFQUEUE --queue-num {QUEUE}\nCOMMIT\n"
        );
        run(node, &restore, &[], &rules)?;
        let ends = Arc::new(AtomicBool::new(false));
        let ended = ends.clone();
        let policy = engine.policy_set().clone();
        let body = move || {
            // If it cannot be pinned, it runs on any core.
            let _ = pin(core);
            while !ended.load(Ordering::Relaxed) {
                // It fails with ENOBUFS when the socket overflows; the kernel dropped those packets.
                let Ok(mut message) = queue.recv() else { continue };
                let allowed = allows(&policy, message.get_payload());
                message.set_verdict(if allowed { nfq::Verdict::Accept } else { nfq::Verdict::Drop });
                // A packet without a verdict stays queued and counts as lost.
                let _ = queue.verdict(message);
            }
        };
        let thread = std::thread::Builder::new().name("nfqueue".into()).spawn(body)?;
        Ok(Self { node: node.clone(), ends, thread: Some(thread) })
    }
}

impl Drop for VerdictThread {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        let woken = self.node.run(|| UdpSocket::bind("127.0.0.1:0")?.send_to(b"wake", ("127.0.0.1", WAKE)));
        // If the thread cannot be woken, it runs until the process ends.
        if let (Ok(_), Some(thread)) = (woken, self.thread.take()) {
            let _ = thread.join();
        }
    }
}

fn open() -> std::io::Result<nfq::Queue> {
    let mut queue = nfq::Queue::open()?;
    queue.bind(QUEUE)?;
    queue.set_copy_range(QUEUE, 64)?;
    queue.set_queue_max_len(QUEUE, 8192)?;
    Ok(queue)
}

/// Whether policy allows the connection that this IPv4 packet opens.
fn allows(policy: &PolicySet, packet: &[u8]) -> bool {
    flow(packet).is_some_and(|flow| policy.evaluate(&flow).drop_reason().is_none())
}

fn flow(packet: &[u8]) -> Option<Flow> {
    let header = usize::from(packet.first()? & 0x0f) * 4;
    let address = |at: usize| {
        let bytes: [u8; 4] = *packet.get(at..)?.first_chunk()?;
        Some(Address::from(IpAddr::V4(Ipv4Addr::from(bytes))))
    };
    let port = |at: usize| Some(u16::from_be_bytes(*packet.get(at..)?.first_chunk()?));
    let protocol = Protocol(*packet.get(9)?);
    Some(Flow { src: address(12)?, dst: address(16)?, protocol, src_port: port(header)?, dst_port: port(header + 2)? })
}
