"""Allowed and denied connections side by side."""

from penstock_stl import Ends, Groups, Tunables, aligned, latency_stream, padded, port, share, stream, varied


class AllowedAndDenied:
    """Allowed connections together with denied ones. No denied packet may arrive."""

    def get_streams(self, port_id, direction, tunables, **kwargs):
        parser = Tunables(type(self)).with_size().with_flows(1_000).with_latency()
        parser.add_argument('--denied', type=share, default=0.3, help='share of packets that policy denies')
        parser.add_argument('--denied-dport', type=port, default=9090, help='destination port that policy denies')
        args = parser.parse_args(tunables)
        aligned(args)
        ends, groups = Ends(args, direction), Groups(port_id)
        vm = varied(ends, args.flows)
        streams = [stream('allowed', padded(ends.headers(), args.size), groups.take(), 1 - args.denied, vm)]
        # Replies of a denied connection would belong to no open connection.
        if ends.forward:
            denied = padded(ends.headers(dport=args.denied_dport), args.size)
            streams.append(stream('denied', denied, groups.take(), args.denied, vm))
        if args.latency_pps:
            streams.append(latency_stream('latency', ends.headers(), args.size, groups.take(), args.latency_pps))
        return streams


def register():
    return AllowedAndDenied()
