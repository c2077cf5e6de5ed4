//! BPF programs as direct-action filters of a `clsact` qdisc: how programs are attached where the kernel has no tcx (before Linux 6.6).
//!
//! A filter has no owner. It stays until somebody deletes it or its qdisc, so it is found by its name and not by a pin, and its owner must
//! watch it ([`Events`]). Filters run by priority; of one priority the one that was added last runs first. A filter that returns
//! `TC_ACT_UNSPEC` passes the packet to the next one, any other action is final. So ours must be the first filter of its hook.

mod netlink;

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use netlink::{Message, Request, Socket, attributes};

/// All filters of Penstock have names that begin like this.
pub const PREFIX: &str = "penstock_";

/// Tests set this variable of the environment, so that programs are filters also where the kernel has tcx.
const FORCED: &str = "FORCE_CLSACT";

/// Whether a test wants filters where the kernel has tcx.
pub fn are_forced() -> bool {
    std::env::var_os(FORCED).is_some()
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Hook {
    Ingress,
    Egress,
}

impl Hook {
    /// `TC_H_MAKE(TC_H_CLSACT, TC_H_MIN_INGRESS)` or `TC_H_MIN_EGRESS` (include/uapi/linux/pkt_sched.h).
    const fn parent(self) -> u32 {
        match self {
            Self::Ingress => 0xffff_fff2,
            Self::Egress => 0xffff_fff3,
        }
    }
}

/// A filter, or what a classifier other than BPF has at a priority.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Filter {
    /// `bpf`, `u32`, `flower` and so on.
    pub kind: String,
    /// Empty if it has none.
    pub name: String,
    /// Number and tag of a BPF program.
    pub program: u32,
    pub tag: [u8; 8],
    pub priority: u16,
    protocol: u16,
    handle: u32,
}

impl Filter {
    /// Whether a BPF filter for all protocols can have the same priority.
    fn can_be_joined(&self) -> bool {
        self.kind == BPF && self.protocol == ALL_PROTOCOLS
    }
}

/// What [`Filters::put`] found and did.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Put {
    /// Whether it changed anything.
    pub changed: bool,
    /// A filter of somebody else that runs before ours, since no BPF filter can be put before it.
    pub preceded_by: Option<Filter>,
}

/// Reads and changes the filters of the network namespace of the thread that opened it.
#[derive(Debug)]
pub struct Filters(Socket);

impl Filters {
    pub fn open() -> io::Result<Self> {
        Ok(Self(Socket::open(0)?))
    }

    /// Puts the program before all other filters of the hook, in place of a filter with this name. Makes the qdisc if it is missing. An
    /// `ingress` qdisc, which has no egress hook, is replaced; its filters stay, behind this one.
    ///
    /// `id`: the program's, with which a filter that is in place stays as it is.
    ///
    /// # Errors
    /// `ENODEV` if the interface is gone; `Unsupported` if an `ingress` qdisc has filters of other kinds than `u32` and `matchall`.
    pub fn put(
        &self,
        interface: u32,
        hook: Hook,
        name: &str,
        program: BorrowedFd<'_>,
        id: Option<u32>,
    ) -> io::Result<Put> {
        let moved = self.make_clsact(interface)?;
        let found = self.list(interface, hook)?;
        let has_room = |priority: u16| found.iter().all(|it| it.priority != priority || it.can_be_joined());
        let priority = (1..u16::MAX).find(|&priority| has_room(priority)).ok_or(io::ErrorKind::StorageFull)?;
        let preceded_by = found.iter().find(|filter| filter.priority < priority).cloned();
        let own = found.iter().find(|filter| filter.name == name);
        let is_in_place = own.is_some_and(|own| own.priority == priority) && !is_behind_others(&found, name, priority);
        if is_in_place && own.map(|own| own.program) == id {
            return Ok(Put { changed: false, preceded_by });
        }
        // One that is out of place goes when the new one is there.
        let is_free = |handle: &u32| found.iter().all(|it| it.priority != priority || it.handle != *handle);
        let handle = match own {
            Some(own) if is_in_place => own.handle,
            _ => (HANDLE..).find(is_free).unwrap_or(HANDLE),
        };
        let flags = if is_in_place { NLM_F_CREATE } else { NLM_F_CREATE | NLM_F_EXCL };
        let info = u32::from(priority) << 16 | u32::from(ALL_PROTOCOLS);
        let descriptor = program.as_raw_fd();
        self.0.call(
            &Request::new(RTM_NEWTFILTER, flags, interface, handle, hook.parent(), info)
                .attribute(TCA_KIND, b"bpf\0")
                .nested(TCA_OPTIONS, |options| {
                    options
                        .attribute(TCA_BPF_FD, &descriptor.to_ne_bytes())
                        .attribute(TCA_BPF_NAME, &[name.as_bytes(), b"\0"].concat())
                        .attribute(TCA_BPF_FLAGS, &DIRECT_ACTION.to_ne_bytes())
                }),
        )?;
        if let Some(own) = own.filter(|_| !is_in_place) {
            self.delete(interface, hook, own)?;
        }
        // Behind ours, which decides from now on.
        moved.iter().try_for_each(|filter| self.0.call(filter).map(drop))?;
        Ok(Put { changed: true, preceded_by })
    }

    /// The filters of a hook in the order in which they run; none without a qdisc, or on a missing interface. An `ingress` qdisc shows its filters
    /// at both hooks.
    pub fn list(&self, interface: u32, hook: Hook) -> io::Result<Vec<Filter>> {
        let request = Request::new(RTM_GETTFILTER, NLM_F_DUMP, interface, 0, hook.parent(), 0);
        Ok(self.0.call(&request)?.iter().filter_map(filter).collect())
    }

    /// Deletes the filter with this name, and the qdisc if it has no other. Returns whether there was one.
    pub fn remove(&self, interface: u32, hook: Hook, name: &str) -> io::Result<bool> {
        let found = self.list(interface, hook)?;
        let own: Vec<_> = found.iter().filter(|filter| filter.name == name).collect();
        own.iter().try_for_each(|own| self.delete(interface, hook, own))?;
        let is_empty = |hook| self.list(interface, hook).is_ok_and(|filters| filters.is_empty());
        if !own.is_empty() && is_empty(Hook::Ingress) && is_empty(Hook::Egress) {
            // It may be gone already.
            let _ = self.0.call(&qdisc(RTM_DELQDISC, 0, interface, b"clsact\0"));
        }
        Ok(!own.is_empty())
    }

    /// All filters of Penstock, with their interfaces.
    pub fn all(&self) -> io::Result<Vec<(u32, Hook, Filter)>> {
        let mut all = Vec::new();
        for interface in Socket::interfaces()? {
            for hook in [Hook::Ingress, Hook::Egress] {
                let found = self.list(interface, hook).unwrap_or_default().into_iter();
                let own = found.filter(|filter| filter.name.starts_with(PREFIX));
                all.extend(own.map(|filter| (interface, hook, filter)));
            }
        }
        Ok(all)
    }

    /// Whether somebody else has filters: at ingress, at egress.
    pub fn have_others(&self, interface: u32) -> io::Result<[bool; 2]> {
        let at = |hook| {
            let found = self.list(interface, hook)?;
            Ok::<_, io::Error>(found.iter().any(|filter| !filter.name.starts_with(PREFIX)))
        };
        Ok([at(Hook::Ingress)?, at(Hook::Egress)?])
    }

    fn delete(&self, interface: u32, hook: Hook, filter: &Filter) -> io::Result<()> {
        let info = u32::from(filter.priority) << 16 | u32::from(filter.protocol);
        let request = Request::new(RTM_DELTFILTER, 0, interface, filter.handle, hook.parent(), info);
        match self.0.call(&request.attribute(TCA_KIND, b"bpf\0")) {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
            done => done.map(drop),
        }
    }

    /// The kind of an interface's `clsact` or `ingress` qdisc: both have the same place. Of all that there are, since the kernel tells everybody who
    /// listens about each question for one.
    fn qdisc(&self, interface: u32) -> io::Result<Option<String>> {
        let all = self.0.call(&Request::new(RTM_GETQDISC, NLM_F_DUMP, 0, 0, 0, 0))?;
        let mut found = all.iter().filter(|message| message.interface == interface && message.parent == CLSACT);
        Ok(found.find_map(|message| Some(text(message.attribute(TCA_KIND)?))))
    }

    /// Makes the qdisc unless it is there. Returns the filters of the `ingress` qdisc that it has replaced, as requests for the new one.
    fn make_clsact(&self, interface: u32) -> io::Result<Vec<Request>> {
        let make = || self.0.call(&qdisc(RTM_NEWQDISC, NLM_F_CREATE | NLM_F_EXCL, interface, b"clsact\0"));
        match make() {
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => {}
            done => return done.map(|_| Vec::new()),
        }
        if self.qdisc(interface)?.as_deref() != Some("ingress") {
            return Ok(Vec::new());
        }
        let filters = self.0.call(&Request::new(RTM_GETTFILTER, NLM_F_DUMP, interface, 0, CLSACT & 0xffff_0000, 0))?;
        let moved = filters.iter().filter_map(|filter| moved(interface, filter)).collect::<io::Result<_>>()?;
        self.0.call(&qdisc(RTM_DELQDISC, 0, interface, b"ingress\0"))?;
        make()?;
        Ok(moved)
    }
}

/// Whether a filter of somebody else runs before ours, at this priority or a later one.
pub fn is_behind_others(found: &[Filter], name: &str, priority: u16) -> bool {
    let before = found.iter().take_while(|filter| filter.name != name);
    before.filter(|filter| filter.priority >= priority).any(|filter| !filter.name.starts_with(PREFIX))
}

fn qdisc(kind: u16, flags: u16, interface: u32, name: &[u8]) -> Request {
    Request::new(kind, flags, interface, CLSACT & 0xffff_0000, CLSACT, 0).attribute(TCA_KIND, name)
}

/// A filter in an answer; `None` for what only stands for a priority of BPF filters, or is in a chain of its own.
fn filter(message: &Message) -> Option<Filter> {
    let kind = text(message.attribute(TCA_KIND)?);
    let chain = message.attribute(TCA_CHAIN).and_then(|chain| chain.try_into().ok()).map_or(0, u32::from_ne_bytes);
    if chain != 0 || (kind == BPF && message.handle == 0) {
        return None;
    }
    let options = if kind == BPF { message.attribute(TCA_OPTIONS)? } else { &[] };
    let option = |number| attributes(options).find(|(kind, _)| *kind == number).map(|(_, value)| value);
    Some(Filter {
        kind,
        name: option(TCA_BPF_NAME).map(text).unwrap_or_default(),
        program: option(TCA_BPF_ID).and_then(|id| id.try_into().ok()).map_or(0, u32::from_ne_bytes),
        tag: option(TCA_BPF_TAG).and_then(|tag| tag.try_into().ok()).unwrap_or_default(),
        priority: (message.info >> 16) as u16,
        protocol: message.info as u16,
        handle: message.handle,
    })
}

/// A request for a filter of an `ingress` qdisc at the ingress hook of a `clsact` qdisc; `None` for parts that the kernel makes by itself. Its
/// priority is larger by one, as ours has the first.
fn moved(interface: u32, filter: &Message) -> Option<io::Result<Request>> {
    /// Of `u32`'s handle, the key within a hash table.
    const U32_KEY: u32 = 0xfff;
    const SETTABLE_FLAGS: u32 = 0b1_0011;
    let kind = text(filter.attribute(TCA_KIND)?);
    let (flags_option, is_part) = match kind.as_str() {
        "u32" => (11, filter.handle & U32_KEY == 0),
        "matchall" => (3, filter.handle == 0),
        _ => {
            let message = format!("its ingress qdisc has a {kind} filter, which cannot be moved to a clsact qdisc");
            return Some(Err(io::Error::new(io::ErrorKind::Unsupported, message)));
        }
    };
    let options = filter.attribute(TCA_OPTIONS).filter(|_| !is_part)?;
    let info = (filter.info >> 16).saturating_add(1).min(0xffff) << 16 | filter.info & 0xffff;
    let mut request =
        Request::new(RTM_NEWTFILTER, NLM_F_CREATE | NLM_F_EXCL, interface, 0, Hook::Ingress.parent(), info)
            .attribute(TCA_KIND, &[kind.as_bytes(), b"\0"].concat());
    if let Some(chain) = filter.attribute(TCA_CHAIN) {
        request = request.attribute(TCA_CHAIN, chain);
    }
    Some(Ok(request.nested(TCA_OPTIONS, |to| {
        attributes(options).fold(to, |to, (number, value)| match <[u8; 4]>::try_from(value) {
            // The kernel adds what the hardware does, and refuses that from others.
            Ok(flags) if number == flags_option => {
                to.attribute(number, &(u32::from_ne_bytes(flags) & SETTABLE_FLAGS).to_ne_bytes())
            }
            _ => to.attribute(number, value),
        })
    })))
}

fn text(value: &[u8]) -> String {
    String::from_utf8_lossy(value.split(|&byte| byte == 0).next().unwrap_or_default()).into_owned()
}

/// The kernel's messages about qdiscs and filters, in the network namespace of the thread that opened it.
#[derive(Debug)]
pub struct Events(Socket);

impl Events {
    pub fn open() -> io::Result<Self> {
        const RTNLGRP_TC: u32 = 4;
        Ok(Self(Socket::open(1 << (RTNLGRP_TC - 1))?))
    }

    /// Waits for at most a second. Returns the interfaces whose qdiscs or filters have changed; `None`: messages were lost, so it may be any.
    pub fn next(&self) -> io::Result<Option<BTreeSet<u32>>> {
        match self.0.receive() {
            Ok(messages) => Ok(Some(messages.iter().map(|message| message.interface).collect())),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Some(BTreeSet::new())),
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Handles of our filters begin here; others rarely choose such numbers.
const HANDLE: u32 = 0x7065_6e00;
const BPF: &str = "bpf";
/// `ETH_P_ALL` in network order, as messages have it.
const ALL_PROTOCOLS: u16 = 3_u16.to_be();
/// `TC_H_CLSACT`.
const CLSACT: u32 = 0xffff_fff1;

// include/uapi/linux/rtnetlink.h, netlink.h and pkt_cls.h
const RTM_NEWQDISC: u16 = 36;
const RTM_DELQDISC: u16 = 37;
const RTM_GETQDISC: u16 = 38;
const RTM_NEWTFILTER: u16 = 44;
const RTM_DELTFILTER: u16 = 45;
const RTM_GETTFILTER: u16 = 46;
const NLM_F_DUMP: u16 = 0x300;
const NLM_F_EXCL: u16 = 0x200;
const NLM_F_CREATE: u16 = 0x400;
const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;
const TCA_CHAIN: u16 = 11;
const TCA_BPF_FD: u16 = 6;
const TCA_BPF_NAME: u16 = 7;
const TCA_BPF_FLAGS: u16 = 8;
const TCA_BPF_TAG: u16 = 10;
const TCA_BPF_ID: u16 = 11;
const DIRECT_ACTION: u32 = 1;
