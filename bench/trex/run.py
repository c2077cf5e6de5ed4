#!/usr/bin/env python3
"""Measures Penstock with a TRex server, by TRex's own Python client. See docs/trex.md, and --help for examples."""

import datetime
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from penstock_trex import arguments, document, library, measure, stateless  # noqa: E402
from penstock_trex.failure import FELL_SHORT, MEASURED, NO_SERVER, Failure, bad_input, interrupted  # noqa: E402


def main(words):
    args = arguments.parser().parse_args(words)
    try:
        return check(args) if args.command == 'check' else run(args)
    except (Failure, KeyboardInterrupt) as error:
        failure = interrupted(error) or error
        print(f'run.py: {failure}', file=sys.stderr)
        return failure.code


def check(args):
    """Loads every profile, in both directions, with TRex's own library."""
    stl, astf = library.load('stl', args.trex_dir), library.load('astf', args.trex_dir)
    failed = 0
    for mode, texts in (('stl', arguments.STATELESS), ('astf', arguments.STATEFUL)):
        for text in texts:
            name, tunables = measure.named(mode, text, {})
            file = str(library.profile_file(mode, name))
            try:
                if mode == 'stl':
                    streams = [len(stl.STLProfile.load(file, direction=direction, port_id=direction, tunables=list(tunables))
                                   .get_streams()) for direction in (0, 1)]
                    contents = f'{streams[0]} and {streams[1]} streams'
                else:
                    contents = f'{len(astf.ASTFProfile.load(file, tunables=list(tunables)).to_json()["templates"])} templates'
                print(f'{mode:5} {text:40} {contents}')
            except stl.TRexError as error:
                failed += 1
                print(f'{mode:5} {text:40} does not load: {error}')
    return FELL_SHORT if failed else MEASURED


def run(args):
    """Measures the profiles and writes the document, even if some profiles could not be measured."""
    ports = [stateless.Port(text) for text in args.port]
    if len(ports) != 2:
        raise bad_input(f'--port is given {len(ports)} times: twice, the sender first')
    if args.repetitions < 1 or not args.lowest < args.highest:
        raise bad_input('--repetitions is at least 1, and --lowest below --highest')
    texts = args.profile or args.defaults
    for text in texts:
        measure.named(args.command, text, {})
    if Path(args.output).exists():
        document.read(args.output)
    api = library.load(args.command, args.trex_dir)
    client = stateless.connect(api, api.STLClient if args.command == 'stl' else api.ASTFClient, args.server, ports)
    profiles, whole = [], True
    try:
        found = {**described(args, ports, client), 'profiles': profiles}
        for text in texts:
            print(f'{args.command} {text}')
            entry = {'profile': text.split()[0], 'asked': text}
            try:
                whole &= measured(api, client, ports, args, entry)
            except (api.TRexError, KeyboardInterrupt):
                if 'ndr' in entry:
                    profiles.append({**entry, 'error': 'not finished: the run ended here'})
                    document.write(args.output, found)
                raise
            profiles.append(entry)
            document.write(args.output, found)
    except (api.TRexError, KeyboardInterrupt) as error:
        failure = interrupted(error) or Failure(NO_SERVER, f'the TRex server at {args.server} gave up: {error}')
        kept = f'; what was measured until then is in {args.output}' if profiles else ''
        raise Failure(failure.code, f'{failure}{kept}') from error
    finally:
        client.disconnect()
    print(f'written to {args.output}')
    return MEASURED if whole else FELL_SHORT


def measured(api, client, ports, args, entry):
    """Puts a profile's results into its entry, or why there are none; says whether every figure is there."""
    try:
        of_mode = {'stl': measure.stateless, 'astf': measure.stateful}[args.command]
        of_mode(api, client, ports, args, entry['asked'], entry)
    except measure.Refused as refused:
        print(f'  not measured: {refused}')
        # A figure that was there before the check failed is no more valid.
        for figure in entry.keys() - {'profile', 'asked'}:
            del entry[figure]
        entry['error'] = str(refused)
        return False
    rates = [(name, entry[name]) for name in ('ndr', 'pdr', 'no_loss') if name in entry]
    for name, found in rates:
        rate = (f'{found["median"]:12,.0f} {entry["rate_unit"]}  ({found["lowest"]:,.0f} to {found["highest"]:,.0f})'
                if found['median'] else 'no rate found')
        print(f'  {name:8} {rate}, limited by {", ".join(found["limited_by"])}')
    for point in entry.get('latency', []):
        if 'error' in point:
            print(f'  latency at {point["offered"]:,.0f} packets/s: {point["error"]}')
    return all(found['median'] or 'generator' not in found['limited_by'] for _, found in rates)


def described(args, ports, client):
    """Host, versions and time of the run."""
    system = client.get_server_system_info()
    return {'mode': args.command, 'time': datetime.datetime.now(datetime.timezone.utc).isoformat(timespec='seconds'),
            'server': {'address': args.server, 'version': client.get_server_version(),
                       'host': system.get('hostname'), 'cores': system.get('dp_core_count'),
                       'processor': system.get('core_type')},
            'ports': [{**port.as_json(), 'driver': system['ports'][port.number].get('driver'),
                       'speed': client.get_port_attr(port.number)['speed']} for port in ports],
            'trials': {'short_s': args.short, 'long_s': args.long, 'repetitions': args.repetitions,
                       'precision': args.precision}}


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
