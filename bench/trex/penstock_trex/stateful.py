"""Trials with the stateful client: TCP connections, counted by template group."""

import time

from . import generator, library
from .search import OVERHEAD, SHORT_OF, Trial

# How long connections may take to end after the last one was opened.
GRACE = 5.0
# Counters of each side, by the names of the server.
COUNTERS = ['tcps_connattempt', 'tcps_accepts', 'tcps_connects', 'tcps_closed', 'tcps_drops', 'tcps_conndrops',
            'tcps_timeoutdrop', 'tcps_rexmttimeo', 'tcps_rexmttimeo_syn', 'tcps_sndrexmitpack', 'tcps_sndbyte',
            'tcps_rcvbyte', 'm_active_flows', 'm_est_flows']


class Stateful:
    """One profile, loaded again for each trial: the rate is one of its tunables."""

    def __init__(self, api, client, ports, name, tunables):
        self.api, self.client, self.ports = api, client, [port.number for port in ports]
        self.file, self.tunables = str(library.profile_file('astf', name)), list(tunables)
        # Reports wrong tunables before the first trial.
        profile = api.ASTFProfile.load(self.file, tunables=list(self.tunables))
        self.groups = list(profile.tg_name_to_id)

    def trial(self, rate, seconds):
        """Opens this many connections per second. A SYN that was sent again tells of loss, and not of a lost connection."""
        self.start([*self.tunables, '--cps', f'{rate:.1f}'], seconds)
        time.sleep(seconds + OVERHEAD)
        in_time = self.counts()['allowed']['client']['tcps_connattempt']
        busy = generator.cpu_percent(self.client, seconds)
        self.finish(seconds)
        counts = self.counts()
        allowed, denied = counts['allowed']['client'], counts.get('denied', {'client': {}, 'server': {}})
        attempts, established = allowed['tcps_connattempt'], allowed['tcps_connects']
        through = max(denied['client'].get('tcps_connects', 0), denied['server'].get('tcps_accepts', 0))
        details = {'cpu_percent': busy, 'counters': counts, 'denied_attempts': denied['client'].get('tcps_connattempt', 0)}
        # The traffic ends when the last connection is closed. So what was not opened in time tells how long opening took.
        took = seconds if in_time >= SHORT_OF * attempts else seconds * attempts / max(in_time, 1)
        return Trial(rate, seconds, attempts, established, 0, through, took=took, generator_lost=self.lost(),
                     again=allowed['tcps_rexmttimeo_syn'], details=details)

    def sustained(self, seconds, warm_up):
        """Runs the profile without a rate and returns the throughput after the warm-up."""
        self.start(self.tunables, seconds + warm_up)
        time.sleep(warm_up)
        first, began = self.counts(), time.monotonic()
        most, over = 0, False
        while not over:
            # Read the counters before the end: connections are closed from then on.
            time.sleep(min(1, seconds / 3))
            last, ended = self.counts(), time.monotonic()
            most = max(most, last['allowed']['client']['m_est_flows'])
            over = ended - began > seconds - 1
        busy, lost = generator.cpu_percent(self.client, ended - began), self.lost()
        self.finish(seconds + warm_up)

        def rate(side, counter):
            return (last['allowed'][side][counter] - first['allowed'][side][counter]) / (ended - began)
        return {'established_at_most': most,
                'connections_a_second': rate('client', 'tcps_connects'),
                'received_by_clients_bit_s': 8 * rate('client', 'tcps_rcvbyte'),
                'received_by_servers_bit_s': 8 * rate('server', 'tcps_rcvbyte'),
                'retransmitted_a_second': rate('client', 'tcps_sndrexmitpack') + rate('server', 'tcps_sndrexmitpack'),
                'generator_lost': lost, 'cpu_percent': busy, 'counters': last}

    def start(self, tunables, seconds):
        self.client.clear_profile()
        self.client.load_profile(self.file, tunables={'tunables': tunables})
        self.client.clear_stats()
        self.client.start(mult=1, duration=seconds, t_duration=GRACE)

    def finish(self, seconds):
        try:
            self.client.wait_on_traffic(timeout=generator.patience(seconds + GRACE))
        except self.api.TRexTimeoutError:
            # Far too slow; the counters tell by how much.
            self.client.stop()

    def lost(self):
        """Packets that TRex itself lost; both ports send and receive."""
        return generator.lost(self.client.get_stats(), self.ports, self.ports)

    def counts(self):
        """Counters by template group and side."""
        stats = self.client.get_traffic_tg_stats(self.groups, skip_zero=True)
        return {group: {side: {name: stats[group][side].get(name, 0) for name in COUNTERS} for side in ('client', 'server')}
                for group in self.groups}
