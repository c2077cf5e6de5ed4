"""A stream and a latency stream for each of several pods."""

import argparse

from penstock_stl import Ends, Groups, Tunables, latency_stream, padded, stream


class PodByPod:
    """A stream and a latency stream for each pod, to separate the loss and latency of each pod.

    Port 0 is outside and sends to every pod; what comes back is counted by group, on whichever port it arrives.
    """

    def get_streams(self, port_id, direction, tunables, **kwargs):
        parser = Tunables(type(self)).with_size().with_latency()
        parser.add_argument('--pods', default='', help='addresses of the pods, with commas; without: --dst alone')
        args = parser.parse_args(tunables)
        addresses = [address for address in args.pods.split(',') if address] or [args.dst]
        groups, streams = Groups(port_id), []
        for address in addresses:
            ends = Ends(argparse.Namespace(**{**vars(args), 'dst': address}), direction)
            streams.append(stream(f'allowed-{address}', padded(ends.headers(), args.size), groups.take()))
            if args.latency_pps:
                name = f'latency-{address}'
                streams.append(latency_stream(name, ends.headers(1), args.size, groups.take(), args.latency_pps))
        return streams


def register():
    return PodByPod()
