//! Messages of rtnetlink about traffic control: `struct nlmsghdr`, `struct tcmsg`, attributes.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::sys::socket::sockopt::{RcvBuf, ReceiveTimeout};
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send, setsockopt, socket,
};
use nix::sys::time::{TimeVal, TimeValLike};

const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLM_F_REQUEST_ACK: u16 = 1 | 4;
const NLM_F_DUMP_INTR: u16 = 0x10;
const HEADER: usize = 16;
const TC_HEADER: usize = 20;

/// A message to the kernel.
#[derive(Clone, Debug)]
pub(crate) struct Request(Vec<u8>);

impl Request {
    pub(crate) fn new(kind: u16, flags: u16, interface: u32, handle: u32, parent: u32, info: u32) -> Self {
        let mut bytes = vec![0; 4];
        bytes.extend(kind.to_ne_bytes());
        bytes.extend((flags | NLM_F_REQUEST_ACK).to_ne_bytes());
        // Sequence and sender stay 0: each socket has one request at a time.
        bytes.resize(HEADER + 4, 0);
        [interface, handle, parent, info].iter().for_each(|word| bytes.extend(word.to_ne_bytes()));
        Self(bytes)
    }

    pub(crate) fn attribute(self, kind: u16, value: &[u8]) -> Self {
        self.nested(kind, |mut to| {
            to.0.extend(value);
            to
        })
    }

    pub(crate) fn nested(mut self, kind: u16, content: impl FnOnce(Self) -> Self) -> Self {
        let start = self.0.len();
        self.0.extend([0; 2]);
        self.0.extend(kind.to_ne_bytes());
        let mut after = content(self);
        let length = (after.0.len() - start) as u16;
        after.0[start..start + 2].copy_from_slice(&length.to_ne_bytes());
        after.0.resize(after.0.len().next_multiple_of(4), 0);
        after
    }
}

/// A message of the kernel.
#[derive(Debug)]
pub(crate) struct Message {
    kind: u16,
    flags: u16,
    pub(crate) interface: u32,
    pub(crate) handle: u32,
    pub(crate) parent: u32,
    pub(crate) info: u32,
    body: Vec<u8>,
}

impl Message {
    pub(crate) fn attribute(&self, kind: u16) -> Option<&[u8]> {
        attributes(self.body.get(TC_HEADER..)?).find(|(found, _)| *found == kind).map(|(_, value)| value)
    }

    /// The number of an error, 0 for an acknowledgement.
    fn error(&self) -> i32 {
        self.body.first_chunk().map_or(libc::EPROTO, |code| -i32::from_ne_bytes(*code))
    }

    /// The messages of a datagram.
    fn all(mut bytes: &[u8]) -> Vec<Self> {
        let mut all = Vec::new();
        while let Some((length, header)) =
            bytes.split_first_chunk().map(|(length, rest)| (u32::from_ne_bytes(*length), rest))
        {
            let Some(body) = bytes.get(HEADER..length as usize) else { break };
            let half = |at: usize| u16::from_ne_bytes([header[at], header[at + 1]]);
            let word = |at: usize| {
                body.get(at..at + 4).map_or(0, |word| u32::from_ne_bytes([word[0], word[1], word[2], word[3]]))
            };
            let (kind, flags) = (half(0), half(2));
            all.push(Self {
                kind,
                flags,
                interface: word(4),
                handle: word(8),
                parent: word(12),
                info: word(16),
                body: body.to_vec(),
            });
            bytes = bytes.get((length as usize).next_multiple_of(4)..).unwrap_or_default();
        }
        all
    }
}

/// Kind and value of each attribute.
pub(crate) fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    const KIND: u16 = 0x3fff;
    std::iter::from_fn(move || {
        let &[a, b, c, d] = bytes.first_chunk()?;
        let length = usize::from(u16::from_ne_bytes([a, b]));
        let value = bytes.get(4..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((u16::from_ne_bytes([c, d]) & KIND, value))
    })
}

#[derive(Debug)]
pub(crate) struct Socket(OwnedFd);

impl Socket {
    /// `groups`: bits of multicast groups; without any an answer is waited for.
    pub(crate) fn open(groups: u32) -> io::Result<Self> {
        const BUFFER: usize = 1 << 20;
        let socket = socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::NetlinkRoute)?;
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, groups))?;
        if groups != 0 {
            setsockopt(&socket, RcvBuf, &BUFFER)?;
            setsockopt(&socket, ReceiveTimeout, &TimeVal::seconds(1))?;
        }
        Ok(Self(socket))
    }

    /// Returns the kernel's answer.
    pub(crate) fn call(&self, request: &Request) -> io::Result<Vec<Message>> {
        const ATTEMPTS: u32 = 5;
        for _ in 0..ATTEMPTS {
            let found = self.call_once(request)?;
            // Something changed while the kernel listed it.
            if !found.iter().any(|message| message.flags & NLM_F_DUMP_INTR != 0) {
                return Ok(found);
            }
        }
        Err(io::ErrorKind::Interrupted.into())
    }

    fn call_once(&self, request: &Request) -> io::Result<Vec<Message>> {
        let mut bytes = request.0.clone();
        let length = bytes.len() as u32;
        bytes[..4].copy_from_slice(&length.to_ne_bytes());
        send(self.0.as_raw_fd(), &bytes, MsgFlags::empty())?;
        let mut found = Vec::new();
        loop {
            for message in self.receive()? {
                match message.kind {
                    NLMSG_DONE => return Ok(found),
                    NLMSG_ERROR if message.error() == 0 => return Ok(found),
                    NLMSG_ERROR => return Err(io::Error::from_raw_os_error(message.error())),
                    _ => found.push(message),
                }
            }
        }
    }

    pub(crate) fn receive(&self) -> io::Result<Vec<Message>> {
        // The kernel fills at most 32 KiB.
        let mut buffer = vec![0; 1 << 16];
        let length = recv(self.0.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
        Ok(Message::all(&buffer[..length]))
    }

    /// Indices of the interfaces of the calling thread's network namespace.
    pub(crate) fn interfaces() -> io::Result<Vec<u32>> {
        let named = nix::net::if_::if_nameindex()?;
        Ok(named.iter().map(|interface| interface.index()).collect())
    }
}
