"""The runner from its command line to its document, with fake clients before a device of known capacity."""

import contextlib
import importlib.util
import io
import json
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from penstock_trex import library

from . import FOLDER
from .using import api

spec = importlib.util.spec_from_file_location('run', FOLDER.parent / 'run.py')
run = importlib.util.module_from_spec(spec)
spec.loader.exec_module(run)

PORTS = ['--port', '0=10.244.1.10,10.244.1.1', '--port', '1=10.244.1.11,02:00:00:00:00:01']
QUICK = ['--short', '1', '--long', '2', '--repetitions', '3', '--lowest', '1000', '--highest', '200000']


class Client:
    """Base of both fake clients; `calls` records the calls."""

    def __init__(self, server):
        self.calls, self.server = [], server

    def __getattr__(self, name):
        if name.startswith('_'):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))

    def get_all_ports(self):
        return [0, 1]

    def get_server_version(self):
        return {'version': 'v3.08', 'mode': 'STL'}

    def get_server_system_info(self):
        return {'hostname': 'generator', 'dp_core_count': 2, 'core_type': 'a core',
                'ports': [{'driver': 'net_af_packet', 'speed': 10}] * 2}


class StatelessClient(Client):
    """Passes allowed packets up to a capacity, and denied ones only if it leaks."""

    capacity, leak, flaw = 60_000, 0, 0.0

    def add_streams(self, streams, ports=None):
        self.streams = [stream for stream in streams]

    def start(self, ports, mult, duration, total, force):
        assert mult.endswith('pps') and total and force
        self.rate, self.seconds = float(mult[:-3]), duration

    def get_stats(self):
        flow, latency, whole = {}, {'global': {}}, sum(self.weight(stream) for stream in self.streams)
        for stream in self.streams:
            name, group = stream.get_name(), stream.get_pg_id()
            sent = int(self.seconds * (self.rate * self.weight(stream) / whole if self.weight(stream) else 1_000))
            through = min(1.0, self.capacity / self.rate) * (1 - self.flaw)
            received = min(self.leak, sent) if name == 'denied' else int(sent * through + 1e-6)
            flow[group] = {'tx_pkts': {'total': sent}, 'rx_pkts': {'total': received}}
            if name.startswith('latency'):
                latency[group] = {
                    'err_cntrs': {'dropped': 0, 'out_of_order': 0, 'dup': 0, 'seq_too_high': 0, 'seq_too_low': 0},
                    'latency': {'total_min': 5, 'average': 12.5, 'total_max': 80, 'jitter': 2, 'histogram': {20: 1, 10: 9}}}
        return {'flow_stats': flow, 'latency': latency,
                'global': {'queue_full': 0, 'cpu_util': 30.0, 'rx_cpu_util': 10.0}}

    @staticmethod
    def weight(stream):
        return 0 if stream.get_name().startswith('latency') else stream.to_json()['mode']['rate']['value']


class StatefulClient(Client):
    """Establishes up to this many connections per second."""

    capacity, leak, byte_count = 5_000, 0, 0

    def load_profile(self, profile, tunables):
        self.tunables = tunables['tunables']

    def start(self, mult, duration, t_duration):
        self.seconds = duration

    def get_traffic_tg_stats(self, groups, skip_zero):
        cps = [float(value) for key, value in zip(self.tunables, self.tunables[1:]) if key == '--cps'] or [100.0]
        attempts = int(cps[-1] * self.seconds)
        connects = min(attempts, int(self.capacity * self.seconds))
        self.byte_count += 1_000_000
        counts = {'allowed': {'client': {'tcps_connattempt': attempts, 'tcps_connects': connects, 'm_est_flows': 42,
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
        clients = []

        def made(server):
            clients.append(make(server))
            return clients[-1]
        module = api(mode)
        said = io.StringIO()
        with mock.patch.object(module, 'STLClient' if mode == 'stl' else 'ASTFClient', made), \
                mock.patch.object(library, 'load', lambda *_: module), \
                mock.patch('time.sleep'), mock.patch('time.monotonic', iter(range(100_000)).__next__), \
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
        self.assertEqual([port['driver'] for port in entry['ports']], ['net_af_packet'] * 2)
        self.assertEqual([profile['profile'] for profile in entry['profiles']],
                         ['udp', 'imix', 'flows', 'flows', 'mix', 'pods'])
        for profile in entry['profiles']:
            with self.subTest(profile=profile['asked']):
                self.assertAlmostEqual(profile['ndr']['median'], 60_000, delta=1_200)
                self.assertGreater(profile['pdr']['median'], profile['ndr']['median'] * 0.999)
                self.assertEqual((len(profile['ndr']['repetitions']), profile['ndr']['limited_by']), (3, ['loss']))
                self.assertEqual([part['share_of_ndr'] for part in profile['latency']], [0.1, 0.5, 0.9])
                self.assertEqual(profile['latency'][0]['streams'][0]['histogram_us'], {'10': 9, '20': 1})

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
