//! The plugin's side of the CNI protocol: <https://github.com/containernetworking/cni/blob/main/SPEC.md>.

use std::io::{self, Read, stdin};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use nix::sys::socket::{AddressFamily, SockFlag, SockType};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use penstock_admin::client::DEFAULT_CNI_SOCKET;

use crate::announce;
use crate::close::{self, CloseError, Veth};

/// The versions whose results it passes on: all that know chains.
const VERSIONS: [&str; 5] = ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];
/// Version of an error's form when the configuration names none.
const FALLBACK_VERSION: &str = "1.0.0";
/// The daemon's default (`fail.pins`).
const PINS: &str = "/sys/fs/bpf/penstock";

/// The configuration on standard input. Other plugins' keys and the runtime's own are left alone.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct NetworkConfig {
    #[serde(default)]
    cni_version: String,
    /// As `fail.pins` in the daemon's configuration.
    #[serde(default = "default_pins")]
    pins: PathBuf,
    /// Where the daemon listens: `admin.socket` in its configuration with the extension `cni`.
    #[serde(default = "default_socket")]
    socket: PathBuf,
    /// How long ADD waits for the pod's policy to be in effect, in seconds; 0: not at all.
    #[serde(default = "default_wait")]
    wait_seconds: u64,
    #[serde(default)]
    prev_result: Option<Value>,
}

fn default_pins() -> PathBuf {
    PINS.into()
}

fn default_socket() -> PathBuf {
    DEFAULT_CNI_SOCKET.into()
}

/// Seconds that ADD waits, unless the configuration says otherwise. A policy is in effect within some milliseconds after the
/// daemon knows the pod.
pub(crate) const WAIT: u64 = 10;
/// The longest wait in seconds: a kubelet gives all plugins together two minutes (`--runtime-request-timeout`).
pub(crate) const LONGEST_WAIT: u64 = 100;

const fn default_wait() -> u64 {
    WAIT
}

/// An answer that is not the one asked for. The codes below 100 are the specification's.
#[derive(Debug, thiserror::Error)]
enum PluginError {
    #[error("{0:?} is no supported version: use one of {known}", known = VERSIONS.join(", "))]
    Version(String),
    #[error("CNI_COMMAND is {0:?}: use ADD, DEL, CHECK, GC, STATUS or VERSION")]
    Command(String),
    #[error("the configuration on standard input: {0}")]
    Config(String),
    #[error("there is no prevResult: list penstock-cni behind the plugin that makes the pod's interface")]
    NoPrevResult,
    #[error(
        "prevResult has no veth on the node ({0}): penstock-cni works behind plugins that wire pods with veths, such as ptp and bridge"
    )]
    NoVeth(String),
    #[error(transparent)]
    Close(#[from] CloseError),
    #[error("new pods cannot be closed: {0}")]
    Unavailable(CloseError),
    #[error("new pods cannot be closed, and no daemon serves those that there are: {0}")]
    Limited(CloseError),
    #[error("{0} is not closed, and no daemon serves it: delete the pod, or start the daemon")]
    NotClosed(String),
}

impl PluginError {
    const fn code(&self) -> u32 {
        match self {
            Self::Version(_) => 1,
            Self::Command(_) => 4,
            Self::Config(_) => 6,
            Self::NoPrevResult | Self::NoVeth(_) => 7,
            Self::Unavailable(_) => 50,
            Self::Limited(_) => 51,
            Self::Close(_) => 100,
            Self::NotClosed(_) => 101,
        }
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ErrorResult<'a> {
    cni_version: &'a str,
    code: u32,
    msg: String,
}

/// Carries out a command of the container runtime. The answer goes to standard output, also that of an error.
pub(crate) fn run(command: &str) -> ExitCode {
    let mut text = String::new();
    let read = stdin().take(1 << 20).read_to_string(&mut text);
    let config = read.map_err(|error| PluginError::Config(error.to_string())).and_then(|_| parse(&text, command));
    let version = config.as_ref().map_or(FALLBACK_VERSION, |config| config.cni_version.as_str()).to_owned();
    match config.and_then(|config| answer(command, config)) {
        Ok(Some(answer)) => println!("{answer}"),
        Ok(None) => {}
        Err(error) => {
            let result = ErrorResult { cni_version: &version, code: error.code(), msg: error.to_string() };
            // A structure of strings and a number is always serializable.
            println!("{}", serde_json::to_string(&result).unwrap_or_default());
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

fn parse(text: &str, command: &str) -> Result<NetworkConfig, PluginError> {
    let config: NetworkConfig = match text.trim() {
        // VERSION may come without.
        "" if command == "VERSION" => serde_json::from_str("{}"),
        text => serde_json::from_str(text),
    }
    .map_err(|error| PluginError::Config(error.to_string()))?;
    if config.wait_seconds > LONGEST_WAIT {
        let wait = config.wait_seconds;
        return Err(PluginError::Config(format!("waitSeconds = {wait}: set 0 (no wait) to {LONGEST_WAIT}")));
    }
    match VERSIONS.contains(&config.cni_version.as_str()) || command == "VERSION" {
        true => Ok(config),
        false => Err(PluginError::Version(config.cni_version)),
    }
}

fn answer(command: &str, config: NetworkConfig) -> Result<Option<Value>, PluginError> {
    match command {
        "ADD" => {
            let result = config.prev_result.ok_or(PluginError::NoPrevResult)?;
            let veths = veths(&result)?;
            for veth in &veths {
                close::close(&config.pins, veth)?;
            }
            let names: Vec<String> = veths.into_iter().map(|veth| veth.name).collect();
            announce::wait(&config.socket, Duration::from_secs(config.wait_seconds), &result, &names);
            Ok(Some(result))
        }
        "CHECK" => {
            let result = config.prev_result.ok_or(PluginError::NoPrevResult)?;
            for veth in veths(&result)? {
                if !close::is_closed_or_served(&config.pins, &veth)? {
                    return Err(PluginError::NotClosed(veth.name));
                }
            }
            Ok(None)
        }
        // The programs go with the interface, and the daemon removes the pins of interfaces that are gone.
        "DEL" => Ok(None),
        "GC" => Ok(close::collect(&config.pins).map(|()| None)?),
        // A daemon that is away is no reason to give a node up: until it is back, new pods start closed.
        "STATUS" => match close::try_closing(&config.pins) {
            Ok(()) => Ok(None),
            Err(error) if UnixStream::connect(&config.socket).is_ok() => Err(PluginError::Unavailable(error)),
            Err(error) => Err(PluginError::Limited(error)),
        },
        "VERSION" => Ok(Some(serde_json::json!({ "cniVersion": FALLBACK_VERSION, "supportedVersions": VERSIONS }))),
        other => Err(PluginError::Command(other.to_owned())),
    }
}

/// The veths among the interfaces of a result that are the node's. Others, such as a bridge, are not the pod's alone.
fn veths(result: &Value) -> Result<Vec<Veth>, PluginError> {
    let interfaces = result["interfaces"].as_array().into_iter().flatten();
    let on_node = interfaces.filter(|one| one["sandbox"].as_str().unwrap_or_default().is_empty());
    let names: Vec<&str> = on_node.filter_map(|one| one["name"].as_str()).collect();
    let veths: Vec<Veth> = names.iter().filter_map(|name| veth(name)).collect();
    match veths.is_empty() {
        true => Err(PluginError::NoVeth(if names.is_empty() { "no interface".into() } else { names.join(", ") })),
        false => Ok(veths),
    }
}

/// An interface of this network namespace whose driver says that it is a veth.
fn veth(name: &str) -> Option<Veth> {
    let index = nix::net::if_::if_nametoindex(name).ok()?;
    (driver(name).ok()? == *b"veth").then(|| Veth { name: name.to_owned(), index })
}

/// The driver of an interface: ETHTOOL_GDRVINFO of SIOCETHTOOL (include/uapi/linux/ethtool.h). sysfs would show the network
/// namespace of whoever has mounted it.
fn driver(name: &str) -> io::Result<Vec<u8>> {
    const ETHTOOL_GDRVINFO: u32 = 3;
    /// Bytes of `struct ethtool_drvinfo`; the driver's name is behind the command.
    const DRVINFO: usize = 196;
    let socket = nix::sys::socket::socket(AddressFamily::Unix, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
    let mut info = [0_u8; DRVINFO];
    info[..4].copy_from_slice(&ETHTOOL_GDRVINFO.to_ne_bytes());
    // SAFETY: all zeros is valid for this plain structure.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte stays zero. `if_nametoindex` has accepted the name.
    for (to, from) in request.ifr_name[..libc::IFNAMSIZ - 1].iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_data = info.as_mut_ptr().cast();
    // SAFETY: the kernel reads the request, and writes at most `DRVINFO` bytes to `info`; both outlive the call.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL as _, &raw mut request) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    let name = &info[4..36];
    Ok(name.iter().copied().take_while(|byte| *byte != 0).collect())
}
