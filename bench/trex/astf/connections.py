"""New TCP connections a second, each with one HTTP-like request and answer."""

from penstock_astf import DENIED, Tunables, generator, message, port, positive, rate, template
from trex.astf.api import ASTFProfile, ASTFProgram


class NewConnections:
    """New TCP connections a second, each with one HTTP-like request and answer, then closed.

    With --denied-port, also connections that policy denies: none of them may be established.
    """

    def get_profile(self, tunables, **kwargs):
        parser = Tunables(type(self))
        parser.add_argument('--cps', type=rate, default=1_000.0, help='connections a second')
        parser.add_argument('--request', type=positive, default=128, help='bytes of a request')
        parser.add_argument('--answer', type=positive, default=1_024, help='bytes of an answer')
        parser.add_argument('--denied-port', type=port, help='port of the servers that policy denies')
        parser.add_argument('--denied-cps', type=rate, default=100.0, help='connections a second to the denied port')
        args = parser.parse_args(tunables)
        addresses = generator(args)
        templates = [template(addresses, args.port, *exchange(args), cps=args.cps)]
        if args.denied_port:
            client, server = exchange(args)
            templates.append(template(addresses, args.denied_port, client, server, DENIED, cps=args.denied_cps))
        return ASTFProfile(default_ip_gen=addresses, templates=templates)


def exchange(args):
    """The programs of client and server: one request, one answer."""
    request, answer = message('request', args.request), message('answer', args.answer)
    client, server = ASTFProgram(), ASTFProgram()
    client.send(request)
    client.recv(len(answer))
    server.recv(len(request))
    server.send(answer)
    return client, server


def register():
    return NewConnections()
