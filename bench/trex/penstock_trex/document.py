"""The JSON document that a run writes; docs/trex.md says what is in it."""

import json
from pathlib import Path

from .failure import bad_input

FORMAT = 1


def write(path, run):
    """Adds a run to the document; replaces an earlier run of the same kind."""
    file = Path(path)
    runs = [old for old in read(file)['runs'] if old['mode'] != run['mode']] if file.exists() else []
    file.parent.mkdir(parents=True, exist_ok=True)
    whole = file.with_name(file.name + '.new')
    whole.write_text(json.dumps({'format': FORMAT, 'runs': [*runs, run]}, indent=1) + '\n')
    whole.replace(file)


def read(file):
    try:
        document = json.loads(Path(file).read_text())
        if document['format'] == FORMAT and isinstance(document['runs'], list):
            return document
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise bad_input(f'--output {file}: it is there, and is no result of run.py ({error!r}): name another file') from error
    raise bad_input(f'--output {file}: it is there, in another format than {FORMAT}: name another file')
