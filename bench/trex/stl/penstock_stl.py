"""What the stateless profiles share: their tunables, and a stream for a flow between two addresses.

A stream's name says what must become of it: `allowed…` and `latency…` must arrive, `denied…` must not. The runner counts by
that. Sizes are of whole frames, check sequence included, as in RFC 2544: 64 is the shortest.
"""

import argparse
import ipaddress

from trex.stl.api import (
    Ether, IP, IPv6, STLFlowLatencyStats, STLFlowStats, STLPktBuilder, STLStream, STLTXCont, STLVM, UDP,
)

CHECK_SEQUENCE = 4
# The shortest frame that has room for a UDP header, by IP version.
SHORTEST = {4: 64, 6: 66}
# The shortest frame that also has room for what a latency stream writes at the end: number, time stamp, magic.
SHORTEST_LATENCY = 96
# Packet groups of one port; the server counts a group, whichever port its packets come back to.
GROUPS_A_PORT = 100
# The flow's number takes 15 of the source port's 16 bits; the highest bit stays set, so that no flow has a low port.
SOURCE_PORT_BITS = 15
MOST_FLOWS = 1 << 20


class Tunables(argparse.ArgumentParser):
    """Tunables of a profile. Those for the ends of the flow are the same in all profiles."""

    def __init__(self, profile):
        # No abbreviations: the runner finds a profile's tunables by their names.
        super().__init__(prog=profile.__name__, description=profile.__doc__, allow_abbrev=False,
                         formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        self.add_argument('--src', default='10.244.1.10', help='address of port 0: a pod, or a machine outside')
        self.add_argument('--dst', default='10.244.1.11', help='address of port 1: a pod')
        self.add_argument('--sport', type=port, default=32768, help='source port of the first flow')
        self.add_argument('--dport', type=port, default=8080, help='destination port of the first flow')

    def with_size(self):
        self.add_argument('--size', type=int, default=64, help='bytes of a frame, check sequence included')
        return self

    def with_flows(self, default):
        self.add_argument('--flows', type=flows, default=default, help='how many connections')
        return self

    def with_latency(self):
        self.add_argument('--latency-pps', type=int, default=0,
                          help='packets a second of a latency stream beside the others, whatever the rate; 0: none')
        return self


def port(text):
    number = int(text)
    if not 0 < number < 65536:
        raise argparse.ArgumentTypeError(f'{text} is no port: 1 to 65535')
    return number


def flows(text):
    number = int(text)
    if not 0 < number <= MOST_FLOWS:
        raise argparse.ArgumentTypeError(f'{text} flows: 1 to {MOST_FLOWS}')
    return number


def share(text):
    number = float(text)
    if not 0 < number < 1:
        raise argparse.ArgumentTypeError(f'{text} is no share: between 0 and 1')
    return number


class Ends:
    """Both ends of a flow in one direction: port 1 sends the replies to what port 0 sends."""

    def __init__(self, args, direction):
        self.src, self.dst = ipaddress.ip_address(args.src), ipaddress.ip_address(args.dst)
        if self.src.version != self.dst.version:
            raise ValueError(f'--src {args.src} and --dst {args.dst} are of two families')
        self.sport, self.dport = args.sport, args.dport
        self.forward = direction % 2 == 0

    def headers(self, offset=0, dport=None):
        """Ethernet, IP and UDP of the flow whose source port is `offset` above the first."""
        near = self.sport + offset
        far = self.dport if dport is None else dport
        if near > 65535:
            raise ValueError(f'source port {near}: lower --sport')
        src, dst = (self.src, self.dst) if self.forward else (self.dst, self.src)
        sport, dport = (near, far) if self.forward else (far, near)
        network = (IP if src.version == 4 else IPv6)(src=str(src), dst=str(dst))
        # Without a checksum: the server writes into the payload of latency packets, which would make it wrong.
        return Ether() / network / UDP(sport=sport, dport=dport, chksum=0)


def padded(headers, size):
    """Pads the packet to the length of the frame."""
    room = size - CHECK_SEQUENCE - len(headers)
    if room < 0:
        raise ValueError(f'a frame of {size} bytes is too short: at least {len(headers) + CHECK_SEQUENCE}')
    return headers / ('x' * room)


def varied(ends, flows):
    """Rotates through `flows` connections: 15 bits of the number go into the source port, the rest into the other one."""
    if flows == 1:
        return None
    near, far = ('UDP.sport', 'UDP.dport') if ends.forward else ('UDP.dport', 'UDP.sport')
    vm = STLVM()
    vm.var(name='flow', min_value=0, max_value=flows - 1, size=4, op='inc')
    vm.write_mask(fv_name='flow', pkt_offset=near, pkt_cast_size=2, mask=(1 << SOURCE_PORT_BITS) - 1)
    ports = (flows - 1 >> SOURCE_PORT_BITS) + 1
    if ports > 1:
        bits = (ports - 1).bit_length()
        vm.write_mask(fv_name='flow', pkt_offset=far, pkt_cast_size=2, mask=(1 << bits) - 1, shift=-SOURCE_PORT_BITS)
    return vm


def aligned(args):
    """Rejects ports whose low bits the flow's number would overwrite."""
    ports = (args.flows - 1 >> SOURCE_PORT_BITS) + 1
    if args.flows > 1 and args.sport != 1 << SOURCE_PORT_BITS:
        raise ValueError(f'--sport {args.sport}: with more than one flow it is {1 << SOURCE_PORT_BITS}')
    bits = (ports - 1).bit_length()
    if args.dport & ((1 << bits) - 1):
        raise ValueError(f'--dport {args.dport}: {args.flows} flows need {ports} ports from a multiple of {1 << bits}')


def stream(name, packet, group, pps=1.0, vm=None):
    """A stream whose rate the runner multiplies; packets are counted by group."""
    return STLStream(name=name, packet=STLPktBuilder(pkt=packet, vm=vm), mode=STLTXCont(pps=pps),
                     flow_stats=STLFlowStats(pg_id=group))


def latency_stream(name, headers, size, group, pps):
    """A latency stream: its packets carry number and time stamp; its rate is never multiplied."""
    packet = padded(headers, max(size, SHORTEST_LATENCY))
    return STLStream(name=name, packet=STLPktBuilder(pkt=packet), mode=STLTXCont(pps=float(pps)),
                     flow_stats=STLFlowLatencyStats(pg_id=group))


class Groups:
    """Allocates the numbers of packet groups."""

    def __init__(self, port_id):
        self.following = port_id * GROUPS_A_PORT
        self.end = self.following + GROUPS_A_PORT

    def take(self):
        self.following += 1
        if self.following >= self.end:
            raise ValueError(f'more than {GROUPS_A_PORT - 1} streams on one port')
        return self.following
