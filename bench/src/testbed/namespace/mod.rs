//! Network namespaces that are removed when they are dropped.

mod netlink;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::net::{TcpListener, ToSocketAddrs, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use nix::unistd::Pid;

use super::cleanup::CleanupGuard;
pub use netlink::{Netlink, RouteVia, network_state};

/// Directory in which namespaces are bound, as `ip netns` does.
pub const DIRECTORY: &str = "/run/netns";

const PREFIX: &str = "pen";

static COUNTER: AtomicU32 = AtomicU32::new(0);
/// Inodes of all namespaces made by this process, removed ones included.
static MADE: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());
static SWEEP: Once = Once::new();

/// A network namespace, bound at `/run/netns/NAME` so that `ip netns exec NAME` enters it.
///
/// Its loopback is up, and IPv6 addresses are usable immediately (no duplicate address detection). Clones refer to the
/// same namespace, which is removed with the last of them.
#[derive(Clone)]
pub struct Namespace {
    inner: Arc<Inner>,
}

struct Inner {
    name: String,
    /// Where it is bound, or its process's.
    path: PathBuf,
    file: Arc<File>,
    /// Present if it was made here.
    _guard: Option<CleanupGuard>,
}

/// Inodes of all namespaces made by this process.
pub(super) fn made() -> BTreeSet<u64> {
    MADE.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

impl Namespace {
    /// Makes a namespace whose name ends in `label`.
    pub fn new(label: &str) -> Result<Self> {
        SWEEP.call_once(sweep);
        let name = format!("{PREFIX}-{}-{}-{label}", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed));
        let path = Path::new(DIRECTORY).join(&name);
        fs::create_dir_all(DIRECTORY).with_context(|| format!("cannot make {DIRECTORY}"))?;
        let guard = CleanupGuard::new({
            let path = path.clone();
            move || remove(&path)
        });
        File::create_new(&path).with_context(|| format!("cannot make {}", path.display()))?;
        let file = on_thread(|| bind_new(&path)).with_context(|| {
            format!("cannot make the network namespace {name}; it needs root (CAP_SYS_ADMIN): run it with sudo")
        })?;
        MADE.lock().unwrap_or_else(PoisonError::into_inner).insert(file.metadata()?.ino());
        let namespace = Self { inner: Arc::new(Inner { name, path, file: Arc::new(file), _guard: Some(guard) }) };
        namespace.prepare()?;
        Ok(namespace)
    }

    /// The namespace of a process, such as a pod's that a kubelet has started. It lives as long as this value, even if the
    /// process ends, and is not changed.
    pub fn of_process(id: Pid, name: &str) -> Result<Self> {
        let path = PathBuf::from(format!("/proc/{id}/ns/net"));
        let file = File::open(&path).with_context(|| format!("cannot open the network namespace of {name}"))?;
        Ok(Self { inner: Arc::new(Inner { name: name.to_owned(), path, file: Arc::new(file), _guard: None }) })
    }

    fn prepare(&self) -> Result<()> {
        for key in ["all", "default"] {
            self.set_sysctl(&format!("net/ipv6/conf/{key}/accept_dad"), "0")?;
            self.set_sysctl(&format!("net/ipv6/conf/{key}/accept_ra"), "0")?;
            self.set_sysctl(&format!("net/ipv4/conf/{key}/rp_filter"), "0")?;
        }
        self.set_sysctl("net/ipv4/ping_group_range", "0 2147483647")?;
        let netlink = self.netlink()?;
        netlink.set_up(netlink.index("lo")?)
    }

    /// Its name; under [`DIRECTORY`] if it was made here.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Its inode number, which identifies for example its pinned objects.
    pub fn inode(&self) -> Result<u64> {
        Ok(self.inner.file.metadata()?.ino())
    }

    /// Path of the file it is bound to, or of its process.
    pub fn path(&self) -> PathBuf {
        self.inner.path.clone()
    }

    /// Runs `work` inside, on a separate thread, and waits for it. Panics propagate to the caller.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        on_thread(|| {
            self.enter();
            work()
        })
    }

    pub fn udp(&self, at: impl ToSocketAddrs + Sync) -> io::Result<UdpSocket> {
        self.bind(|| UdpSocket::bind(&at))
    }

    /// A TCP socket inside that listens.
    pub fn listen(&self, at: impl ToSocketAddrs + Sync) -> io::Result<TcpListener> {
        self.bind(|| TcpListener::bind(&at))
    }

    /// Waits for a port that is in use: a child that another thread has just forked holds a socket that was closed since, until it executes
    /// its program.
    fn bind<T: Send>(&self, bind: impl Fn() -> io::Result<T> + Sync) -> io::Result<T> {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            match self.run(&bind) {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse && Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                bound => return bound,
            }
        }
    }

    pub fn spawn<T: Send + 'static>(
        &self,
        name: &str,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<JoinHandle<T>> {
        let namespace = self.clone();
        std::thread::Builder::new().name(name.into()).spawn(move || {
            namespace.enter();
            drop(namespace);
            work()
        })
    }

    /// Moves the calling thread inside for good.
    fn enter(&self) {
        setns(&self.inner.file, CloneFlags::CLONE_NEWNET).expect("a namespace that is held open can be entered");
    }

    /// A command inside. It does not get the variables of tests, which would be unknown settings to a daemon.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        let of_tests = std::env::vars_os().map(|(name, _)| name);
        of_tests.filter(|name| name.to_string_lossy().starts_with("PENSTOCK_")).for_each(|name| {
            command.env_remove(name);
        });
        let file = self.inner.file.clone();
        let enter = move || setns(&file, CloneFlags::CLONE_NEWNET).map_err(std::io::Error::from);
        // SAFETY: between fork and exec the closure makes one system call on a descriptor that it owns; it
        // neither allocates nor takes a lock.
        unsafe { command.pre_exec(enter) };
        command
    }

    /// A route netlink socket inside; usable from any thread.
    pub fn netlink(&self) -> Result<Netlink> {
        Netlink::open(self)
    }

    /// Sets receive packet steering: the kernel processes packets of all queues of an interface on these cores (a bit
    /// mask; 0 for the core on which they arrive). It is configured through sysfs.
    pub fn set_receive_steering(&self, interface: &str, cores: u64) -> Result<()> {
        let steer = || -> Result<()> {
            for queue in fs::read_dir(format!("/sys/class/net/{interface}/queues"))?.flatten() {
                let file = queue.path().join("rps_cpus");
                if file.exists() {
                    fs::write(file, format!("{cores:x}"))?;
                }
            }
            Ok(())
        };
        self.run_in_sysfs(steer).with_context(|| format!("cannot steer what {interface} receives to cores {cores:#x}"))
    }

    /// Runs an interface's NAPI in a separate kernel thread, or in the sender's softirq.
    pub fn set_threaded_napi(&self, interface: &str, threaded: bool) -> Result<()> {
        let file = format!("/sys/class/net/{interface}/threaded");
        self.run_in_sysfs(|| Ok(fs::write(&file, if threaded { "1" } else { "0" })?))
            .with_context(|| format!("cannot set {file} to {threaded} in {}", self.name()))
    }

    /// Runs `work` inside with a private mount of this namespace's `/sys`. A sysfs shows the network namespace of the
    /// process that mounted it.
    fn run_in_sysfs(&self, work: impl FnOnce() -> Result<()> + Send) -> Result<()> {
        self.run(|| {
            unshare(CloneFlags::CLONE_NEWNS)?;
            mount(None::<&str>, "/sys", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)?;
            mount(Some("sysfs"), "/sys", Some("sysfs"), MsFlags::empty(), None::<&str>)?;
            work()
        })
    }

    /// Writes a sysctl of this namespace; `key` is its path below `/proc/sys`, such as `net/ipv4/ip_forward`.
    pub fn set_sysctl(&self, key: &str, value: &str) -> Result<()> {
        self.run(|| fs::write(Path::new("/proc/sys").join(key), value))
            .with_context(|| format!("cannot set the sysctl {key} to {value} in {}", self.name()))
    }

    pub fn sysctl(&self, key: &str) -> Result<String> {
        let value = self
            .run(|| fs::read_to_string(Path::new("/proc/sys").join(key)))
            .with_context(|| format!("cannot read the sysctl {key} in {}", self.name()))?;
        Ok(value.trim().to_owned())
    }
}

impl AsFd for Namespace {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.file.as_fd()
    }
}

impl AsRawFd for Namespace {
    fn as_raw_fd(&self) -> i32 {
        self.inner.file.as_raw_fd()
    }
}

/// Runs `work` on a separate thread, so that changes of the thread's namespaces end with it.
fn on_thread<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| scope.spawn(work).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn bind_new(path: &Path) -> Result<File> {
    unshare(CloneFlags::CLONE_NEWNET)?;
    mount(Some("/proc/thread-self/ns/net"), path, None::<&str>, MsFlags::MS_BIND, None::<&str>)?;
    Ok(File::open(path)?)
}

fn remove(path: &Path) {
    // Errors are ignored: the mount may not exist yet, and the next start sweeps what remains.
    if let Ok(namespace) = fs::metadata(path) {
        // A daemon's pins in it go, too: links end with it, but a connection table does not.
        let _ = fs::remove_dir_all(Path::new("/sys/fs/bpf/penstock").join(namespace.ino().to_string()));
    }
    let _ = umount2(path, MntFlags::MNT_DETACH);
    let _ = fs::remove_file(path);
}

/// Removes namespaces of processes that no longer exist.
fn sweep() {
    let Ok(entries) = fs::read_dir(DIRECTORY) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let owner = name.to_str().and_then(owner);
        if owner.is_some_and(|process| !Path::new("/proc").join(process.to_string()).exists()) {
            remove(&entry.path());
        }
    }
}

/// The process that made a namespace of this name.
pub(super) fn owner(name: &str) -> Option<u32> {
    name.strip_prefix(PREFIX)?.strip_prefix('-')?.split('-').next()?.parse().ok()
}
