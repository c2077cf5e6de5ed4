//! veth pairs in a test's own network namespace, and raw sockets on their far ends.

use std::io;
use std::mem::{size_of, zeroed};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::panic::resume_unwind;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use nix::sched::{CloneFlags, unshare};

/// Runs a test in a temporary network namespace.
pub(crate) fn in_namespace(test: impl FnOnce() + Send) {
    let run = || {
        unshare(CloneFlags::CLONE_NEWNET).expect("these tests need root");
        // So that only the test sends packets on its interfaces.
        std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1").unwrap();
        test();
    };
    if let Err(panic) = thread::scope(|scope| scope.spawn(run).join()) {
        resume_unwind(panic);
    }
}

/// Runs the `ip` command in the calling thread's namespace.
pub(crate) fn ip(arguments: &str) {
    let output = Command::new("ip").args(arguments.split_whitespace()).output().expect("iproute2 is installed");
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Creates a veth pair `<name>` and `<name>p`, both up.
pub(crate) fn veth(name: &str) {
    ip(&format!("link add name {name} type veth peer name {name}p"));
    ip(&format!("link set dev {name} up"));
    ip(&format!("link set dev {name}p up"));
}

/// A raw socket on one interface: sends whole frames, and receives all that arrive there.
pub(crate) struct Raw(OwnedFd);

impl Raw {
    pub(crate) fn open(interface: &str) -> Self {
        let protocol = 0x0003_u16.to_be(); // ETH_P_ALL
        // SAFETY: a plain system call; nothing else owns the descriptor that it returns.
        let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
        assert!(fd >= 0, "{}", io::Error::last_os_error());
        // SAFETY: as above.
        let this = Self(unsafe { OwnedFd::from_raw_fd(fd) });
        this.option(libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, 64 << 20);
        this.option(libc::SOL_PACKET, libc::PACKET_IGNORE_OUTGOING, 1);
        // SAFETY: all zeros is valid for this plain structure.
        let mut address: libc::sockaddr_ll = unsafe { zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = protocol;
        address.sll_ifindex = nix::net::if_::if_nametoindex(interface).unwrap() as i32;
        // SAFETY: the address lives across the call, and its size is given.
        let bound = unsafe { libc::bind(fd, (&raw const address).cast(), size_of::<libc::sockaddr_ll>() as u32) };
        assert_eq!(bound, 0, "{}", io::Error::last_os_error());
        this
    }

    fn option(&self, level: i32, option: i32, value: i32) {
        // SAFETY: the value lives across the call, and its size is given.
        let set = unsafe { libc::setsockopt(self.0.as_raw_fd(), level, option, (&raw const value).cast(), 4) };
        assert_eq!(set, 0, "{}", io::Error::last_os_error());
    }

    /// Sends frames, as many per system call as the kernel accepts.
    pub(crate) fn send_all(&self, frames: &[Vec<u8>]) {
        let mut vectors: Vec<libc::iovec> = frames
            .iter()
            .map(|frame| libc::iovec { iov_base: frame.as_ptr().cast_mut().cast(), iov_len: frame.len() })
            .collect();
        let mut messages: Vec<libc::mmsghdr> = vectors
            .iter_mut()
            .map(|vector| {
                // SAFETY: all zeros is valid for this plain structure.
                let mut message: libc::mmsghdr = unsafe { zeroed() };
                message.msg_hdr.msg_iov = vector;
                message.msg_hdr.msg_iovlen = 1;
                message
            })
            .collect();
        let mut sent = 0;
        while sent < messages.len() {
            let rest = &mut messages[sent..];
            // SAFETY: the messages point to vectors and frames that live across the call.
            let count = unsafe { libc::sendmmsg(self.0.as_raw_fd(), rest.as_mut_ptr(), rest.len() as u32, 0) };
            assert!(count > 0, "sendmmsg: {}", io::Error::last_os_error());
            sent += count as usize;
        }
    }

    /// The next frame, or `None` if none arrives within this time.
    pub(crate) fn receive(&self, patience: Duration) -> Option<Vec<u8>> {
        let mut poll = libc::pollfd { fd: self.0.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd, which lives across the call.
        if unsafe { libc::poll(&mut poll, 1, patience.as_millis() as i32) } != 1 {
            return None;
        }
        let mut buffer = vec![0; 4096];
        // SAFETY: the buffer lives across the call, and its size is given.
        let length = unsafe { libc::recv(poll.fd, buffer.as_mut_ptr().cast(), buffer.len(), 0) };
        assert!(length >= 0, "{}", io::Error::last_os_error());
        buffer.truncate(length as usize);
        Some(buffer)
    }

    /// How many frames arrived since the last call, those dropped for a full socket included.
    pub(crate) fn arrived(&self) -> u64 {
        // SAFETY: all zeros is valid for this plain structure.
        let mut statistics: libc::tpacket_stats = unsafe { zeroed() };
        let mut length = size_of::<libc::tpacket_stats>() as u32;
        let (fd, to) = (self.0.as_raw_fd(), (&raw mut statistics).cast());
        // SAFETY: the buffer lives across the call, and its size is given.
        let got = unsafe { libc::getsockopt(fd, libc::SOL_PACKET, libc::PACKET_STATISTICS, to, &mut length) };
        assert_eq!(got, 0, "{}", io::Error::last_os_error());
        u64::from(statistics.tp_packets)
    }

    /// Counts frames until there are this many, or none arrived for half a second.
    pub(crate) fn count(&self, wanted: u64) -> u64 {
        let (mut total, mut last) = (0, Instant::now());
        while total < wanted && last.elapsed() < Duration::from_millis(500) {
            let arrived = self.arrived();
            if arrived > 0 {
                (total, last) = (total + arrived, Instant::now());
            }
            thread::sleep(Duration::from_millis(2));
        }
        total
    }
}

/// An IPv4 UDP frame of this length (at least 42) whose payload starts with a number.
pub(crate) fn frame(number: u32, length: usize) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0];
    frame.extend([0x45, 0]);
    frame.extend(((length - 14) as u16).to_be_bytes());
    frame.extend([0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    frame.extend([0, 1, 0, 2]);
    frame.extend(((length - 34) as u16).to_be_bytes());
    frame.extend([0, 0]);
    frame.extend(number.to_be_bytes());
    frame.resize(length.max(46), (number % 251) as u8);
    frame
}
