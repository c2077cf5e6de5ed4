//! Results of CNI plugins that the container runtime keeps on the node: which interfaces a pod has, and which addresses.
//!
//! libcni writes one file for each network of a sandbox when a plugin has answered ADD, and removes it at DEL
//! (`cacheAdd` in libcni/api.go of <https://github.com/containernetworking/cni>). No pod can write there, and files of pods that
//! are older than the daemon are there, too.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::unistd::geteuid;
use penstock_policy::model::ObjectKey;
use serde::Deserialize;

/// Most bytes of a file. One of a pod has some kilobytes.
const MOST_BYTES: u64 = 1 << 20;
const MOST_FILES: usize = 16_384;

/// The result of plugins for one network of a pod.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CniResult {
    pub pod: ObjectKey,
    /// Its sandbox: all networks of one sandbox are those of one pod.
    pub sandbox: String,
    /// Name of the interface in the pod.
    pub inside: String,
    /// Names of the interfaces that plugins made on the node: the pod's veth, and what is not the pod's alone, such as a bridge.
    pub on_node: Vec<String>,
    pub addresses: BTreeSet<IpAddr>,
}

/// The files' directories, and what was read of them.
#[derive(Debug)]
pub struct CniResults {
    directories: Vec<PathBuf>,
    files: BTreeMap<PathBuf, (Version, Option<CniResult>)>,
    /// Directories whose problem was logged.
    unreadable: BTreeSet<PathBuf>,
}

/// A file is read again if this differs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Version {
    inode: u64,
    length: u64,
    modified: (i64, i64),
}

impl Version {
    fn of(metadata: &Metadata) -> Self {
        Self { inode: metadata.ino(), length: metadata.len(), modified: (metadata.mtime(), metadata.mtime_nsec()) }
    }
}

impl CniResults {
    /// Nothing is read before [`CniResults::read`].
    pub fn new(directories: &[PathBuf]) -> Self {
        Self { directories: directories.to_vec(), files: BTreeMap::new(), unreadable: BTreeSet::new() }
    }

    /// All results of pods. Only files that are new or have changed are read.
    pub fn read(&mut self) -> Vec<CniResult> {
        let mut before = std::mem::take(&mut self.files);
        for directory in self.directories.clone() {
            match trusted(&directory).and_then(|_| fs::read_dir(&directory)) {
                Ok(entries) => {
                    self.unreadable.remove(&directory);
                    let paths = entries.take(MOST_FILES).filter_map(|entry| Some(entry.ok()?.path()));
                    paths.for_each(|path| self.read_file(path, &mut before));
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    if self.unreadable.insert(directory.clone()) {
                        tracing::warn!(
                            directory = %directory.display(),
                            %error,
                            "results of CNI plugins are not read: pods' interfaces are known by routes and neighbours alone; make it readable for this process and writable for root alone, or correct cni_results"
                        );
                    }
                }
            }
        }
        self.files.values().filter_map(|(_, result)| result.clone()).collect()
    }

    fn read_file(&mut self, path: PathBuf, before: &mut BTreeMap<PathBuf, (Version, Option<CniResult>)>) {
        let Some(metadata) = trusted(&path).ok().filter(Metadata::is_file) else { return };
        let version = Version::of(&metadata);
        let known = before.remove(&path).filter(|(known, _)| *known == version);
        let result = known.map_or_else(|| read(&path), |(_, result)| result);
        self.files.insert(path, (version, result));
    }
}

/// Metadata of what nobody but root and this user can write.
fn trusted(path: &Path) -> io::Result<Metadata> {
    let metadata = fs::symlink_metadata(path)?;
    let is_trusted = (metadata.uid() == 0 || metadata.uid() == geteuid().as_raw()) && metadata.mode() & 0o022 == 0;
    match is_trusted {
        true => Ok(metadata),
        false => Err(io::Error::new(io::ErrorKind::PermissionDenied, "others than root can write it")),
    }
}

fn read(path: &Path) -> Option<CniResult> {
    let mut text = String::new();
    File::open(path).ok()?.take(MOST_BYTES).read_to_string(&mut text).ok()?;
    parse(&text)
}

/// `cachedInfo` in libcni/api.go.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct CachedInfo {
    #[serde(default)]
    container_id: String,
    #[serde(default)]
    if_name: String,
    #[serde(default)]
    cni_args: Vec<(String, String)>,
    result: ResultOfPlugins,
}

/// The result as of version 0.3.0 of the specification, and later ones.
#[derive(Deserialize)]
struct ResultOfPlugins {
    #[serde(default)]
    interfaces: Vec<ResultInterface>,
    #[serde(default)]
    ips: Vec<ResultAddress>,
}

#[derive(Deserialize)]
struct ResultInterface {
    #[serde(default)]
    name: String,
    #[serde(default)]
    sandbox: String,
}

#[derive(Deserialize)]
struct ResultAddress {
    #[serde(default)]
    address: String,
}

/// Reads a file; `None` if it is of no pod, or not understood.
fn parse(text: &str) -> Option<CniResult> {
    let info: CachedInfo = serde_json::from_str(text).ok()?;
    let argument = |name: &str| {
        let found = info.cni_args.iter().find(|(key, value)| key == name && !value.is_empty());
        found.map(|(_, value)| value.clone())
    };
    let pod = ObjectKey { namespace: argument("K8S_POD_NAMESPACE")?, name: argument("K8S_POD_NAME")? };
    let on_node = info.result.interfaces.iter().filter(|interface| interface.sandbox.is_empty());
    let address = |one: &ResultAddress| one.address.split('/').next()?.parse().ok();
    Some(CniResult {
        pod,
        on_node: on_node.map(|interface| interface.name.clone()).collect(),
        addresses: info.result.ips.iter().filter_map(address).collect(),
        sandbox: info.container_id,
        inside: info.if_name,
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// As libcni writes it for a pod on a bridge.
    fn file(pod: &str, veth: &str, address: &str) -> String {
        serde_json::json!({
            "kind": "cniCacheV1", "containerId": "c1", "config": "e30=", "ifName": "eth0", "networkName": "cbr0",
            "netns": "/run/netns/cni-1",
            "cniArgs": [["IgnoreUnknown", "1"], ["K8S_POD_NAMESPACE", "shop"], ["K8S_POD_NAME", pod], ["K8S_POD_UID", "u"]],
            "result": {
                "cniVersion": "1.0.0", "dns": {},
                "interfaces": [{ "mac": "02:00:00:00:00:01", "name": "cni0" }, { "name": veth },
                    { "name": "eth0", "sandbox": "/run/netns/cni-1" }],
                "ips": [{ "address": format!("{address}/24"), "gateway": "10.1.1.1", "interface": 2 }],
            },
        })
        .to_string()
    }

    #[test]
    fn a_result_names_the_pod_its_interfaces_and_addresses() {
        let found = parse(&file("web", "veth1", "10.1.1.5")).unwrap();
        assert_eq!((found.pod.to_string().as_str(), found.inside.as_str()), ("shop/web", "eth0"));
        assert_eq!(found.on_node, ["cni0", "veth1"]);
        assert_eq!(found.addresses, BTreeSet::from(["10.1.1.5".parse().unwrap()]));
    }

    #[test]
    fn what_is_of_no_pod_or_not_understood_is_left_out() {
        let other = file("web", "veth1", "10.1.1.5").replace("K8S_POD_NAME\"", "OTHER\"");
        for text in ["", "{}", "[1]", "{\"result\": 7}", &other, &file("", "veth1", "10.1.1.5")] {
            assert_eq!(parse(text), None, "{text}");
        }
        let without_interfaces = file("web", "veth1", "none").replace("interfaces", "others");
        assert!(parse(&without_interfaces).is_some_and(|found| found.on_node.is_empty() && found.addresses.is_empty()));
    }

    #[test]
    fn files_are_followed_and_those_that_others_can_write_left_out() {
        let directory = tempfile::tempdir().unwrap();
        let mut results = CniResults::new(&[directory.path().to_owned(), directory.path().join("missing")]);
        let mut pods = || -> Vec<String> { results.read().into_iter().map(|found| found.pod.name).collect() };
        assert!(pods().is_empty());
        let path = directory.path().join("cbr0-c1-eth0");
        fs::write(&path, file("web", "veth1", "10.1.1.5")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(pods(), ["web"]);
        fs::write(&path, file("database", "veth1", "10.1.1.5")).unwrap();
        assert_eq!(pods(), ["database"]);
        std::os::unix::fs::symlink(&path, directory.path().join("cbr0-c2-eth0")).unwrap();
        assert_eq!(pods(), ["database"]);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o622)).unwrap();
        assert!(pods().is_empty());
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(pods(), ["database"]);
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(pods().is_empty());
    }
}
