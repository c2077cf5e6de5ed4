"""Each profile loads and makes the streams and templates that its tunables describe."""

import ast
import base64
import contextlib
import io
import json
import struct
import subprocess
import sys
import unittest

from penstock_trex import arguments, library

from . import STANDIN, TREX_DIR
from .using import api


@contextlib.contextmanager
def quiet():
    """Discards what argparse prints."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def streams(name, *tunables, direction=0, port_id=None):
    profile = api('stl').STLProfile.load(str(library.profile_file('stl', name)), direction=direction,
                                         port_id=direction if port_id is None else port_id, tunables=list(tunables))
    return [(stream.get_name(), stream.get_pg_id(), stream.to_json()) for stream in profile.get_streams()]


def packet(description):
    return base64.b64decode(description['packet']['binary'])


def ports(description):
    frame = packet(description)
    return struct.unpack('!HH', frame[34:38] if frame[12:14] == b'\x08\x00' else frame[54:58])


def applied(description, number):
    """The ports of the packet in which the flow has this number: what TRex's field engine does."""
    frame = bytearray(packet(description))
    for step in description['vm']['instructions']:
        if step['type'] == 'write_mask_flow_var':
            assert step['pkt_cast_size'] == 2
            at, shift = step['pkt_offset'], step['shift']
            value = number << shift if shift >= 0 else number >> -shift
            old = struct.unpack('!H', frame[at:at + 2])[0]
            frame[at:at + 2] = struct.pack('!H', (old & ~step['mask'] | value & step['mask']) & 0xFFFF)
    return struct.unpack('!HH', frame[34:38])


class Stateless(unittest.TestCase):
    def test_every_default_profile_loads_in_both_directions(self):
        for text in arguments.STATELESS:
            for direction in (0, 1):
                with self.subTest(profile=text, direction=direction):
                    name, *tunables = text.split()
                    found = streams(name, *tunables, direction=direction)
                    self.assertTrue(found)
                    for stream, group, description in found:
                        self.assertRegex(stream, '^(allowed|denied|latency)')
                        self.assertEqual(description['flow_stats']['stream_id'], group)

    def test_frames_have_the_size_that_was_asked_for(self):
        for size in (64, 128, 512, 1518):
            (_, _, description), = streams('udp', '--size', str(size))
            self.assertEqual(len(packet(description)) + 4, size)

    def test_addresses_and_ports_are_those_of_the_tunables_and_swapped_for_answers(self):
        tunables = ['--src', '198.18.0.2', '--dst', '10.1.2.3', '--sport', '40000', '--dport', '53']
        (_, _, there), = streams('udp', *tunables)
        (_, _, back), = streams('udp', *tunables, direction=1)
        self.assertEqual((packet(there)[26:30], packet(there)[30:34], ports(there)),
                         (bytes([198, 18, 0, 2]), bytes([10, 1, 2, 3]), (40000, 53)))
        self.assertEqual((packet(back)[26:30], packet(back)[30:34], ports(back)),
                         (bytes([10, 1, 2, 3]), bytes([198, 18, 0, 2]), (53, 40000)))

    def test_ipv6_addresses_make_ipv6_packets(self):
        for name in ('udp', 'imix', 'pods'):
            tunables = ['--src', 'fd00::a', '--dst', 'fd00::b'] + ([] if name == 'imix' else ['--size', '128'])
            for _, _, description in streams(name, *tunables):
                self.assertEqual(packet(description)[12:14], b'\x86\xdd')
                self.assertEqual(packet(description)[37], 0x0A)

    def test_no_sum_is_sent_that_a_field_engine_would_leave_wrong(self):
        for name, tunables in (('flows', ['--flows', '7']), ('udp', ['--latency-pps', '5'])):
            for _, _, description in streams(name, *tunables):
                self.assertEqual(packet(description)[40:42], bytes(2))

    def test_imix_has_its_sizes_in_its_shares(self):
        found = [(len(packet(description)) + 4, description['mode']['rate']['value']) for _, _, description in streams('imix')]
        self.assertEqual(found, [(64, 7.0), (570, 4.0), (1518, 1.0)])

    def test_as_many_connections_as_asked_for_and_each_once(self):
        for flows, dport in ((2, 8080), (1_000, 8080), (32_768, 8080), (100_000, 8192), (1_000_000, 8192)):
            with self.subTest(flows=flows):
                (_, _, description), = streams('flows', '--flows', str(flows), '--dport', str(dport))
                variable = next(step for step in description['vm']['instructions'] if step['type'] == 'flow_var')
                self.assertEqual((variable['min_value'], variable['max_value'], variable['op']), (0, flows - 1, 'inc'))
                step = max(flows // 5_000, 1)
                numbers = {*range(0, flows, step), *range(min(flows, 1_000)), flows - 1}
                seen = {applied(description, number) for number in numbers}
                self.assertEqual(len(seen), len(numbers))
                self.assertTrue(all(near >= 32768 and dport <= far < dport + 32 for near, far in seen))

    def test_answers_of_many_connections_have_the_same_ports_swapped(self):
        there, = streams('flows', '--flows', '100000', '--dport', '8192')
        back, = streams('flows', '--flows', '100000', '--dport', '8192', direction=1)
        for number in (0, 1, 32_767, 32_768, 99_999):
            self.assertEqual(applied(there[2], number), applied(back[2], number)[::-1])

    def test_denied_connections_have_their_share_and_their_port_and_no_answers(self):
        found = {name: description for name, _, description in streams('mix', '--denied', '0.25', '--denied-dport', '9999')}
        self.assertEqual({name: description['mode']['rate']['value'] for name, description in found.items()},
                         {'allowed': 0.75, 'denied': 0.25})
        self.assertEqual((ports(found['allowed'])[1], ports(found['denied'])[1]), (8080, 9999))
        self.assertEqual([name for name, _, _ in streams('mix', direction=1)], ['allowed'])

    def test_each_pod_has_a_stream_and_a_latency_stream_in_a_group_of_its_own(self):
        found = streams('pods', '--pods', '10.0.0.1,10.0.0.2,10.0.0.3', '--latency-pps', '250')
        self.assertEqual([name for name, _, _ in found],
                         [f'{kind}-10.0.0.{pod}' for pod in (1, 2, 3) for kind in ('allowed', 'latency')])
        self.assertEqual(len({group for _, group, _ in found}), 6)
        for name, _, description in found:
            self.assertEqual(packet(description)[33], int(name[-1]))
            self.assertEqual(description['flow_stats']['rule_type'], 'latency' if name.startswith('latency') else 'stats')
            self.assertEqual(description['mode']['rate']['value'], 250.0 if name.startswith('latency') else 1.0)

    def test_groups_of_two_ports_are_never_the_same(self):
        groups = [group for port in (0, 1, 2) for _, group, _ in streams('imix', '--latency-pps', '5', port_id=port)]
        self.assertEqual(len(groups), len(set(groups)))

    def test_latency_packets_have_room_for_number_and_time(self):
        for src, dst in (('10.0.0.1', '10.0.0.2'), ('fd00::1', 'fd00::2')):
            for name, _, description in streams('udp', '--src', src, '--dst', dst, '--size', '66', '--latency-pps', '1'):
                headers = 42 if '.' in src else 62
                self.assertGreaterEqual(len(packet(description)) - headers, 16 if name == 'latency' else 0)

    def test_tunables_that_cannot_be_are_refused(self):
        cases = [('udp', ['--size', '40']), ('udp', ['--src', '10.0.0.1', '--dst', 'fd00::1']),
                 ('flows', ['--flows', '100000', '--dport', '8081']), ('flows', ['--flows', '10', '--sport', '1024']),
                 ('udp', ['--src', 'nowhere'])]
        for name, tunables in cases:
            with self.subTest(profile=name, tunables=tunables), self.assertRaises(api('stl').TRexError):
                streams(name, *tunables)

    def test_help_and_words_that_no_tunable_has_load_nothing(self):
        for tunables in (['--help'], ['--siz', '64'], ['--dport', '70000'], ['--denied', '2']):
            load = api('stl').STLProfile.load
            file = str(library.profile_file('stl', 'mix'))
            with quiet():
                self.assertIsNone(load(file, direction=0, port_id=0, tunables=tunables))


def astf(name, *tunables):
    profile = api('astf').ASTFProfile.load(str(library.profile_file('astf', name)), tunables=list(tunables))
    return profile, profile.to_json()


def commands(description, template, side):
    return description['program_list'][description['templates'][template][f'{side}_template']['program_index']]['commands']


class Stateful(unittest.TestCase):
    def test_every_default_profile_loads(self):
        for text in arguments.STATEFUL:
            with self.subTest(profile=text):
                self.assertTrue(astf(*text.split())[1]['templates'])

    def test_clients_and_servers_have_the_addresses_of_the_tunables(self):
        _, description = astf('connections', '--clients', '198.18.0.2-198.18.0.254', '--servers', '10.1.2.3')
        ends = {side['dir']: (side['ip_start'], side['ip_end']) for side in description['ip_gen_dist_list']}
        self.assertEqual(ends, {'c': ('198.18.0.2', '198.18.0.254'), 's': ('10.1.2.3', '10.1.2.3')})

    def test_a_connection_is_one_request_and_one_answer(self):
        _, description = astf('connections', '--cps', '250', '--request', '200', '--answer', '5000')
        client, server = commands(description, 0, 'client'), commands(description, 0, 'server')
        self.assertEqual([step['name'] for step in client], ['tx', 'rx'])
        self.assertEqual([step['name'] for step in server], ['rx', 'tx'])
        self.assertEqual((client[1]['min_bytes'], server[0]['min_bytes']), (5000, 200))
        self.assertEqual(description['templates'][0]['client_template']['cps'], 250.0)

    def test_denied_connections_are_a_group_of_their_own(self):
        profile, description = astf('connections', '--denied-port', '9090', '--denied-cps', '7')
        self.assertEqual(list(profile.tg_name_to_id), ['allowed', 'denied'])
        templates = [(entry['client_template']['port'], entry['client_template']['cps']) for entry in description['templates']]
        self.assertEqual(templates, [(8080, 1000.0), (9090, 7.0)])
        self.assertEqual([entry['server_template']['assoc'] for entry in description['templates']], [[{'port': 8080}], [{'port': 9090}]])

    def test_held_connections_stay_open_for_their_rounds(self):
        _, description = astf('held', '--connections', '500', '--rounds', '9', '--interval', '200')
        entry = description['templates'][0]['client_template']
        self.assertEqual((entry['limit'], entry['cont']), (500, True))
        client = commands(description, 0, 'client')
        self.assertEqual([step['name'] for step in client], ['set_var', 'tx', 'rx', 'delay', 'jmp_nz'])
        self.assertEqual((client[0]['val'], client[3]['usec'], client[4]['offset']), (9, 200_000, -3))
        self.assertGreaterEqual(description['c_glob_info']['tcp']['keepidle'], 30)

    def test_bulk_carries_as_much_as_it_is_told_to(self):
        _, description = astf('bulk', '--streams', '3', '--megabytes', '16', '--mss', '1400')
        client, server = commands(description, 0, 'client'), commands(description, 0, 'server')
        rounds = next(step['val'] for step in server if step['name'] == 'set_var')
        self.assertEqual(rounds, next(step['val'] for step in client if step['name'] == 'set_var'))
        self.assertEqual(rounds * 64 * 1024, 16 * 2**20)
        self.assertEqual(description['templates'][0]['client_template']['limit'], 3)
        self.assertEqual(description['c_glob_info']['tcp']['mss'], 1400)

    def test_tunables_that_cannot_be_are_refused(self):
        for name, tunables in (('connections', ['--request', '3']), ('held', ['--answer', '1'])):
            with self.subTest(profile=name), self.assertRaises(Exception) as refused:
                astf(name, *tunables)
            self.assertIn('at least', str(refused.exception))
        for tunables in (['--clients', 'nobody'], ['--clients', '10.0.0.9-10.0.0.1'], ['--cps', '0.1'], ['--port', '0']):
            file = str(library.profile_file('astf', 'connections'))
            with quiet():
                self.assertIsNone(api('astf').ASTFProfile.load(file, tunables=tunables))


# Prints the parameters of every function of the classes that the stand-in has.
SIGNATURES = '''
import importlib, inspect, json, sys, warnings
warnings.simplefilter('ignore')
sys.path.insert(0, sys.argv[1])
description = {}
for mode, names in json.loads(sys.argv[2]).items():
    module = importlib.import_module(f'trex.{mode}.api')
    for name, functions in names.items():
        for function in functions:
            found = inspect.signature(getattr(getattr(module, name), function))
            description[f'{mode}.{name}.{function}'] = [[p.name, p.kind.name, p.default is not p.empty]
                                                for p in found.parameters.values()]
print(json.dumps(description))
'''


class StandIn(unittest.TestCase):
    @unittest.skipUnless(TREX_DIR, 'TREX_DIR is not set: nothing to hold the stand-in against')
    def test_its_functions_take_what_those_of_trex_take(self):
        wanted = {}
        for mode in ('stl', 'astf'):
            tree = ast.parse((STANDIN / 'trex' / mode / 'api.py').read_text())
            wanted[mode] = {
                node.name: [part.name for part in node.body if isinstance(part, ast.FunctionDef)
                            and part.name != 'instructions']
                for node in tree.body if isinstance(node, ast.ClassDef)}
        description = [json.loads(subprocess.run([sys.executable, '-c', SIGNATURES, str(where), json.dumps(wanted)], check=True,
                                          capture_output=True, text=True).stdout)
                for where in (STANDIN, library.path(TREX_DIR))]
        self.assertGreater(len(description[0]), 40)
        for name, parameters in description[0].items():
            with self.subTest(function=name):
                # TRex wraps this one in a function that takes anything.
                if name != 'astf.ASTFProfile.to_json':
                    self.assertEqual(parameters, description[1][name])


if __name__ == '__main__':
    unittest.main()
