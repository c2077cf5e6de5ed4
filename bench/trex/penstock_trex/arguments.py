"""The command line of `run.py`."""

import argparse

EXAMPLES = """
examples:
  # Do the profiles load with the TRex in TREX_DIR? No server is needed.
  run.py check

  # Between two pods of a node (configs/trex/veth.yaml; the server was started with:
  # t-rex-64 -i --software --no-scapy-server), quickly: with the defaults it takes one to two hours
  run.py stl --port 0=10.244.1.10,10.244.1.1 --port 1=10.244.1.11,10.244.1.1 \\
      --repetitions 1 --short 1 --long 3 --precision 0.1 --highest 300000 --latency-pps 100

  # One profile with tunables of its own; from a machine outside to a pod
  run.py stl --server 192.0.2.7 --port 0=198.18.0.2,198.18.0.1 --port 1=10.244.1.11,10.244.1.1 \\
      --profile 'flows --flows 1000000 --dport 8192'

  # TCP connections (the server was started with: t-rex-64 -i --astf)
  run.py astf --port 0=10.244.1.10,10.244.1.1 --port 1=10.244.1.11,10.244.1.1 --profile 'connections --denied-port 9090'

exit codes: 0 measured; 1 a check failed, or a profile could not be measured or the generator allowed no rate; 2 bad input;
3 no TRex client in TREX_DIR; 4 no TRex server, its ports cannot be used, or it gave up; 130 interrupted
"""

STATELESS = ['udp --size 64', 'imix', 'flows --flows 10000', 'flows --flows 1000000 --dport 8192', 'mix --denied 0.3',
             'pods']
STATEFUL = ['connections', 'held', 'bulk']


def parser():
    top = argparse.ArgumentParser(prog='run.py', description='Measures Penstock with a TRex server.', epilog=EXAMPLES,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(dest='command', required=True, metavar='COMMAND')
    check = commands.add_parser('check', help='load every profile with the TRex in TREX_DIR')
    stl = commands.add_parser('stl', help='stateless profiles: no-drop and partial-drop rates, latency')
    astf = commands.add_parser('astf', help='stateful profiles: connections a second, held connections, bulk')
    for command in (check, stl, astf):
        command.add_argument('--trex-dir', metavar='DIR', help='where TRex is (default: TREX_DIR of the environment)')
    for command, defaults, unit in ((stl, STATELESS, 'packets'), (astf, STATEFUL, 'connections')):
        common(command, defaults, unit)
    stl.add_argument('--both', action='store_true', help='port 1 sends the answers at the same rate')
    stl.add_argument('--loss', type=share, default=0.005, metavar='SHARE',
                     help='loss of the partial-drop rate (default 0.005)')
    stl.add_argument('--latency-pps', type=int, default=1_000, metavar='N',
                     help='packets a second of each latency stream, less at low rates (default 1000)')
    return top


def common(command, defaults, unit):
    command.add_argument('--port', action='append', required=True, metavar='NUMBER=ADDRESS,GATEWAY',
                         help='a port of the server and whose place it takes: twice, the sender first')
    command.add_argument('--server', default='127.0.0.1', metavar='HOST', help='the TRex server (default 127.0.0.1)')
    command.add_argument('--profile', action='append', metavar="'NAME --TUNABLE VALUE'",
                         help=f'a profile and its tunables, may be repeated (default: {"; ".join(defaults)})')
    command.add_argument('--output', default='target/bench/trex.json', metavar='FILE',
                         help='results; a run of the other kind that is in it stays (default target/bench/trex.json)')
    command.add_argument('--lowest', type=positive, default=1_000, metavar='N', help=f'{unit} a second (default 1000)')
    command.add_argument('--highest', type=positive, default=1_000_000 if unit == 'packets' else 100_000, metavar='N',
                         help=f'{unit} a second to begin with (default: a million packets, 100,000 connections)')
    command.add_argument('--precision', type=share, default=0.01, metavar='SHARE',
                         help='how near the bounds of a search come (default 0.01)')
    command.add_argument('--short', type=positive, default=2, metavar='S', help='seconds of a searching trial (default 2)')
    command.add_argument('--long', type=positive, default=10, metavar='S', help='seconds of a confirming trial (default 10)')
    command.add_argument('--repetitions', type=int, default=5, metavar='N', help='searches of each kind (default 5)')
    command.set_defaults(defaults=defaults)


def positive(text):
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f'{text}: above 0')
    return number


def share(text):
    number = float(text)
    if not 0 < number < 1:
        raise argparse.ArgumentTypeError(f'{text} is no share: between 0 and 1')
    return number
