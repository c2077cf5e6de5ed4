//! Tells a service manager that the daemon is ready, by the protocol of sd_notify(3): a datagram to the socket that it names.

use std::env;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;

/// Where the service manager listens, if it wants to know.
const VARIABLE: &str = "NOTIFY_SOCKET";

/// Whoever has started the daemon, until it has been told.
pub(super) struct ServiceManager {
    socket: Option<OsString>,
}

impl ServiceManager {
    pub(super) fn of_environment() -> Self {
        Self { socket: env::var_os(VARIABLE).filter(|socket| !socket.is_empty()) }
    }

    /// Says, once, that policy is in effect: what is ordered after the daemon may start.
    pub(super) fn tell_ready(&mut self) {
        let Some(socket) = self.socket.take() else { return };
        if let Err(error) = send(&socket, b"READY=1") {
            tracing::warn!(
                "{VARIABLE} = {}: cannot say there that policy is in effect ({error}): the service manager will take the start for failed; \
                 let it name a socket that this service can reach",
                socket.display()
            );
        }
    }
}

/// Sends without waiting: nothing else is done on this thread meanwhile.
fn send(socket: &OsStr, message: &[u8]) -> io::Result<()> {
    let address = match socket.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(Path::new(socket))?,
    };
    let datagram = UnixDatagram::unbound()?;
    datagram.set_nonblocking(true)?;
    datagram.send_to_addr(message, &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_reaches_sockets_with_a_path_and_abstract_ones() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let name = format!("penstock-service-manager-{}", std::process::id());
        let sockets = [
            (path.clone().into_os_string(), UnixDatagram::bind(&path).unwrap()),
            (format!("@{name}").into(), {
                UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap()
            }),
        ];
        for (named, listener) in sockets {
            send(&named, b"READY=1").unwrap();
            let mut message = [0; 16];
            let length = listener.recv(&mut message).unwrap();
            assert_eq!(&message[..length], b"READY=1", "{}", named.display());
        }
        assert!(send(OsStr::new("/nothing/is/here"), b"READY=1").is_err());
    }
}
