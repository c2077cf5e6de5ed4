"""Bulk flows: a few long TCP connections at full throughput."""

from penstock_astf import Tunables, generator, positive, template
from trex.astf.api import ASTFGlobalInfo, ASTFProfile, ASTFProgram

CHUNK = 64 * 1024


class Bulk:
    """A few TCP connections on which the server sends as fast as it can."""

    def get_profile(self, tunables, **kwargs):
        parser = Tunables(type(self))
        parser.add_argument('--streams', type=positive, default=8, help='how many connections at once')
        parser.add_argument('--megabytes', type=positive, default=1_024, help='2^20 bytes that each carries')
        parser.add_argument('--mss', type=positive, default=1_460, help='bytes of a segment')
        parser.add_argument('--window', type=positive, default=1_024, help='2^10 bytes of send and receive buffers')
        args = parser.parse_args(tunables)
        chunks = args.megabytes * 2**20 // CHUNK
        client, server = ASTFProgram(), ASTFProgram()
        client.send('x')
        loop(client, chunks, lambda: client.recv(CHUNK, True))
        server.recv(1)
        loop(server, chunks, lambda: server.send('x', CHUNK, 'x'))
        addresses = generator(args)
        return ASTFProfile(
            default_ip_gen=addresses, default_c_glob_info=buffers(args), default_s_glob_info=buffers(args),
            templates=template(addresses, args.port, client, server, cps=float(args.streams), limit=args.streams, cont=True))


def loop(program, times, body):
    """Repeats a part of the program."""
    program.set_var('chunk', times)
    program.set_label('more')
    body()
    program.jmp_nz('chunk', 'more')


def buffers(args):
    """Sets the segment size and the windows."""
    info = ASTFGlobalInfo()
    info.tcp.mss = args.mss
    info.tcp.rxbufsize = info.tcp.txbufsize = args.window * 1_024
    return info


def register():
    return Bulk()
