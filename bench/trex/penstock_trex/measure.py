"""The measurements of each profile, and the checks before them."""

import shlex

from . import library
from .failure import bad_input
from .search import Search, summary
from .stateful import Stateful
from .stateless import Stateless

# Latency is reported at these shares of the no-drop rate.
LATENCY_AT = (0.1, 0.5, 0.9)


class Refused(Exception):
    """A check failed, so measurements of this profile would be invalid."""


def named(mode, text, fixed):
    """A profile's name and tunables; `fixed` has the values of those that are not given."""
    words = shlex.split(text)
    if not words or not library.profile_file(mode, words[0]).is_file() or words[0].startswith('penstock'):
        there = sorted(file.stem for file in library.profile_file(mode, 'x').parent.glob('*.py'))
        there = [name for name in there if not name.startswith('penstock')]
        raise bad_input(f'--profile {text!r}: no such profile; there are {", ".join(there)}')
    name, tunables = words[0], words[1:]
    given = {word.split('=')[0] for word in tunables}
    for key, value in fixed.items():
        if key not in given:
            tunables += [key, str(value)]
    return name, tunables


def checked(trial, what):
    """Checks at a low rate that allowed packets arrive and denied ones do not."""
    if trial.sent == 0:
        raise Refused(f'no {what} were sent')
    if trial.denied_received:
        raise Refused(f'{trial.denied_received} {what} arrived that policy should deny: is it in effect?')
    rate = f'at only {trial.offered:.0f} a second'
    if trial.loss_of_others > 0:
        again = f', and {trial.again} SYNs sent again' if trial.again else ''
        raise Refused(f'{trial.lost} of {trial.sent} {what} were lost {rate}{again}: does the policy allow them, and does every '
                      'route lead to the right port?')
    if trial.loss > 0:
        raise Refused(f'TRex itself lost {trial.generator_lost} packets {rate}: is its core shared?')


def guarded(trial):
    """Ends the measurement if a denied packet arrives, at any rate."""
    if trial.denied_received:
        raise Refused(f'{trial.denied_received} arrived that policy denies, at {trial.offered:.0f} a second')
    return trial


def repeated(measure, args, lowest, allowed):
    def search():
        return Search(lambda rate, seconds: guarded(measure(rate, seconds)), lowest, args.highest, args.precision,
                      args.short, args.long).highest_with(allowed)
    return summary([search() for _ in range(args.repetitions)])


def stateless(api, client, ports, args, text, result):
    """No-drop rate, partial-drop rate, and latency at shares of the no-drop rate, each put into `result` when it is there."""
    ends = {'--src': ports[0].address, '--dst': ports[1].address}
    name, tunables = named('stl', text, ends)
    profile = Stateless(api, client, ports, name, tunables, args.both)
    lowest = max(args.lowest, profile.lowest)
    if lowest >= args.highest:
        raise Refused(f'its latency streams need at least {lowest:.0f} packets a second: lower --latency-pps or raise --highest')
    checked(profile.trial(lowest, args.short), 'packets')
    result.update(tunables=tunables, rate_unit='packets/s', ndr=repeated(profile.trial, args, lowest, 0.0))
    result['pdr'] = {'loss': args.loss, **repeated(profile.trial, args, lowest, args.loss)}
    result['latency'] = []
    if args.latency_pps and result['ndr']['median']:
        _, tunables = named('stl', text, {**ends, '--latency-pps': args.latency_pps})
        for part in LATENCY_AT:
            rate = part * result['ndr']['median']
            # Fresh streams for each point: TRex's latency figures are of a stream's whole life.
            timed = Stateless(api, client, ports, name, tunables, args.both)
            if not timed.lowest:
                # The profile is asked for none.
                break
            point = {'share_of_ndr': part, 'offered': rate, 'latency_pps': timed.fit(rate)}
            if point['latency_pps']:
                point.update(timed.latencies(rate, args.long))
            else:
                point.update(error='no room for a latency stream at this rate', streams=[])
            result['latency'].append(point)


def stateful(api, client, ports, args, text, result):
    """Connections per second for the profile `connections`; throughput for the others."""
    ends = {'--clients': ports[0].address, '--servers': ports[1].address}
    name, tunables = named('astf', text, ends)
    profile = Stateful(api, client, ports, name, tunables)
    if name != 'connections':
        sustained = [profile.sustained(args.long, args.short) for _ in range(args.repetitions)]
        if not all(one['counters']['allowed']['client']['tcps_connects'] for one in sustained):
            raise Refused('no connection was established: does the policy allow them?')
        result.update(tunables=tunables, sustained=sustained)
        return
    checked(profile.trial(min(args.lowest, 100), args.short), 'connections')
    result.update(tunables=tunables, rate_unit='connections/s', no_loss=repeated(profile.trial, args, args.lowest, 0.0))
