"""As much of `trex.stl.api` as is used."""

import base64

from ..loading import TRexError, TRexTimeoutError, profile  # noqa: F401
from ..packets import IP, UDP, Ether, IPv6  # noqa: F401


class STLTXMode:
    def __init__(self, pps=None, bps_L1=None, bps_L2=None, percentage=None):
        self.pps = pps


class STLTXCont(STLTXMode):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)


class STLFlowStats:
    rule = 'stats'

    def __init__(self, pg_id, vxlan=False, ieee_1588=False):
        self.pg_id = pg_id


class STLFlowLatencyStats(STLFlowStats):
    rule = 'latency'

    def __init__(self, pg_id, vxlan=False, ieee_1588=False):
        super().__init__(pg_id)


class STLVM:
    def __init__(self):
        self.instructions = []

    def var(self, name, min_value, max_value, size, op, step=1, split_to_cores=True, next_var=None, **k):
        self.instructions.append({'type': 'flow_var', 'name': name, 'min_value': min_value, 'max_value': max_value,
                                  'size': size, 'op': op})

    def write_mask(self, fv_name, pkt_offset, pkt_cast_size, mask, shift=0, offset_fixup=0, add_val=0, byte_order='big'):
        self.instructions.append({'type': 'write_mask_flow_var', 'name': fv_name, 'pkt_offset': pkt_offset,
                                  'pkt_cast_size': pkt_cast_size, 'mask': mask, 'shift': shift})


class STLPktBuilder:
    def __init__(self, pkt=None, pkt_buffer=None, vm=None, path_relative_to_profile=False, build_raw=False,
                 remove_fcs=True):
        self.pkt, self.vm = pkt, vm

    def instructions(self):
        for instruction in self.vm.instructions if self.vm else []:
            if 'pkt_offset' in instruction:
                instruction = {**instruction, 'pkt_offset': self.pkt.offset(instruction['pkt_offset'])}
            yield instruction


class STLStream:
    def __init__(self, name=None, packet=None, mode=STLTXCont(pps=1), enabled=True, self_start=True, isg=0.0,
                 flow_stats=None, next=None, stream_id=None, action_count=0, random_seed=0, mac_src_override_by_pkt=None,
                 mac_dst_override_mode=None, dummy_stream=False, start_paused=False, core_id=-1):
        self.name, self.packet, self.mode, self.flow_stats = name, packet, mode, flow_stats

    def get_name(self):
        return self.name

    def get_pg_id(self):
        return self.flow_stats.pg_id

    def to_json(self):
        return {'mode': {'rate': {'type': 'pps', 'value': self.mode.pps}, 'type': 'continuous'},
                'packet': {'binary': base64.b64encode(bytes(self.packet.pkt)).decode()},
                'vm': {'instructions': list(self.packet.instructions())},
                'flow_stats': {'rule_type': self.flow_stats.rule, 'stream_id': self.flow_stats.pg_id}}


class STLProfile:
    def __init__(self, streams=None):
        self.streams = streams

    def get_streams(self):
        return self.streams

    @staticmethod
    def load(filename, direction=0, port_id=0, **kwargs):
        return profile(filename, lambda made, **given: STLProfile(made.get_streams(**given)), direction=direction,
                       port_id=port_id, **kwargs)


class STLClient:
    """No server is ever there; the tests have clients of their own."""

    def __init__(self, username='', server='localhost', sync_port=4501, async_port=4500, verbose_level='error',
                 logger=None, sync_timeout=None, async_timeout=None):
        self.server = server

    def connect(self):
        raise TRexError(f'no server at {self.server}')

    def disconnect(self, stop_traffic=True, release_ports=True):
        pass

    def reset(self, ports=None, restart=False):
        raise NotImplementedError

    def get_all_ports(self):
        raise NotImplementedError

    def get_server_version(self):
        raise NotImplementedError

    def get_server_system_info(self):
        raise NotImplementedError

    def get_port_attr(self, port):
        raise NotImplementedError

    def get_util_stats(self):
        raise NotImplementedError

    def set_l2_mode(self, port, dst_mac):
        raise NotImplementedError

    def set_l3_mode(self, port, src_ipv4, dst_ipv4, vlan=None):
        raise NotImplementedError

    def set_service_mode(self, ports=None, enabled=True, filtered=False, mask=None):
        raise NotImplementedError

    def add_streams(self, streams, ports=None):
        raise NotImplementedError

    def remove_all_streams(self, ports=None):
        raise NotImplementedError

    def clear_stats(self, ports=None, clear_global=True, clear_flow_stats=True, clear_latency_stats=True,
                    clear_xstats=True):
        raise NotImplementedError

    def get_stats(self, ports=None, sync_now=True):
        raise NotImplementedError

    def start(self, ports=None, mult='1', force=False, duration=-1, total=False, core_mask=None, synchronized=False):
        raise NotImplementedError

    def stop(self, ports=None, rx_delay_ms=None):
        raise NotImplementedError

    def wait_on_traffic(self, ports=None, timeout=None, rx_delay_ms=None):
        raise NotImplementedError
