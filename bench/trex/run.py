#!/usr/bin/env python3
"""Measures Penstock with a TRex server, by TRex's own Python client. See docs/trex.md, and --help for examples."""

import datetime
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from penstock_trex import arguments, document, library, measure, stateless  # noqa: E402
from penstock_trex.failure import FELL_SHORT, MEASURED, NO_SERVER, Failure, bad_input  # noqa: E402


def main(words):
    args = arguments.parser().parse_args(words)
    try:
        return check(args) if args.command == 'check' else run(args)
    except Failure as failure:
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
    try:
        found = described(args, ports, client)
        short = False
        for text in texts:
            print(f'{args.command} {text}')
            entry = measured(api, client, ports, args, text)
            short |= 'error' in entry
            found['profiles'].append(entry)
            document.write(args.output, found)
    except api.TRexError as error:
        raise Failure(NO_SERVER, f'the TRex server at {args.server} gave up: {error}') from error
    finally:
        client.disconnect()
    print(f'written to {args.output}')
    return FELL_SHORT if short else MEASURED


def measured(api, client, ports, args, text):
    """The results of one profile, or why there are none."""
    entry = {'profile': text.split()[0], 'asked': text}
    try:
        tunables, result = getattr(measure, {'stl': 'stateless', 'astf': 'stateful'}[args.command])(
            api, client, ports, args, text)
    except measure.Refused as refused:
        print(f'  not measured: {refused}')
        return {**entry, 'error': str(refused)}
    for name in ('ndr', 'pdr', 'no_loss'):
        if name in result:
            rates = result[name]
            print(f'  {name:8} {rates["median"]:12,.0f} {result["rate_unit"]}  ({rates["lowest"]:,.0f} to '
                  f'{rates["highest"]:,.0f}), limited by {", ".join(rates["limited_by"])}')
    return {**entry, 'tunables': tunables, **result}


def described(args, ports, client):
    """Host, versions and time of the run."""
    system = client.get_server_system_info()
    return {'mode': args.command, 'time': datetime.datetime.now(datetime.timezone.utc).isoformat(timespec='seconds'),
            'server': {'address': args.server, 'version': client.get_server_version(),
                       'host': system.get('hostname'), 'cores': system.get('dp_core_count'),
                       'processor': system.get('core_type')},
            'ports': [{**port.as_json(), **{key: system['ports'][port.number].get(key) for key in ('driver', 'speed')}}
                      for port in ports],
            'trials': {'short_s': args.short, 'long_s': args.long, 'repetitions': args.repetitions,
                       'precision': args.precision},
            'profiles': []}


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
