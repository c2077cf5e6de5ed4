//! Who has the other end of a connection from this machine, as the kernel's socket diagnostics tell it (`sock_diag(7)`).

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};

use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket};
use tokio::net::TcpStream;

/// `include/uapi/linux/sock_diag.h`
const SOCK_DIAG_BY_FAMILY: u16 = 20;
/// `include/uapi/linux/netlink.h`
const NLM_F_REQUEST: u16 = 1;
/// `struct nlmsghdr` and `struct inet_diag_req_v2`
const REQUEST: usize = 16 + 56;
/// The places of `idiag_state` and `idiag_uid` in an answer: `struct nlmsghdr`, then `struct inet_diag_msg`.
const STATE: usize = 16 + 1;
const UID: usize = 16 + 64;
/// `include/net/tcp_states.h`
const TCP_ESTABLISHED: u8 = 1;
/// `INET_DIAG_NOCOOKIE`: of any age.
const NO_COOKIE: [u8; 8] = [0xff; 8];

/// Asks for owners of sockets.
pub(super) struct SocketOwners(Option<OwnedFd>);

impl SocketOwners {
    pub(super) fn open() -> Self {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        Self(socket(AddressFamily::Netlink, SockType::Datagram, flags, SockProtocol::NetlinkSockDiag).ok())
    }

    /// The user who has the client's socket; `None` if it is on another machine or in another network namespace, closed, or the
    /// kernel does not tell.
    pub(super) fn client_of(&self, stream: &TcpStream) -> Option<u32> {
        let diagnostics = self.0.as_ref()?.as_raw_fd();
        let request = request(stream.peer_addr().ok()?, stream.local_addr().ok()?);
        send(diagnostics, &request, MsgFlags::empty()).ok()?;
        let mut answer = [0; 512];
        // It is there when the request has been sent.
        let length = recv(diagnostics, &mut answer, MsgFlags::MSG_DONTWAIT).ok()?;
        let kind = u16::from_ne_bytes([answer[4], answer[5]]);
        // A socket that is being closed has no owner, which reads as root.
        let is_open = length >= UID + 4 && kind == SOCK_DIAG_BY_FAMILY && answer[STATE] == TCP_ESTABLISHED;
        is_open.then(|| u32::from_ne_bytes([answer[UID], answer[UID + 1], answer[UID + 2], answer[UID + 3]]))
    }
}

/// Asks for the TCP socket with these ends, the first its own.
fn request(own: SocketAddr, other: SocketAddr) -> [u8; REQUEST] {
    let family = if own.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let protocol = SockProtocol::Tcp as i32;
    let mut message = Vec::with_capacity(REQUEST);
    message.extend((REQUEST as u32).to_ne_bytes());
    message.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    message.extend(NLM_F_REQUEST.to_ne_bytes());
    message.extend([0; 8]);
    message.extend([family as u8, protocol as u8, 0, 0]);
    message.extend(u32::MAX.to_ne_bytes());
    message.extend(own.port().to_be_bytes());
    message.extend(other.port().to_be_bytes());
    for address in [own.ip(), other.ip()] {
        let mut words = [0; 16];
        match address {
            IpAddr::V4(v4) => words[..4].copy_from_slice(&v4.octets()),
            IpAddr::V6(v6) => words.copy_from_slice(&v6.octets()),
        }
        message.extend(words);
    }
    // Any interface.
    message.extend([0; 4]);
    message.extend(NO_COOKIE);
    message.try_into().expect("it has the fields of the two structures")
}

#[cfg(test)]
mod tests {
    use nix::unistd::geteuid;
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn the_owner_of_an_open_client_is_known() {
        let owners = SocketOwners::open();
        for address in ["127.0.0.1:0", "[::1]:0", "[::]:0"] {
            // A machine may have no IPv6.
            let Ok(listener) = TcpListener::bind(address).await else { continue };
            let port = listener.local_addr().unwrap().port();
            for name in ["127.0.0.1", "::1"] {
                let Ok(client) = TcpStream::connect((name, port)).await else { continue };
                let (served, _) = listener.accept().await.unwrap();
                assert_eq!(owners.client_of(&served), Some(geteuid().as_raw()), "{name} at {address}");
                drop(client);
                assert_eq!(owners.client_of(&served), None, "closed: {name} at {address}");
            }
        }
    }
}
