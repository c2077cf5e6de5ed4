"""Trials with the stateful client: TCP connections, counted by template group."""

import time

from . import library
from .search import Trial

# How long connections may take to end after the last one was opened.
GRACE = 5.0
# Counters of each side, by the names of the server.
COUNTERS = ['tcps_connattempt', 'tcps_accepts', 'tcps_connects', 'tcps_closed', 'tcps_drops', 'tcps_conndrops',
            'tcps_timeoutdrop', 'tcps_rexmttimeo', 'tcps_rexmttimeo_syn', 'tcps_sndrexmitpack', 'tcps_sndbyte',
            'tcps_rcvbyte', 'm_active_flows', 'm_est_flows']


class Stateful:
    """One profile, loaded again for each trial: the rate is one of its tunables."""

    def __init__(self, api, client, name, tunables):
        self.client, self.file, self.tunables = client, str(library.profile_file('astf', name)), list(tunables)
        # Reports wrong tunables before the first trial.
        profile = api.ASTFProfile.load(self.file, tunables=list(self.tunables))
        self.groups = list(profile.tg_name_to_id)

    def trial(self, rate, seconds):
        """Opens this many connections per second. One whose SYN was retransmitted counts as lost."""
        counts = self.run([*self.tunables, '--cps', f'{rate:.1f}'], seconds)
        allowed, denied = counts['allowed']['client'], counts.get('denied', {'client': {}, 'server': {}})
        attempts = allowed.get('tcps_connattempt', 0)
        established = allowed.get('tcps_connects', 0) - allowed.get('tcps_rexmttimeo_syn', 0)
        through = max(denied['client'].get('tcps_connects', 0), denied['server'].get('tcps_accepts', 0))
        trial = Trial(rate, seconds, attempts, max(established, 0), 0, through, {'counters': counts})
        trial.details['denied_attempts'] = denied['client'].get('tcps_connattempt', 0)
        return trial

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
            most = max(most, last['allowed']['client'].get('m_est_flows', 0))
            over = ended - began > seconds - 1
        self.finish(seconds + warm_up)

        def rate(side, counter):
            return (last['allowed'][side].get(counter, 0) - first['allowed'][side].get(counter, 0)) / (ended - began)
        return {'established_at_most': most,
                'connections_a_second': rate('client', 'tcps_connects'),
                'received_by_clients_bit_s': 8 * rate('client', 'tcps_rcvbyte'),
                'received_by_servers_bit_s': 8 * rate('server', 'tcps_rcvbyte'),
                'retransmitted_a_second': rate('client', 'tcps_sndrexmitpack') + rate('server', 'tcps_sndrexmitpack'),
                'counters': last}

    def run(self, tunables, seconds):
        self.start(tunables, seconds)
        self.finish(seconds)
        return self.counts()

    def start(self, tunables, seconds):
        self.client.clear_profile()
        self.client.load_profile(self.file, tunables={'tunables': tunables})
        self.client.clear_stats()
        self.client.start(mult=1, duration=seconds, t_duration=GRACE)

    def finish(self, seconds):
        self.client.wait_on_traffic(timeout=seconds + GRACE + 60)

    def counts(self):
        """Counters by template group and side."""
        stats = self.client.get_traffic_tg_stats(self.groups, skip_zero=True)
        return {group: {side: {name: stats[group][side].get(name, 0) for name in COUNTERS} for side in ('client', 'server')}
                for group in self.groups}
