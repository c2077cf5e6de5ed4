"""Simple IMIX: frames of 64, 570 and 1518 bytes, 7 to 4 to 1 by number."""

from penstock_stl import SHORTEST, Ends, Groups, Tunables, latency_stream, padded, stream

MIX = [(64, 7.0), (570, 4.0), (1518, 1.0)]


class Imix:
    """Simple IMIX: frames of 64 (66 over IPv6), 570 and 1518 bytes, 7 to 4 to 1 by number; each size is a connection."""

    def get_streams(self, port_id, direction, tunables, **kwargs):
        args = Tunables(type(self)).with_latency().parse_args(tunables)
        ends, groups = Ends(args, direction), Groups(port_id)
        shortest = SHORTEST[ends.src.version]
        streams = [
            stream(f'allowed-{size}', padded(ends.headers(offset), max(size, shortest)), groups.take(), pps)
            for offset, (size, pps) in enumerate(MIX)
        ]
        if args.latency_pps:
            headers = ends.headers(len(MIX))
            streams.append(latency_stream('latency', headers, shortest, groups.take(), args.latency_pps))
        return streams


def register():
    return Imix()
