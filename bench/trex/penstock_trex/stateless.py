"""Trials with the stateless client: streams at a rate, counted by packet group."""

import ipaddress
import re

from . import library
from .failure import NO_SERVER, Failure, bad_input
from .search import Trial

# How long packets may take to arrive after the last one was sent.
STRAGGLERS = 0.5
MAC = re.compile(r'[0-9a-fA-F]{2}(:[0-9a-fA-F]{2}){5}')


class Port:
    """One of the server's ports: its address, and the gateway's address or MAC."""

    def __init__(self, text):
        match = re.fullmatch(r'(\d+)=([^,]+),(.+)', text)
        if not match:
            raise bad_input(f'--port {text}: not of the form NUMBER=ADDRESS,GATEWAY (the gateway by address or MAC)')
        self.number, self.address, self.gateway = int(match[1]), match[2], match[3]
        for address in [self.address] if MAC.fullmatch(self.gateway) else [self.address, self.gateway]:
            try:
                version = ipaddress.ip_address(address).version
            except ValueError as error:
                raise bad_input(f'--port {text}: {error}') from error
        if version == 6 and not MAC.fullmatch(self.gateway):
            raise bad_input(f'--port {text}: over IPv6 TRex cannot resolve a gateway: give its MAC')

    def set_up(self, client):
        """Gives the port its address and finds the gateway; the server answers to address resolution from then on."""
        if MAC.fullmatch(self.gateway):
            client.set_l2_mode(port=self.number, dst_mac=self.gateway)
            return
        client.set_service_mode(ports=[self.number], enabled=True)
        client.set_l3_mode(port=self.number, src_ipv4=self.address, dst_ipv4=self.gateway)
        client.set_service_mode(ports=[self.number], enabled=False)

    def as_json(self):
        return {'number': self.number, 'address': self.address, 'gateway': self.gateway}


def connect(api, make, server, ports):
    """A client that owns the ports."""
    client = make(server=server)
    try:
        client.connect()
    except api.TRexError as error:
        raise Failure(NO_SERVER, f'no TRex server at {server}: {error}') from error
    try:
        missing = {port.number for port in ports} - set(client.get_all_ports())
        if missing:
            raise bad_input(f'the server at {server} has no port {min(missing)}, but {client.get_all_ports()}')
        client.reset()
        for port in ports:
            port.set_up(client)
    except api.TRexError as error:
        client.disconnect()
        raise Failure(NO_SERVER, f'the ports cannot be set up: {error}') from error
    except Failure:
        client.disconnect()
        raise
    return client


class Stateless:
    """One profile on the ports, ready for trials."""

    def __init__(self, api, client, ports, name, tunables, both):
        self.api, self.client = api, client
        self.senders = [port.number for port in (ports if both else ports[:1])]
        self.groups = {}
        client.remove_all_streams(ports=[port.number for port in ports])
        for direction, number in enumerate(self.senders):
            profile = api.STLProfile.load(str(library.profile_file('stl', name)), direction=direction, port_id=number,
                                          tunables=list(tunables))
            streams = profile.get_streams()
            client.add_streams(streams, ports=[number])
            self.groups.update({stream.get_pg_id(): stream.get_name() for stream in streams})

    def trial(self, rate, seconds):
        """Sends this many packets per second in total and counts them."""
        stats = self.run(rate, seconds)
        counts = {kind: [0, 0] for kind in ('allowed', 'denied', 'latency')}
        for group, name in self.groups.items():
            flow = stats['flow_stats'].get(group, {})
            count = counts[re.match('[a-z]+', name)[0]]
            count[0] += int(flow.get('tx_pkts', {}).get('total', 0))
            count[1] += int(flow.get('rx_pkts', {}).get('total', 0))
        world = stats['global']
        details = {'queue_full': world['queue_full'], 'cpu_percent': world['cpu_util'],
                   'receive_cpu_percent': world['rx_cpu_util'],
                   'latency_sent': counts['latency'][0], 'latency_received': counts['latency'][1]}
        return Trial(rate, seconds, *counts['allowed'], *counts['denied'], details)

    def latencies(self, rate, seconds):
        """The latency statistics of the streams, with the rate."""
        stats = self.run(rate, seconds)
        found = []
        for group, name in self.groups.items():
            if not name.startswith('latency') or group not in stats['latency']:
                continue
            entry, flow = stats['latency'][group], stats['flow_stats'].get(group, {})
            errors, times = entry['err_cntrs'], entry['latency']
            found.append({
                'stream': name,
                'sent': flow.get('tx_pkts', {}).get('total', 0), 'received': flow.get('rx_pkts', {}).get('total', 0),
                'dropped': errors['dropped'], 'out_of_order': errors['out_of_order'], 'duplicates': errors['dup'],
                'least_us': times['total_min'], 'average_us': times['average'], 'most_us': times['total_max'],
                'jitter_us': times['jitter'],
                'histogram_us': {str(start): count for start, count in sorted(times['histogram'].items())},
            })
        return found

    def run(self, rate, seconds):
        self.client.clear_stats()
        # The rate is divided between the senders.
        self.client.start(ports=self.senders, mult=f'{rate:.0f}pps', duration=seconds, total=True, force=True)
        self.client.wait_on_traffic(ports=self.senders, timeout=seconds + 60, rx_delay_ms=int(STRAGGLERS * 1000))
        return self.client.get_stats()
