//! The maps of the loaded programs.

use std::os::fd::AsFd;

use libbpf_rs::MapHandle;

use super::{ConnectionMaps, TcxOptions, skeleton};

/// The maps that the daemon reads or writes.
#[derive(Debug)]
pub(super) struct Maps {
    pub(super) interfaces: MapHandle,
    pub(super) targets: MapHandle,
    pub(super) own_addresses: MapHandle,
    pub(super) outcomes: MapHandle,
    pub(super) pod_addresses: MapHandle,
    pub(super) uplinks: MapHandle,
    pub(super) uplink_interfaces: MapHandle,
    pub(super) tunnel_ports: MapHandle,
    pub(super) remote_networks: MapHandle,
    pub(super) refused_tunnels: MapHandle,
    pub(super) allowed_to_leave: MapHandle,
    pub(super) offloaded: MapHandle,
    pub(super) offloaded_ports: MapHandle,
    /// The programs' variables: `pairs` in `src/bpf/tcx_maps.h`.
    pub(super) pairs: MapHandle,
}

impl Maps {
    pub(super) fn of(maps: &skeleton::TcxMaps<'_>) -> libbpf_rs::Result<Self> {
        Ok(Self {
            interfaces: MapHandle::try_from(&*maps.interfaces)?,
            targets: MapHandle::try_from(&*maps.targets)?,
            own_addresses: MapHandle::try_from(&*maps.own_addresses)?,
            outcomes: MapHandle::try_from(&*maps.outcomes)?,
            pod_addresses: MapHandle::try_from(&*maps.pod_addresses)?,
            uplinks: MapHandle::try_from(&*maps.uplinks)?,
            uplink_interfaces: MapHandle::try_from(&*maps.uplink_interfaces)?,
            tunnel_ports: MapHandle::try_from(&*maps.tunnel_ports)?,
            remote_networks: MapHandle::try_from(&*maps.remote_networks)?,
            refused_tunnels: MapHandle::try_from(&*maps.refused_tunnels)?,
            allowed_to_leave: MapHandle::try_from(&*maps.allowed_to_leave)?,
            offloaded: MapHandle::try_from(&*maps.offloaded)?,
            offloaded_ports: MapHandle::try_from(&*maps.offloaded_ports)?,
            pairs: MapHandle::try_from(&*maps.bss)?,
        })
    }
}

/// Has the programs use the maps that they share with workers and with other programs, in place of their own.
pub(super) fn share_maps(
    maps: &mut skeleton::OpenTcxMaps<'_>,
    options: &TcxOptions,
    connections: Option<&ConnectionMaps>,
) -> libbpf_rs::Result<()> {
    if let Some(connections) = connections {
        let [table, tags, entries, uses] = connections.handles();
        maps.ct_table.reuse_fd(table.as_fd())?;
        maps.ct_tags.reuse_fd(tags.as_fd())?;
        maps.ct_entries.reuse_fd(entries.as_fd())?;
        maps.ct_uses.reuse_fd(uses.as_fd())?;
    }
    if let Some((waiting, _)) = &options.waiting {
        maps.waiting.reuse_fd(waiting.0.as_fd())?;
    }
    if let Some(sources) = &options.sources {
        maps.sources.reuse_fd(sources.map().as_fd())?;
    }
    if let Some(services) = &options.services {
        maps.service_addresses.reuse_fd(services.map().as_fd())?;
    }
    Ok(())
}
