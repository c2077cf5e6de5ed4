"""Trials with the stateless client: streams at a rate, counted by packet group."""

import ipaddress
import re
import time

from . import generator, histogram, library
from .failure import NO_SERVER, Failure, bad_input, interrupted
from .search import Trial

# How long packets may take to arrive after the last one was sent.
STRAGGLERS = 0.5
# TRex's receiving CPU is read when this share of a trial is over: it has no history, and falls once the traffic ends.
LATE_IN_TRIAL = 0.9
# The latency streams, whose rate is fixed, are at most this share of what is sent.
LATENCY_SHARE = 0.5
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
        raise interrupted(error) or Failure(NO_SERVER, f'no TRex server at {server}: {error}') from error
    try:
        missing = {port.number for port in ports} - set(client.get_all_ports())
        if missing:
            raise bad_input(f'the server at {server} has no port {min(missing)}, but {client.get_all_ports()}')
        client.reset()
        for port in ports:
            port.set_up(client)
    except api.TRexError as error:
        client.disconnect()
        raise interrupted(error) or Failure(NO_SERVER, f'the ports cannot be set up: {error}') from error
    except Failure:
        client.disconnect()
        raise
    return client


class Stateless:
    """One profile on the ports, ready for trials."""

    def __init__(self, api, client, ports, name, tunables, both):
        self.api, self.client, self.ports = api, client, [port.number for port in ports]
        self.senders = self.ports if both else self.ports[:1]
        self.receivers = self.ports if both else self.ports[1:]
        self.file, self.tunables = str(library.profile_file('stl', name)), list(tunables)
        self.load()

    def load(self):
        """Puts the profile's streams on the ports; each has all its counters anew."""
        self.groups, self.fixed = {}, {}
        self.client.remove_all_streams(ports=self.ports)
        for direction, number in enumerate(self.senders):
            profile = self.api.STLProfile.load(self.file, direction=direction, port_id=number, tunables=list(self.tunables))
            streams = profile.get_streams()
            self.client.add_streams(streams, ports=[number])
            self.groups.update({stream.get_pg_id(): stream.get_name() for stream in streams})
            self.fixed[number] = [stream.to_json()['mode']['rate']['value'] for stream in streams
                                  if stream.get_name().startswith('latency')]

    @property
    def lowest(self):
        """The lowest rate with room for the latency streams, which it includes: TRex refuses one below theirs."""
        return max(map(sum, self.fixed.values())) * len(self.senders) / LATENCY_SHARE

    def fit(self, rate):
        """Slows the latency streams down until this rate has room for them. Returns the rate of each, 0 where there is no room."""
        fixed = max(self.fixed.values(), key=sum)
        if self.lowest <= rate:
            return max(fixed, default=0)
        each = int(rate * LATENCY_SHARE / len(self.senders) / len(fixed))
        # The last of a tunable counts.
        self.tunables += ['--latency-pps', str(each)]
        self.load()
        return each

    def trial(self, rate, seconds):
        """Sends this many packets per second in total and counts them."""
        stats, took, receiving = self.run(rate, seconds)
        counts = {kind: [0, 0] for kind in ('allowed', 'denied', 'latency')}
        for group, name in self.groups.items():
            flow = stats['flow_stats'].get(group, {})
            count = counts[re.match('[a-z]+', name)[0]]
            count[0] += int(flow.get('tx_pkts', {}).get('total', 0))
            count[1] += int(flow.get('rx_pkts', {}).get('total', 0))
        allowed, denied, latency = counts.values()
        details = {'queue_full': stats['global']['queue_full'], 'cpu_percent': generator.cpu_percent(self.client, took),
                   'receive_cpu_percent': receiving, 'latency_sent': latency[0], 'latency_received': latency[1]}
        # The rate includes the latency packets, which must arrive as well.
        return Trial(rate, seconds, allowed[0] + latency[0], allowed[1] + latency[1], *denied, took=took,
                     generator_lost=generator.lost(stats, self.senders, self.receivers), details=details)

    def latencies(self, rate, seconds):
        """The latency statistics of the streams at this rate, which has room for them; of the first trial since `load`."""
        stats, took, _ = self.run(rate, seconds)
        found = []
        for group, name in self.groups.items():
            if not name.startswith('latency') or group not in stats['latency']:
                continue
            entry, flow = stats['latency'][group], stats['flow_stats'].get(group, {})
            errors, times = entry['err_cntrs'], entry['latency']
            received = flow.get('rx_pkts', {}).get('total', 0)
            ranges = histogram.of_trial(times['histogram'], received)
            found.append({
                'stream': name, 'sent': flow.get('tx_pkts', {}).get('total', 0), 'received': received,
                'dropped': errors['dropped'], 'out_of_order': errors['out_of_order'], 'duplicates': errors['dup'],
                **histogram.figures(ranges), 'jitter_us': times['jitter'],
                'histogram_us': {str(start): count for start, count in ranges.items()},
                'not_in_histogram': max(received - sum(ranges.values()), 0),
            })
        return {'took_seconds': round(took, 3), 'generator_lost': generator.lost(stats, self.senders, self.receivers),
                'streams': found}

    def run(self, rate, seconds):
        """The statistics after a trial, how long its traffic took, and TRex's receiving CPU shortly before its end."""
        self.client.clear_stats()
        began = time.monotonic()
        # The rate is divided between the senders.
        self.client.start(ports=self.senders, mult=f'{rate:.0f}pps', duration=seconds, total=True, force=True)
        time.sleep(LATE_IN_TRIAL * seconds)
        receiving = self.client.get_stats()['global']['rx_cpu_util']
        try:
            self.client.wait_on_traffic(ports=self.senders, timeout=generator.patience(seconds),
                                        rx_delay_ms=int(STRAGGLERS * 1000))
            took = time.monotonic() - began - STRAGGLERS
        except self.api.TRexTimeoutError:
            # Far too slow: what it sent until now counts, and how long that took.
            took = time.monotonic() - began
            self.client.stop(ports=self.senders, rx_delay_ms=int(STRAGGLERS * 1000))
        return self.client.get_stats(), took, receiving
