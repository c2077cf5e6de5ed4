//! The way past the node's stack between pods and other machines: what keeps packets from it.

use std::io;

use super::TcxPrograms;

/// The reason that keeps the packets that come in by an interface to the node's stack: `enum kept_by` in `src/bpf/kernel_network.h`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum KeptBy {
    /// The setting, or workers that all packets go through.
    Setting,
    /// The kernel gives programs no record of its packets.
    Kernel,
    /// A netfilter hook for what the node forwards, or at the interface.
    Netfilter,
    /// An IPsec policy.
    Ipsec,
    /// A program or filter of somebody else on the interface.
    Filters,
    /// A bridge, a bond, a macvlan or a VRF that the interface belongs to.
    Controller,
    /// A setting of the kernel's.
    Sysctl,
    /// The interface has no Ethernet header.
    Header,
    /// The programs are filters, not tcx links.
    NoTcx,
    /// Something that this version does not know.
    Other,
}

impl KeptBy {
    /// It in words.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Setting => "host_routing",
            Self::Kernel => "the kernel's types",
            Self::Netfilter => "netfilter hooks",
            Self::Ipsec => "IPsec policies",
            Self::Filters => "others' programs or filters on the interface",
            Self::Controller => "the bridge, bond, macvlan or VRF of the interface",
            Self::Sysctl => "settings of the kernel",
            Self::Header => "an interface without Ethernet header",
            Self::NoTcx => "a kernel before Linux 6.6",
            Self::Other => "something unknown",
        }
    }

    fn of(answer: u32) -> Option<Self> {
        Some(match answer {
            0 => return None,
            1 => Self::Setting,
            2 => Self::Kernel,
            3 => Self::Netfilter,
            4 => Self::Ipsec,
            5 => Self::Filters,
            6 => Self::Controller,
            7 => Self::Sysctl,
            _ => Self::Other,
        })
    }
}

impl TcxPrograms {
    /// The reason that keeps packets of this family that come in by this interface, in the calling thread's network namespace, to the node's stack at this
    /// moment; `None`: nothing. Each packet is asked about by itself, and may be kept for a reason of its own.
    pub fn kept_by(&self, interface: u32, v6: bool) -> io::Result<Option<KeptBy>> {
        if self.filter_watch().is_some() {
            return Ok(Some(KeptBy::NoTcx));
        }
        let mut frame = [0; 54];
        frame[12..14].copy_from_slice(&if v6 { [0x86, 0xdd] } else { [0x08, 0x00] });
        let tried = self.try_program(&self.what_keeps, interface, 0, &frame, 0)?;
        Ok(KeptBy::of(tried.action))
    }
}
