//! Interface offloads, through the ethtool(8) ioctl.

use std::os::fd::AsRawFd;

use anyhow::{Context, Result, ensure};

use super::namespace::Namespace;

/// An offload, by the command that sets it (linux/ethtool.h).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Offload {
    TxChecksum = 0x17,
    Tso = 0x1f,
    Gso = 0x24,
    Gro = 0x2c,
}

/// `struct ethtool_value`.
#[repr(C)]
struct Value {
    command: u32,
    data: u32,
}

impl Namespace {
    /// Turns an offload of an interface on or off.
    pub fn set_offload(&self, interface: &str, offload: Offload, on: bool) -> Result<()> {
        self.run(|| set(interface, offload, on))
            .with_context(|| format!("cannot set {offload:?} of {interface} in {}", self.name()))
    }
}

fn set(interface: &str, offload: Offload, on: bool) -> Result<()> {
    let socket = std::net::UdpSocket::bind("127.0.0.1:0")?;
    let mut value = Value { command: offload as u32, data: u32::from(on) };
    // SAFETY: all fields of the C struct are integers and pointers, for which zero is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    ensure!(interface.len() < request.ifr_name.len(), "the name is too long");
    for (to, from) in request.ifr_name.iter_mut().zip(interface.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_data = (&raw mut value).cast();
    // SAFETY: the request and the value that it points to outlive the call.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL as _, &raw mut request) };
    ensure!(result == 0, "{}", std::io::Error::last_os_error());
    Ok(())
}
