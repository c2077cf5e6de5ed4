"""The runner from its command line to its document, with fake clients before a device of known capacity."""

import contextlib
import importlib.util
import io
import json
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from penstock_trex import generator, library
from penstock_trex.search import Trial

from . import FOLDER
from .using import api

spec = importlib.util.spec_from_file_location('run', FOLDER.parent / 'run.py')
run = importlib.util.module_from_spec(spec)
spec.loader.exec_module(run)

PORTS = ['--port', '0=10.244.1.10,10.244.1.1', '--port', '1=10.244.1.11,02:00:00:00:00:01']
QUICK = ['--short', '1', '--long', '2', '--repetitions', '3', '--lowest', '1000', '--highest', '200000']


class Clock:
    """A time that passes only where somebody waits."""

    def __init__(self):
        self.now = 1000.0

    def sleep(self, seconds):
        self.now += seconds

    def monotonic(self):
        return self.now


class Client:
    """Base of both fake clients; `calls` records the calls."""

    # What starting and ending a trial takes of its own.
    overhead = 0.018

    def __init__(self, module, clock, server):
        self.module, self.clock, self.server, self.calls = module, clock, server, []
        self.began = self.ends = clock.now

    def __getattr__(self, name):
        if name.startswith('_'):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))

    def get_all_ports(self):
        return [0, 1]

    def get_server_version(self):
        return {'version': 'v3.08', 'mode': 'STL'}

    def get_server_system_info(self):
        # As with TRex, without the speed.
        return {'hostname': 'generator', 'dp_core_count': 2, 'core_type': 'a core',
                'ports': [{'driver': 'net_af_packet', 'index': port} for port in (0, 1)]}

    def get_port_attr(self, port):
        return {'speed': 10.0, 'driver': 'net_af_packet'}

    def get_util_stats(self):
        """Of two cores, one idle: whole seconds, the newest first."""
        def busy(second):
            return 97 if self.began <= self.clock.now - second - 1 and self.clock.now - second - 1 < self.ends else 2
        return {'cpu': [{'ports': [0, 1], 'history': [busy(second) for second in range(20)]},
                        {'ports': [-1, -1], 'history': [1] * 20}], 'mbuf_stats': {}}

    def wait_on_traffic(self, ports=None, timeout=None, rx_delay_ms=0):
        if self.ends - self.clock.now > timeout:
            self.clock.now += timeout
            raise self.module.TRexTimeoutError(timeout)
        self.clock.now = max(self.clock.now, self.ends + rx_delay_ms / 1000)

    def stop(self, **kwargs):
        self.calls.append(('stop', (), kwargs))
        self.ends = min(self.ends, self.clock.now)


class StatelessClient(Client):
    """Before a device that passes allowed packets up to a capacity, and denied ones only if it leaks.

    `generator` is how fast TRex can send: all that it is asked to, only later. `ring` is how fast it can receive.
    """

    capacity, leak, flaw, generator, ring = 60_000, 0, 0.0, 1e9, 1e9

    def remove_all_streams(self, ports):
        self.calls.append(('remove_all_streams', (), {'ports': ports}))
        self.streams = []

    def add_streams(self, streams, ports):
        self.calls.append(('add_streams', (), {'ports': ports}))
        self.streams += streams

    def start(self, ports, mult, duration, total, force):
        assert mult.endswith('pps') and total and force
        self.rate, self.seconds = float(mult[:-3]), duration
        fixed = sum(self.fixed(stream) for stream in self.streams)
        if self.rate < fixed:
            raise self.module.TRexError(f"current stream configuration enforces a minimum rate of '{fixed}' pps")
        self.variable = (self.rate - fixed) / sum(self.weight(stream) for stream in self.streams)
        self.calls.append(('start', (), {'rate': self.rate, 'latency': fixed}))
        self.began = self.clock.now
        self.ends = self.began + self.overhead + duration * max(1, self.rate / self.generator)

    def get_stats(self):
        flow, latency, missed = {}, {'global': {}}, 0
        share = min(1.0, (self.clock.now - self.began) / (self.ends - self.began))
        speed = min(self.rate, self.generator)
        for stream in self.streams:
            name, group = stream.get_name(), stream.get_pg_id()
            sent = int(self.seconds * share * (self.fixed(stream) + self.weight(stream) * self.variable) + 1e-6)
            through = min(1.0, self.capacity / speed) * (1 - self.flaw)
            arrived = min(self.leak, sent) if name == 'denied' else int(sent * through + 1e-6)
            received = int(arrived * min(1.0, self.ring / speed) + 1e-6)
            missed += arrived - received
            flow[group] = {'tx_pkts': {'total': sent}, 'rx_pkts': {'total': received}}
            if name.startswith('latency'):
                # What TRex itself makes of it does not fit the histogram, as seen after `clear_stats`.
                latency[group] = {
                    'err_cntrs': {'dropped': 0, 'out_of_order': 0, 'dup': 0, 'seq_too_high': 0, 'seq_too_low': 0},
                    'latency': {'total_min': 5, 'average': 788.0, 'total_max': 496, 'jitter': 2,
                                'histogram': {900: 1, 10: received - 1}}}
        sending = self.clock.now < self.ends
        return {'flow_stats': flow, 'latency': latency,
                'global': {'queue_full': 0, 'cpu_util': 30.0, 'rx_cpu_util': 45.0 if sending else 1.0},
                0: {'ierrors': 1_000_000, 'oerrors': 0}, 1: {'ierrors': missed, 'oerrors': 1_000_000}}

    @staticmethod
    def weight(stream):
        return 0 if stream.get_name().startswith('latency') else stream.to_json()['mode']['rate']['value']

    @staticmethod
    def fixed(stream):
        return stream.to_json()['mode']['rate']['value'] if stream.get_name().startswith('latency') else 0


class StatefulClient(Client):
    """Establishes up to this many connections per second, and one in `again` only with its SYN sent again."""

    capacity, leak, byte_count, generator, again, missed = 5_000, 0, 0, 1e9, 0, 0

    def load_profile(self, profile, tunables):
        self.tunables = tunables['tunables']

    def start(self, mult, duration, t_duration):
        self.seconds, self.began = duration, self.clock.now
        cps = [float(value) for key, value in zip(self.tunables, self.tunables[1:]) if key == '--cps'] or [100.0]
        self.cps = cps[-1]
        self.opened = self.began + duration * max(1, self.cps / self.generator)
        self.ends = self.opened + t_duration / 2

    def get_stats(self):
        return {port: {'ierrors': self.missed, 'oerrors': 0} for port in (0, 1)}

    def get_traffic_tg_stats(self, groups, skip_zero):
        share = min(1.0, (self.clock.now - self.began) / (self.opened - self.began))
        attempts = int(self.cps * self.seconds * share)
        connects = min(attempts, int(self.capacity * self.seconds))
        self.byte_count += 1_000_000
        counts = {'allowed': {'client': {'tcps_connattempt': attempts, 'tcps_connects': connects, 'm_est_flows': 42,
                                         'tcps_rexmttimeo_syn': connects // self.again if self.again else 0,
                                         'tcps_rcvbyte': self.byte_count}, 'server': {'tcps_accepts': connects}},
                  'denied': {'client': {'tcps_connattempt': 50}, 'server': {'tcps_accepts': self.leak}}}
        return {group: counts[group] for group in groups}


class RunTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.output = Path(folder.name) / 'deep' / 'trex.json'

    def measured(self, mode, make, *words):
        """Exit code, document and output of a run with this client."""
        clients, module, clock = [], api(mode), Clock()

        def made(server):
            clients.append(make(module, clock, server))
            return clients[-1]
        said = io.StringIO()
        with mock.patch.object(module, 'STLClient' if mode == 'stl' else 'ASTFClient', made), \
                mock.patch.object(library, 'load', lambda *_: module), \
                mock.patch('time.sleep', clock.sleep), mock.patch('time.monotonic', clock.monotonic), \
                contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = run.main([mode, *PORTS, *QUICK, '--output', str(self.output), *words])
        self.client = clients[0] if clients else None
        return code, json.loads(self.output.read_text()) if self.output.exists() else None, said.getvalue()

    def test_rates_and_latencies_of_every_profile_are_written(self):
        code, document, said = self.measured('stl', StatelessClient)
        self.assertEqual(code, 0, said)
        self.assertEqual(document['format'], 1)
        entry = document['runs'][0]
        self.assertEqual((entry['mode'], entry['server']['version']['version'], entry['server']['cores']), ('stl', 'v3.08', 2))
        self.assertEqual([(port['driver'], port['speed']) for port in entry['ports']], [('net_af_packet', 10.0)] * 2)
        self.assertEqual([profile['profile'] for profile in entry['profiles']],
                         ['udp', 'imix', 'flows', 'flows', 'mix', 'pods'])
        for profile in entry['profiles']:
            with self.subTest(profile=profile['asked']):
                self.assertAlmostEqual(profile['ndr']['median'], 60_000, delta=1_200)
                self.assertGreater(profile['pdr']['median'], profile['ndr']['median'] * 0.999)
                self.assertEqual((len(profile['ndr']['repetitions']), profile['ndr']['limited_by']), (3, ['loss']))
                self.assertEqual([part['share_of_ndr'] for part in profile['latency']], [0.1, 0.5, 0.9])
                self.assertEqual(list(profile['latency'][0]['streams'][0]['histogram_us']), ['10', '900'])

    def test_ports_take_their_addresses_and_find_their_gateways(self):
        self.measured('stl', StatelessClient, '--profile', 'udp')
        asked = {name: kwargs for name, _, kwargs in self.client.calls}
        self.assertEqual(asked['set_l3_mode'], {'port': 0, 'src_ipv4': '10.244.1.10', 'dst_ipv4': '10.244.1.1'})
        self.assertEqual(asked['set_l2_mode'], {'port': 1, 'dst_mac': '02:00:00:00:00:01'})
        self.assertEqual(self.client.calls[-1][0], 'disconnect')

    def test_addresses_of_the_ports_are_the_profiles_unless_given(self):
        _, document, _ = self.measured('stl', StatelessClient, '--profile', 'udp --dst 10.9.9.9 --size 512')
        self.assertEqual(document['runs'][0]['profiles'][0]['tunables'],
                         ['--dst', '10.9.9.9', '--size', '512', '--src', '10.244.1.10'])

    def test_a_denied_packet_that_arrives_is_no_figure_but_an_error(self):
        leaking = type('Leaking', (StatelessClient,), {'leak': 3})
        code, document, said = self.measured('stl', leaking, '--profile', 'mix', '--profile', 'udp')
        self.assertEqual(code, 1)
        mix, udp = document['runs'][0]['profiles']
        self.assertIn('3 packets arrived that policy should deny', mix['error'])
        self.assertNotIn('ndr', mix)
        self.assertIn('ndr', udp)
        self.assertIn('not measured', said)

    def test_loss_at_leisure_is_no_figure_but_an_error(self):
        broken = type('Broken', (StatelessClient,), {'flaw': 1.0})
        code, document, _ = self.measured('stl', broken, '--profile', 'udp')
        self.assertEqual(code, 1)
        self.assertIn('does the policy allow them', document['runs'][0]['profiles'][0]['error'])

    def trials(self, found):
        return [trial for search in found['trials'] for trial in search]

    def test_a_trial_that_is_sent_late_is_the_generators_limit(self):
        slow = type('Slow', (StatelessClient,), {'capacity': 1e9, 'generator': 20_000})
        code, document, said = self.measured('stl', slow, '--profile', 'udp', '--short', '2', '--long', '4')
        self.assertEqual(code, 0, said)
        ndr = document['runs'][0]['profiles'][0]['ndr']
        self.assertEqual(ndr['limited_by'], ['generator'])
        self.assertAlmostEqual(ndr['median'], 20_000, delta=600)
        first = self.trials(ndr)[0]
        self.assertEqual((first['seconds'], first['sent'], first['received'], first['generator_short']),
                         (2, 400_000, 400_000, True), 'all of it, ten times later')
        self.assertAlmostEqual(first['took_seconds'], 20, delta=0.1)
        self.assertFalse(self.trials(ndr)[-1]['lost'])

    def test_starting_and_ending_a_trial_is_not_late(self):
        _, document, _ = self.measured('stl', StatelessClient, '--profile', 'udp')
        trials = self.trials(document['runs'][0]['profiles'][0]['ndr'])
        self.assertEqual({trial['generator_short'] for trial in trials}, {False})
        self.assertEqual({round(trial['took_seconds'] - trial['seconds'], 3) for trial in trials}, {0.018})

    def test_a_trial_that_would_take_for_ever_is_stopped_and_the_search_goes_on(self):
        slow = type('Slow', (StatelessClient,), {'capacity': 1e9, 'generator': 20_000})
        code, document, said = self.measured('stl', slow, '--profile', 'udp', '--highest', '5000000', '--repetitions', '1')
        self.assertEqual(code, 0, said)
        ndr = document['runs'][0]['profiles'][0]['ndr']
        self.assertAlmostEqual(ndr['median'], 20_000, delta=600)
        first = self.trials(ndr)[0]
        self.assertEqual((first['offered'], first['generator_short']), (5_000_000, True))
        self.assertIn('stop', [name for name, _, _ in self.client.calls])

    def test_the_time_out_grows_with_the_trial(self):
        self.assertEqual([generator.patience(seconds) for seconds in (1, 10, 600)], [70, 160, 6060])

    def test_what_the_generator_itself_loses_is_in_the_trial_and_its_limit(self):
        deaf = type('Deaf', (StatelessClient,), {'capacity': 1e9, 'ring': 30_000})
        code, document, said = self.measured('stl', deaf, '--profile', 'udp')
        self.assertEqual(code, 0, said)
        profile = document['runs'][0]['profiles'][0]
        for found in (profile['ndr'], profile['pdr']):
            self.assertEqual(found['limited_by'], ['generator'])
            self.assertAlmostEqual(found['median'], 30_000, delta=900)
        first = self.trials(profile['ndr'])[0]
        self.assertEqual(first['generator_lost'], first['lost'])
        self.assertGreater(first['lost'], 100_000)

    def test_loss_beyond_what_the_generator_lost_is_loss(self):
        deaf = type('Deaf', (StatelessClient,), {'capacity': 60_000, 'ring': 100_000})
        _, document, _ = self.measured('stl', deaf, '--profile', 'udp')
        ndr = document['runs'][0]['profiles'][0]['ndr']
        self.assertEqual(ndr['limited_by'], ['loss'])
        self.assertAlmostEqual(ndr['median'], 60_000, delta=1_200)

    def test_a_generator_that_loses_at_leisure_is_told_as_that(self):
        deaf = type('Deaf', (StatelessClient,), {'ring': 500})
        code, document, _ = self.measured('stl', deaf, '--profile', 'udp')
        self.assertEqual(code, 1)
        self.assertIn('TRex itself lost 500 packets at only 1000 a second', document['runs'][0]['profiles'][0]['error'])

    def test_no_rate_at_all_for_the_generators_sake_is_not_a_success(self):
        class Weary(StatelessClient):
            """Able to send the check before the searches, and nothing as fast after it."""
            checked = False

            def start(self, **kwargs):
                self.generator = 500 if self.checked else 1e9
                self.checked = True
                super().start(**kwargs)
        code, _, said = self.measured('stl', Weary, '--profile', 'udp', '--latency-pps', '1')
        self.assertEqual(code, 1, said)
        self.assertIn('no rate found, limited by generator', said)

    def test_latencies_are_from_the_histogram_and_of_fresh_streams(self):
        _, document, _ = self.measured('stl', StatelessClient, '--profile', 'udp')
        for point in document['runs'][0]['profiles'][0]['latency']:
            stream, = point['streams']
            self.assertEqual((stream['least_us'], stream['median_us'], stream['p99_us'], stream['most_us']), (10, 20, 20, 1_000))
            self.assertTrue(15 <= stream['average_us'] < 17, stream['average_us'])
            self.assertEqual((stream['not_in_histogram'], point['generator_lost']), (0, 0))
        calls = [name for name, _, _ in self.client.calls if name in ('remove_all_streams', 'add_streams', 'start')]
        self.assertEqual(calls[-10:], ['start'] + 3 * ['remove_all_streams', 'add_streams', 'start'])

    def test_latency_streams_slow_down_where_the_rate_has_no_room_for_them(self):
        weak = type('Weak', (StatelessClient,), {'capacity': 1_500})
        code, document, said = self.measured('stl', weak, '--profile', 'udp')
        self.assertEqual(code, 0, said)
        profile = document['runs'][0]['profiles'][0]
        self.assertAlmostEqual(profile['ndr']['median'], 1_500, delta=50)
        for point in profile['latency']:
            self.assertAlmostEqual(point['offered'], point['share_of_ndr'] * profile['ndr']['median'])
            self.assertEqual(point['latency_pps'], min(1_000, int(point['offered'] / 2)))
            self.assertEqual(len(point['streams']), 1)

    def test_a_rate_without_room_for_a_latency_stream_is_left_out_and_told(self):
        weak = type('Weak', (StatelessClient,), {'capacity': 12})
        code, document, said = self.measured('stl', weak, '--profile', 'udp', '--lowest', '10')
        self.assertEqual(code, 0, said)
        points = document['runs'][0]['profiles'][0]['latency']
        self.assertEqual(['error' in point for point in points], [True, False, False])
        self.assertIn('no room for a latency stream', said)

    def test_latency_packets_of_the_profile_itself_are_in_both_counts(self):
        code, document, said = self.measured('stl', StatelessClient, '--profile', 'udp --latency-pps 100')
        self.assertEqual(code, 0, said)
        profile = document['runs'][0]['profiles'][0]
        self.assertAlmostEqual(profile['ndr']['median'], 60_000, delta=1_200)
        self.assertEqual(profile['ndr']['limited_by'], ['loss'])
        first = self.trials(profile['ndr'])[0]
        self.assertEqual((first['sent'], first['latency_sent']), (200_000, 100))
        self.assertEqual({point['latency_pps'] for point in profile['latency']}, {100})

    def test_a_profile_that_is_asked_for_no_latency_stream_has_no_latencies(self):
        code, document, said = self.measured('stl', StatelessClient, '--profile', 'udp --latency-pps 0')
        self.assertEqual((code, document['runs'][0]['profiles'][0]['latency']), (0, []), said)

    def test_the_search_stays_above_the_profiles_latency_streams(self):
        weak = type('Weak', (StatelessClient,), {'capacity': 900})
        for words, reason in ((['udp --latency-pps 5000'], 'were lost at only 10000 a second'),
                              (['udp --latency-pps 100000'], 'need at least 200000 packets a second')):
            code, document, _ = self.measured('stl', weak, '--profile', *words)
            self.assertEqual(code, 1)
            self.assertIn(reason, document['runs'][0]['profiles'][0]['error'])

    def test_cpu_figures_are_those_of_the_traffic(self):
        _, document, _ = self.measured('stl', StatelessClient, '--profile', 'udp', '--short', '2')
        for trial in self.trials(document['runs'][0]['profiles'][0]['ndr']):
            self.assertEqual((trial['cpu_percent'], trial['receive_cpu_percent']), (97, 45.0))
        _, document, _ = self.measured('astf', StatefulClient, '--short', '2', '--profile', 'connections', '--profile', 'held')
        connections, held = document['runs'][1]['profiles']
        self.assertEqual({trial['cpu_percent'] for trial in self.trials(connections['no_loss'])}, {97})
        self.assertEqual({run['cpu_percent'] for run in held['sustained']}, {97})

    def test_an_interrupted_run_says_so_and_keeps_what_is_there(self):
        class Interrupted(StatelessClient):
            """Ctrl-C in the first latency point, as TRex's client tells it, or outside of its calls."""
            reason = None

            def start(self, **kwargs):
                super().start(**kwargs)
                if any(self.fixed(stream) for stream in self.streams):
                    raise self.reason

        error = api('stl').TRexError
        for reason, code, text in ((error("'start' - interrupted by a keyboard signal (probably ctrl + c)"), 130, 'run.py: interrupted'),
                                   (KeyboardInterrupt(), 130, 'run.py: interrupted'),
                                   (error('the connection was lost'), 4, 'gave up: the connection was lost')):
            with self.subTest(reason=str(reason)):
                client = type('Client', (Interrupted,), {'reason': reason})
                ended, document, said = self.measured('stl', client, '--profile', 'udp', '--profile', 'imix')
                self.assertEqual(ended, code, said)
                self.assertIn(text, said)
                self.assertIn('what was measured until then is in', said)
                profile, = document['runs'][0]['profiles']
                self.assertAlmostEqual(profile['ndr']['median'], 60_000, delta=1_200)
                self.assertIn('not finished', profile['error'])
                self.assertEqual(self.client.calls[-1][0], 'disconnect')

    def test_an_interrupted_start_says_so(self):
        module = api('stl')
        told = module.TRexError("'connect' - interrupted by a keyboard signal (probably ctrl + c)")
        for reason in (told, KeyboardInterrupt()):
            with contextlib.redirect_stderr(io.StringIO()) as said, mock.patch.object(library, 'load', lambda *_: module), \
                    mock.patch.object(module.STLClient, 'connect', side_effect=reason):
                self.assertEqual(run.main(['stl', *PORTS, '--output', str(self.output)]), 130)
            self.assertEqual(said.getvalue(), 'run.py: interrupted\n')

    def test_a_run_that_ends_before_its_first_figure_leaves_the_last_ones(self):
        _, before, _ = self.measured('stl', StatelessClient, '--profile', 'udp')
        early = type('Early', (StatelessClient,), {'start': mock.Mock(side_effect=KeyboardInterrupt)})
        code, after, said = self.measured('stl', early, '--profile', 'udp')
        self.assertEqual((code, after), (130, before))
        self.assertEqual(said.splitlines()[-1], 'run.py: interrupted')

    def test_a_syn_that_was_sent_again_is_no_lost_connection(self):
        again = type('Again', (StatefulClient,), {'again': 100})
        code, document, _ = self.measured('astf', again, '--profile', 'connections')
        self.assertEqual(code, 1)
        self.assertIn('0 of 100 connections were lost at only 100 a second, and 1 SYNs sent again',
                      document['runs'][0]['profiles'][0]['error'])
        trial = Trial(100, 1, 100, 100, again=1)
        self.assertEqual((trial.lost, trial.loss, trial.as_json()['sent_again']), (0, 0.01, 1))
        self.assertEqual(Trial(100, 1, 100, 40, again=300).loss, 1.0)

    def test_connections_that_are_opened_late_are_the_generators_limit(self):
        slow = type('Slow', (StatefulClient,), {'capacity': 1e9, 'generator': 2_000})
        code, document, said = self.measured('astf', slow, '--profile', 'connections')
        self.assertEqual(code, 0, said)
        found = document['runs'][0]['profiles'][0]['no_loss']
        self.assertEqual(found['limited_by'], ['generator'])
        self.assertAlmostEqual(found['median'], 2_000, delta=2_000 * 0.06)
        first = self.trials(found)[0]
        self.assertEqual((first['offered'], first['sent'], first['generator_short']), (200_000, 200_000, True))
        self.assertAlmostEqual(first['took_seconds'], 100, delta=5)

    def test_packets_that_the_generator_lost_are_told_with_connections_too(self):
        deaf = type('Deaf', (StatefulClient,), {'again': 100, 'missed': 7})
        code, document, _ = self.measured('astf', deaf, '--profile', 'connections', '--profile', 'bulk')
        self.assertEqual(code, 1)
        connections, bulk = document['runs'][0]['profiles']
        self.assertIn('TRex itself lost 14 packets', connections['error'])
        self.assertEqual(bulk['sustained'][0]['generator_lost'], 14)

    def test_connections_a_second_are_searched_and_the_others_run_as_they_are(self):
        code, document, said = self.measured('astf', StatefulClient, '--profile', 'connections --denied-port 9090',
                                             '--profile', 'held', '--profile', 'bulk')
        self.assertEqual(code, 0, said)
        connections, held, bulk = document['runs'][0]['profiles']
        self.assertAlmostEqual(connections['no_loss']['median'], 5_000, delta=100)
        self.assertEqual(held['sustained'][0]['established_at_most'], 42)
        self.assertGreater(bulk['sustained'][0]['received_by_clients_bit_s'], 0)

    def test_a_denied_connection_that_is_accepted_is_an_error(self):
        leaking = type('Leaking', (StatefulClient,), {'leak': 1})
        code, document, _ = self.measured('astf', leaking, '--profile', 'connections --denied-port 9090')
        self.assertEqual(code, 1)
        self.assertIn('arrived that policy should deny', document['runs'][0]['profiles'][0]['error'])

    def test_a_run_keeps_the_other_kinds_results_and_replaces_its_own(self):
        for mode, make in (('stl', StatelessClient), ('astf', StatefulClient), ('stl', StatelessClient)):
            profile = 'udp' if mode == 'stl' else 'connections'
            _, document, _ = self.measured(mode, make, '--profile', profile)
        self.assertEqual([entry['mode'] for entry in document['runs']], ['astf', 'stl'])

    def test_a_file_that_is_something_else_is_not_overwritten(self):
        self.output.parent.mkdir()
        for text in ('notes', '{"format": 9, "runs": []}', '[]'):
            self.output.write_text(text)
            with contextlib.redirect_stderr(io.StringIO()) as said:
                code = run.main(['stl', *PORTS, '--output', str(self.output)])
            self.assertEqual((code, self.output.read_text()), (2, text))
            self.assertIn('name another file', said.getvalue())

    def test_bad_input_is_told_in_a_line(self):
        cases = [(['--port', '0=10.0.0.1'], 'not of the form'), (['--port', 'x=1,2'], 'not of the form'),
                 (['--port', '0=10.0.0.300,10.0.0.1'], '10.0.0.300'), (['--port', '0=fd00::1,fd00::2'], 'give its MAC'),
                 (['--port', '0=10.0.0.1,10.0.0.2'], 'given 1 times'),
                 ([*PORTS, '--profile', 'nothing'], 'there are flows, imix, mix, pods, udp'),
                 ([*PORTS, '--profile', 'penstock_stl'], 'no such profile'),
                 ([*PORTS, '--lowest', '10', '--highest', '5'], '--lowest below --highest')]
        for words, wanted in cases:
            with self.subTest(words=words), contextlib.redirect_stderr(io.StringIO()) as said:
                self.assertEqual(run.main(['stl', *words, '--output', str(self.output)]), 2)
                self.assertIn(wanted, said.getvalue())
                self.assertEqual(said.getvalue().count('\n'), 1)

    def test_without_trex_or_a_server_the_exit_code_says_which(self):
        with contextlib.redirect_stderr(io.StringIO()) as said:
            self.assertEqual(run.main(['check', '--trex-dir', str(self.output.parent)]), 3)
            module = api('stl')
            with mock.patch.object(library, 'load', lambda *_: module), \
                    mock.patch.object(module.STLClient, 'connect', side_effect=module.TRexError('refused')):
                self.assertEqual(run.main(['stl', *PORTS, '--output', str(self.output)]), 4)
        self.assertIn('no TRex client in', said.getvalue())
        self.assertIn('no TRex server at 127.0.0.1: ', said.getvalue())

    def test_check_loads_every_profile_and_says_which_does_not(self):
        stl, astf = api('stl'), api('astf')
        modules = mock.patch.object(library, 'load', lambda mode, *_: {'stl': stl, 'astf': astf}[mode])
        with modules, contextlib.redirect_stdout(io.StringIO()) as said:
            self.assertEqual(run.main(['check']), 0)
        self.assertEqual(said.getvalue().count('streams') + said.getvalue().count('templates'), 9)
        broken = mock.patch.object(stl.STLProfile, 'load', side_effect=stl.TRexError('broken'))
        with modules, broken, contextlib.redirect_stdout(io.StringIO()) as said:
            self.assertEqual(run.main(['check']), 1)
        self.assertIn('does not load: broken', said.getvalue())


if __name__ == '__main__':
    unittest.main()
