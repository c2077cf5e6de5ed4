//! A cluster of one node, built from its manifests.

use std::path::Path;

use anyhow::{Context, Result, bail};
use penstock_control::model::{Object, Pod};
use penstock_control::source::manifest::{Options, read_manifests};

use crate::probe::Site;
use crate::testbed::Node;

/// A node and its pods as the manifests of a directory have them.
pub struct Cluster {
    /// The node, wired.
    pub node: Node,
    /// The node's name.
    pub name: String,
    /// Where probes start and end: the node first, then its pods, in the manifests' order.
    pub sites: Vec<Site>,
}

impl Cluster {
    /// Builds the one node that there is, and a network namespace for each pod on it that has an address.
    pub fn build(objects: &[Object]) -> Result<Self> {
        let mut nodes = objects.iter().filter_map(|object| match object {
            Object::Node(node) => Some(node),
            _ => None,
        });
        let (Some(described), None) = (nodes.next(), nodes.next()) else {
            bail!("a testbed's manifests have one Node, neither none nor several");
        };
        let mut node = Node::new(&described.name, &described.addresses)?;
        for pod in pods_on(objects, &described.name) {
            node.add_pod(&pod.key.to_string(), &pod.addresses)?;
        }
        node.settle()?;
        let sites = std::iter::once(Site::from(&node)).chain(node.pods().iter().map(Site::from)).collect();
        Ok(Self { node, name: described.name.clone(), sites })
    }

    /// The index of the site of this name.
    pub fn site(&self, name: &str) -> Result<usize> {
        self.sites.iter().position(|site| site.name == name).with_context(|| format!("no site {name} in this cluster"))
    }
}

fn pods_on<'a>(objects: &'a [Object], node: &str) -> impl Iterator<Item = &'a Pod> {
    objects.iter().filter_map(move |object| match object {
        Object::Pod(pod) if pod.node.as_deref() == Some(node) && !pod.host_network && !pod.finished => Some(pod),
        _ => None,
    })
}

/// All objects of a directory of manifests.
pub fn read_objects(directory: &Path) -> Result<Vec<Object>> {
    let manifests = read_manifests(&[directory], &Options::default())?;
    Ok(manifests.documents.into_iter().map(|document| document.object).collect())
}
