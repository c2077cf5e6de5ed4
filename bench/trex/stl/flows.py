"""Many UDP connections at once, in rotation."""

from penstock_stl import Ends, Groups, Tunables, aligned, latency_stream, padded, stream, varied


class ManyFlows:
    """Many UDP connections at once, one packet of each in rotation. More than 32,768 use further destination ports."""

    def get_streams(self, port_id, direction, tunables, **kwargs):
        args = Tunables(type(self)).with_size().with_flows(10_000).with_latency().parse_args(tunables)
        aligned(args)
        ends, groups = Ends(args, direction), Groups(port_id)
        packet = padded(ends.headers(), args.size)
        streams = [stream(f'allowed-{args.flows}', packet, groups.take(), vm=varied(ends, args.flows))]
        if args.latency_pps:
            streams.append(latency_stream('latency', ends.headers(), args.size, groups.take(), args.latency_pps))
        return streams


def register():
    return ManyFlows()
