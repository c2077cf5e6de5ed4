//! A node and its pods made of network namespaces and veth pairs, wired as the `ptp` CNI plugin does it, and what else a
//! cluster's node has: kube-proxy's rules, masquerade, an overlay to other nodes.
//!
//! Everything is undone when its value is dropped, when the owning thread panics, and when SIGINT, SIGTERM or SIGHUP
//! ends the process. Leftovers of a killed process are removed when the next one starts. Names contain the process id
//! and a counter, so that tests run in parallel.
//!
//! Needs root (CAP_SYS_ADMIN and CAP_NET_ADMIN), but neither `ip` nor `sysctl`; rules for Services need `nft`.

pub mod api_server;
mod capture;
mod cleanup;
mod control_group;
mod daemon;
mod inventory;
mod kube_proxy;
mod namespace;
mod node;
mod offloads;
mod process;
mod relay;
mod router;
mod scratch;

pub use capture::{CapturedFrame, PacketCapture, read_packets};
pub use cleanup::CleanupGuard;
pub use control_group::ControlGroup;
pub use daemon::{Daemon, DaemonConfig, Log, Privileges, penstock_binary};
pub use inventory::Inventory;
pub use kube_proxy::{
    KubeProxy, POD_NETWORKS, ProxiedPort, ProxiedService, ProxyMode, SERVICE_NETWORKS, ServiceProtocol,
    masquerade_outside, read_services,
};
pub use namespace::{DIRECTORY, Namespace, Netlink, RouteVia, network_state};
pub use node::{Gateways, Node, Outside, Pod};
pub use offloads::Offload;
pub use process::ServiceProcess;
pub use relay::Relay;
pub use router::{InterNodeLink, Router};
pub use scratch::ScratchDir;
