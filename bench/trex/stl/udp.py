"""One UDP connection, frames of one size."""

from penstock_stl import Ends, Groups, Tunables, latency_stream, padded, stream


class OneConnection:
    """One UDP connection, frames of one size."""

    def get_streams(self, port_id, direction, tunables, **kwargs):
        args = Tunables(type(self)).with_size().with_latency().parse_args(tunables)
        ends, groups = Ends(args, direction), Groups(port_id)
        streams = [stream(f'allowed-{args.size}', padded(ends.headers(), args.size), groups.take())]
        if args.latency_pps:
            streams.append(latency_stream('latency', ends.headers(), args.size, groups.take(), args.latency_pps))
        return streams


def register():
    return OneConnection()
