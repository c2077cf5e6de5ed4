//! Builds clusters from manifests: one node, or several.

use std::path::Path;

use anyhow::{Context, Result, bail};
use ipnet::IpNet;
use penstock_policy::model::{self, Object, Pod};
use penstock_sources::manifest::{Options, read_manifests};

use crate::probe::{Frontend, Protocol, Site};
use crate::testbed::{
    InterNodeLink, KubeProxy, Node, ProxiedPort, ProxiedService, ProxyMode, Router, ServiceProtocol,
    masquerade_outside, read_services,
};

/// The node and pods of a directory of manifests.
pub struct Cluster {
    pub node: Node,
    pub name: String,
    /// Ends of probes: the node first, then its pods, in the order of the manifests.
    pub sites: Vec<Site>,
    /// Services and node ports; none without [`Cluster::proxy_services`].
    pub frontends: Vec<Frontend>,
}

impl Cluster {
    /// Builds the only node of the manifests, and a network namespace for each of its pods that has an address.
    pub fn build(objects: &[Object]) -> Result<Self> {
        Self::build_wired(objects, |node, pod| node.add_pod(&pod.key.to_string(), &pod.addresses).map(drop))
    }

    /// The same, with this MTU on the pods' links.
    pub fn build_with_mtu(objects: &[Object], mtu: u32) -> Result<Self> {
        Self::build_wired(objects, |node, pod| {
            node.add_pod_with_mtu(&pod.key.to_string(), &pod.addresses, mtu).map(drop)
        })
    }

    /// The same, with all pods on a bridge.
    pub fn build_bridged(objects: &[Object]) -> Result<Self> {
        Self::build_wired(objects, |node, pod| {
            node.add_bridged_pod(&pod.key.to_string(), &pod.addresses, InterNodeLink::Routes.mtu()).map(drop)
        })
    }

    fn build_wired(objects: &[Object], add: impl Fn(&mut Node, &Pod) -> Result<()>) -> Result<Self> {
        let mut nodes = nodes_in(objects);
        let (Some(described), None) = (nodes.next(), nodes.next()) else {
            bail!("a testbed's manifests have one Node, neither none nor several");
        };
        let mut node = Node::new(&described.name, &described.addresses)?;
        for pod in pods_on(objects, &described.name) {
            add(&mut node, pod)?;
        }
        node.settle()?;
        let sites = std::iter::once(Site::from(&node)).chain(node.pods().iter().map(Site::from)).collect();
        Ok(Self { node, name: described.name.clone(), sites, frontends: Vec::new() })
    }

    /// Makes the node one of a cluster: with kube-proxy's rules for the Services of these manifests, and masquerade of what
    /// leaves the cluster.
    pub fn proxy_services(&mut self, manifests: &Path, mode: ProxyMode) -> Result<()> {
        let proxy = KubeProxy { mode, node: self.node.addresses().to_vec(), services: read_services(manifests)? };
        proxy.install(self.node.namespace())?;
        masquerade_outside(self.node.namespace())?;
        self.node.add_service_routes()?;
        self.frontends = frontends(&proxy, &self.sites)?;
        Ok(())
    }

    /// The index of the site of this name.
    pub fn site(&self, name: &str) -> Result<usize> {
        self.sites.iter().position(|site| site.name == name).with_context(|| format!("no site {name} in this cluster"))
    }
}

/// Where the Services of a proxy answer, which have one backend each: at their cluster addresses, then by port of the node.
fn frontends(proxy: &KubeProxy, sites: &[Site]) -> Result<Vec<Frontend>> {
    let mut frontends = Vec::new();
    for service in &proxy.services {
        let name = service.name.rsplit('/').next().unwrap_or(&service.name);
        let backend = service.ports.first().and_then(|port| port.backends.first());
        let to = sites.iter().position(|site| backend.is_some_and(|backend| site.addresses.contains(&backend.ip())));
        let to = to.with_context(|| format!("no site is the backend of Service {}", service.name))?;
        frontends.push(Frontend {
            name: format!("Service/{name}"),
            addresses: service.addresses.clone(),
            to,
            ports: ports(service, |port| Some(port.number)),
        });
        frontends.push(Frontend {
            name: format!("NodePort/{name}"),
            addresses: proxy.node.clone(),
            to,
            ports: ports(service, |port| port.node_port),
        });
    }
    frontends.retain(|frontend| !frontend.ports.is_empty());
    Ok(frontends)
}

/// Probes to a Service's ports of these numbers, and the ports at which they arrive at the first backend.
fn ports(service: &ProxiedService, number: impl Fn(&ProxiedPort) -> Option<u16>) -> Vec<(Protocol, Protocol)> {
    let sent_and_arrived = |port: &ProxiedPort| {
        let of_number = match port.protocol {
            ServiceProtocol::Tcp => Protocol::Tcp,
            ServiceProtocol::Udp => Protocol::Udp,
            ServiceProtocol::Sctp => Protocol::Sctp,
        };
        Some((of_number(number(port)?), of_number(port.backends.first()?.port())))
    };
    service.ports.iter().filter_map(sent_and_arrived).collect()
}

/// Nodes joined by a router, and their pods, from manifests.
pub struct MultiNodeCluster {
    pub router: Router,
    /// Names and nodes, wired, in the order of the manifests.
    pub nodes: Vec<(String, Node)>,
    /// Ends of probes: the nodes first, then the pods, node by node.
    pub sites: Vec<Site>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NodeLayout {
    /// How one node reaches the pods of another.
    pub between: InterNodeLink,
    /// Prefix lengths of the routes to pods, for IPv4 and IPv6.
    pub prefixes: (u8, u8),
    /// Whether the pods of a node are on a bridge; otherwise each has its own route.
    pub bridged: bool,
}

impl MultiNodeCluster {
    /// Builds every node, and a network namespace for each pod on it that has an address.
    pub fn build(objects: &[Object], layout: NodeLayout) -> Result<Self> {
        let NodeLayout { between, prefixes: (v4, v6), bridged } = layout;
        let mut router = Router::new("router")?;
        let (mut nodes, mut networks) = (Vec::new(), Vec::new());
        for described in nodes_in(objects) {
            let mut node = router.add_node(&described.name, &described.addresses)?;
            let mut of_its_pods: Vec<IpNet> = Vec::new();
            for pod in pods_on(objects, &described.name) {
                let name = pod.key.to_string();
                match bridged {
                    true => node.add_bridged_pod(&name, &pod.addresses, between.mtu())?,
                    false => node.add_pod_with_mtu(&name, &pod.addresses, between.mtu())?,
                };
                let network = |&address| Ok(IpNet::new(address, if address.is_ipv4() { v4 } else { v6 })?.trunc());
                of_its_pods.extend(pod.addresses.iter().map(network).collect::<Result<Vec<_>>>()?);
            }
            node.settle()?;
            of_its_pods.sort();
            of_its_pods.dedup();
            nodes.push((described.name.clone(), node));
            networks.push(of_its_pods);
        }
        let all: Vec<&Node> = nodes.iter().map(|(_, node)| node).collect();
        router.join(&all, &networks, between)?;
        let named = |(name, node): &(String, Node)| Site { name: name.clone(), ..Site::from(node) };
        let pods = nodes.iter().flat_map(|(_, node)| node.pods()).map(Site::from);
        let sites = nodes.iter().map(named).chain(pods).collect();
        Ok(Self { router, nodes, sites })
    }

    /// Gives every node what [`Cluster::proxy_services`] gives one. Returns the Services at their cluster addresses, and at the
    /// node ports of each node, node by node.
    pub fn proxy_services(&self, manifests: &Path, mode: ProxyMode) -> Result<Vec<Vec<Frontend>>> {
        let services = read_services(manifests)?;
        let prepare = |(_, node): &(String, Node)| {
            let proxy = KubeProxy { mode, node: node.addresses().to_vec(), services: services.clone() };
            proxy.install(node.namespace())?;
            masquerade_outside(node.namespace())?;
            frontends(&proxy, &self.sites)
        };
        self.nodes.iter().map(prepare).collect()
    }
}

fn nodes_in(objects: &[Object]) -> impl Iterator<Item = &model::Node> {
    objects.iter().filter_map(|object| match object {
        Object::Node(node) => Some(node),
        _ => None,
    })
}

fn pods_on<'a>(objects: &'a [Object], node: &str) -> impl Iterator<Item = &'a Pod> {
    objects.iter().filter_map(move |object| match object {
        Object::Pod(pod) if pod.node.as_deref() == Some(node) && !pod.host_network && !pod.finished => Some(pod),
        _ => None,
    })
}

/// Reads all objects of a directory of manifests.
pub fn read_objects(directory: &Path) -> Result<Vec<Object>> {
    let manifests = read_manifests(&[directory], &Options::default())?;
    Ok(manifests.documents.into_iter().map(|document| document.object).collect())
}
