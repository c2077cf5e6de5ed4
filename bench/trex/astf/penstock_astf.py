"""What the stateful profiles share: their tunables, the addresses of both sides, and a template.

Port 0 has the clients, port 1 the server. A template's group says what must become of its connections: those of `allowed` must
be established, of `denied` none may be. The runner counts by that.
"""

import argparse
import ipaddress

from trex.astf.api import (
    ASTFAssociationRule, ASTFIPGen, ASTFIPGenDist, ASTFIPGenGlobal, ASTFTCPClientTemplate, ASTFTCPServerTemplate,
    ASTFTemplate,
)

ALLOWED, DENIED = 'allowed', 'denied'


class Tunables(argparse.ArgumentParser):
    """Tunables of a profile. Those for addresses are the same in all profiles."""

    def __init__(self, profile):
        super().__init__(prog=profile.__name__, description=profile.__doc__, allow_abbrev=False,
                         formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        self.add_argument('--clients', type=addresses, default='10.244.1.10',
                          help='addresses of port 0: one (a pod), or FIRST-LAST (machines outside)')
        self.add_argument('--servers', type=addresses, default='10.244.1.11', help='addresses of port 1: one, or FIRST-LAST')
        self.add_argument('--port', type=port, default=8080, help='port of the servers')
        self.add_argument('--offset', default='0.0.1.0',
                          help='what a further pair of ports adds to the addresses of the first')


def addresses(text):
    first, _, last = text.partition('-')
    try:
        pair = [ipaddress.IPv4Address(first), ipaddress.IPv4Address(last or first)]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f'{text} is no address and no FIRST-LAST: {error}') from error
    if pair[0] > pair[1]:
        raise argparse.ArgumentTypeError(f'{text}: the first is after the last')
    return [str(address) for address in pair]


def port(text):
    number = int(text)
    if not 0 < number < 65536:
        raise argparse.ArgumentTypeError(f'{text} is no port: 1 to 65535')
    return number


def positive(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f'{text}: at least 1')
    return number


def rate(text):
    number = float(text)
    if number < 0.5:
        raise argparse.ArgumentTypeError(f'{text} connections a second: at least 0.5')
    return number


def generator(args):
    """The address ranges of clients and servers."""
    return ASTFIPGen(glob=ASTFIPGenGlobal(ip_offset=args.offset),
                     dist_client=ASTFIPGenDist(ip_range=args.clients, distribution='seq'),
                     dist_server=ASTFIPGenDist(ip_range=args.servers, distribution='seq'))


def template(addresses, port, client, server, group=ALLOWED, **client_options):
    """A template: the programs of client and server."""
    return ASTFTemplate(
        client_template=ASTFTCPClientTemplate(program=client, ip_gen=addresses, port=port, **client_options),
        server_template=ASTFTCPServerTemplate(program=server, assoc=ASTFAssociationRule(port=port)),
        tg_name=group)


def message(kind, length):
    """A request or an answer of this many bytes, starting like an HTTP message."""
    start = {'request': 'GET /penstock HTTP/1.1\r\nHost: pod\r\n\r\n', 'answer': 'HTTP/1.1 200 OK\r\n\r\n'}[kind]
    if length < len(start):
        raise ValueError(f'--{kind} {length}: at least {len(start)} bytes')
    return start + 'x' * (length - len(start))
