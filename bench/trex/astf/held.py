"""Many TCP connections open at once, each with a small request at intervals."""

from penstock_astf import Tunables, generator, message, positive, rate, template
from trex.astf.api import ASTFGlobalInfo, ASTFProfile, ASTFProgram


class HeldConnections:
    """Many TCP connections open at once, each with a small request at intervals."""

    def get_profile(self, tunables, **kwargs):
        parser = Tunables(type(self))
        parser.add_argument('--connections', type=positive, default=10_000, help='how many are open at once')
        parser.add_argument('--cps', type=rate, default=1_000.0, help='how many are opened a second until then')
        parser.add_argument('--rounds', type=positive, default=60, help='requests of a connection before it closes')
        parser.add_argument('--interval', type=positive, default=1_000, help='milliseconds between them')
        parser.add_argument('--request', type=positive, default=64, help='bytes of a request')
        parser.add_argument('--answer', type=positive, default=64, help='bytes of an answer')
        args = parser.parse_args(tunables)
        request, answer = message('request', args.request), message('answer', args.answer)
        client, server = ASTFProgram(), ASTFProgram()
        rounds(client, args.rounds, lambda: (client.send(request), client.recv(len(answer), True),
                                             client.delay(args.interval * 1_000)))
        rounds(server, args.rounds, lambda: (server.recv(len(request), True), server.send(answer)))
        addresses = generator(args)
        return ASTFProfile(
            default_ip_gen=addresses,
            default_c_glob_info=patient(args), default_s_glob_info=patient(args),
            templates=template(addresses, args.port, client, server, cps=args.cps, limit=args.connections, cont=True))


def rounds(program, times, body):
    """Repeats a part of the program."""
    program.set_var('round', times)
    program.set_label('again')
    body()
    program.jmp_nz('round', 'again')


def patient(args):
    """Keep-alive intervals that are longer than the time between two requests."""
    info = ASTFGlobalInfo()
    seconds = max(2 * args.interval // 1_000, 30)
    info.tcp.keepinit = info.tcp.keepidle = info.tcp.keepintvl = seconds
    return info


def register():
    return HeldConnections()
