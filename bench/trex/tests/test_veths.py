"""The node of `veths up`, and a pod with a NIC by `nic-pod up`, with Penstock.

The tests send the profiles' packets between the interfaces that TRex would use.
"""

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import unittest
from pathlib import Path

from penstock_trex import library

from . import FOLDER
from .using import api

PENSTOCK = os.environ.get('PENSTOCK_BIN', '')
CONFIGS = FOLDER.parent.parent.parent / 'configs' / 'trex'
LIMIT = 20

# Sends all frames on trex0 repeatedly and reports which arrive on trex1. Ends once the last one has arrived, or after ten
# seconds. The input is names and frames in base64.
EXCHANGE = '''
import base64, json, socket, sys, time
frames = {name: base64.b64decode(text) for name, text in json.load(sys.stdin).items()}
ports = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) for _ in range(2)]
for number, port in enumerate(ports):
    port.bind((f'trex{number}', 0))
ports[1].settimeout(0.2)
arrived, last, end = set(), list(frames)[-1], time.monotonic() + 10
while last not in arrived and time.monotonic() < end:
    for frame in frames.values():
        ports[0].send(frame)
    try:
        while True:
            got = ports[1].recv(2048)
            arrived |= {name for name, frame in frames.items() if got[26:] == frame[26:]}
    except TimeoutError:
        pass
print(json.dumps(sorted(arrived)))
'''


def command(*words, **options):
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=LIMIT, **options).stdout


def within(netns):
    """Prefix of a command that runs in a network namespace, without the sysfs mount that `ip -n` makes."""
    return 'nsenter', f'--net=/run/netns/{netns}'


@unittest.skipUnless(os.geteuid() == 0 and shutil.which('ip') and PENSTOCK,
                     'needs root, iproute2 and PENSTOCK_BIN: the veths were not tried')
class VethsTest(unittest.TestCase):
    def setUp(self):
        self.name = f'pentrex{os.getpid()}'
        environment = {**os.environ, 'NAME': self.name}
        veths = str(FOLDER.parent / 'veths')
        self.addCleanup(command, veths, 'down', env=environment)
        command(veths, 'up', env=environment)
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def start_penstock(self):
        """Penstock with the shipped configuration, except what it would share with another instance on the machine."""
        settings = ['admin.socket=off', 'metrics.listen=off', 'conntrack.mapping=off', f'fail.pins=/sys/fs/bpf/{self.name}',
                    f'workers.cores=[{max(os.sched_getaffinity(0))}]', 'umem.memory=64MiB']
        words = [word for setting in settings for word in ('--set', setting)]
        # The daemon refuses variables of its prefix that are no settings, such as this test's own.
        environment = {name: value for name, value in os.environ.items() if not name.startswith('PENSTOCK_')}
        environment['NO_COLOR'] = '1'
        process = subprocess.Popen(
            [*within(f'{self.name}-node'), PENSTOCK, 'run', '--config', str(CONFIGS / 'penstock.toml'), *words],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        watchdog = threading.Timer(LIMIT, process.kill)
        watchdog.start()
        self.addCleanup(watchdog.cancel)
        said = []
        for line in process.stdout:
            said.append(line)
            if 'ready: ' in line:
                watchdog.cancel()
                reader = threading.Thread(target=process.stdout.read, daemon=True)
                reader.start()
                self.addCleanup(process.stdout.close)
                self.addCleanup(reader.join)
                self.addCleanup(self.stop, process)
                return
        self.stop(process)
        process.stdout.close()
        self.fail('penstock did not get ready:\n' + ''.join(said))

    @staticmethod
    def stop(process):
        process.terminate()
        try:
            process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def frames(self):
        """A frame of each stream of the profile `mix`, as port 0 sends it to the node."""
        links = json.loads(command(*within(f'{self.name}-node'), 'ip', '-j', 'link', 'show', 'veth-trex0'))
        client = json.loads(command(*within(f'{self.name}-trex'), 'ip', '-j', 'link', 'show', 'trex0'))
        ethernet = bytes.fromhex((links[0]['address'] + client[0]['address']).replace(':', ''))
        profile = api('stl').STLProfile.load(str(library.profile_file('stl', 'mix')), direction=0, port_id=0,
                                             tunables=['--src', '10.244.1.10', '--dst', '10.244.1.11'])
        found = {stream.get_name(): ethernet + base64.b64decode(stream.to_json()['packet']['binary'])[12:]
                 for stream in profile.get_streams()}
        # The allowed frame ends the exchange; the denied one is sent before it each time.
        return {name: base64.b64encode(found[name]).decode() for name in ('denied', 'allowed')}

    def exchange(self):
        words = [*within(f'{self.name}-trex'), sys.executable, '-c', EXCHANGE]
        return json.loads(command(*words, input=json.dumps(self.frames())))

    def test_what_the_profiles_call_allowed_arrives_and_what_they_call_denied_does_not(self):
        # TRex answers ARP; here nothing does.
        server = json.loads(command(*within(f'{self.name}-trex'), 'ip', '-j', 'link', 'show', 'trex1'))[0]['address']
        command(*within(f'{self.name}-node'), 'ip', 'neigh', 'replace', '10.244.1.11', 'lladdr', server, 'dev', 'veth-trex1')
        self.assertEqual(self.exchange(), ['allowed', 'denied'], 'without Penstock the node forwards both')
        self.start_penstock()
        self.assertEqual(self.exchange(), ['allowed'])

    def test_a_nic_stands_in_for_a_pods_interface(self):
        """The pod `server` behind a veth that stands for the NIC; its other end, trex1, stands for TRex's port."""
        node, trex = f'{self.name}-node', f'{self.name}-trex'
        command(*within(node), 'ip', 'link', 'delete', 'veth-trex1')
        command(*within(node), 'ip', 'link', 'add', 'nic', 'type', 'veth', 'peer', 'name', 'trex1', 'netns', trex)
        command(*within(trex), 'ip', 'link', 'set', 'trex1', 'up')
        script, environment = str(FOLDER.parent / 'nic-pod'), {**os.environ, 'NAME': f'{self.name}-pod', 'NODE': node}
        self.addCleanup(command, script, 'down', 'nic', env=environment)
        command(script, 'up', 'nic', '10.244.1.11', '02:00:00:00:01:11', env=environment)
        self.start_penstock()
        self.assertEqual(self.exchange(), ['allowed'])
        command(script, 'down', 'nic', env=environment)
        self.assertIn('nic', [link['ifname'] for link in json.loads(command(*within(node), 'ip', '-j', 'link'))])

    def test_offloads_are_off_at_both_ends(self):
        """With a stand-in for ethtool that writes down what it is asked for."""
        environment = {**os.environ, 'NAME': self.name}
        veths = str(FOLDER.parent / 'veths')
        asked = self.folder / 'asked'
        ethtool = self.folder / 'ethtool'
        ethtool.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n')
        ethtool.chmod(0o755)
        command(veths, 'down', env=environment)
        command(veths, 'up', env={**environment, 'PATH': f'{self.folder}:{os.environ["PATH"]}'})
        self.assertEqual(asked.read_text().splitlines(),
                         [line for port in (0, 1) for line in (f'-K trex{port} tx off gro off',
                                                               f'-K veth-trex{port} tso off gso off gro off')])

    def test_without_ethtool_it_says_what_is_not_measured(self):
        environment = {**os.environ, 'NAME': self.name}
        veths = str(FOLDER.parent / 'veths')
        command(veths, 'down', env=environment)
        # All that the script needs, without ethtool.
        for tool in ('bash', 'sh', 'ip', 'nsenter'):
            (self.folder / tool).symlink_to(shutil.which(tool))
        up = subprocess.run([veths, 'up'], check=True, capture_output=True, text=True, timeout=LIMIT,
                            env={**environment, 'PATH': str(self.folder)})
        self.assertIn('there is no ethtool', up.stderr)

    @unittest.skipUnless(shutil.which('ethtool'), 'ethtool is not installed: offloads are not tested')
    def test_no_packet_leaves_the_node_longer_than_on_a_wire(self):
        for port in (0, 1):
            features = command(*within(f'{self.name}-node'), 'ethtool', '-k', f'veth-trex{port}')
            for feature in ('tcp-segmentation-offload', 'generic-segmentation-offload', 'generic-receive-offload'):
                self.assertIn(f'{feature}: off', features)

    def test_no_stack_answers_in_the_place_of_trex(self):
        for port in (0, 1):
            addresses = json.loads(command(*within(f'{self.name}-trex'), 'ip', '-j', 'address', 'show', f'trex{port}'))
            self.assertEqual(addresses[0]['addr_info'], [])


if __name__ == '__main__':
    unittest.main()
