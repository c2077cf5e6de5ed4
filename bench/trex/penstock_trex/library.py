"""TRex's own Python client, found below `TREX_DIR`."""

import importlib
import os
import sys
import warnings
from pathlib import Path

from .failure import NO_TREX, Failure

# A server's installation, a client package, a source tree.
PLACES = ['automation/trex_control_plane/interactive', 'interactive', 'trex_client/interactive',
          'scripts/automation/trex_control_plane/interactive']


def path(folder):
    """The folder below this one that has the package `trex`."""
    if not folder:
        raise Failure(NO_TREX, 'no TRex: set TREX_DIR to the folder that TRex was unpacked to (it has automation/ in it)')
    for place in PLACES:
        if (Path(folder) / place / 'trex' / '__init__.py').is_file():
            return Path(folder) / place
    raise Failure(NO_TREX, f'no TRex client in {folder}: none of {", ".join(PLACES)} is in it')


def load(mode, folder=None):
    """The module `trex.stl.api` or `trex.astf.api`."""
    where = str(path(folder or os.environ.get('TREX_DIR')))
    if where not in sys.path:
        sys.path.insert(0, where)
    try:
        with warnings.catch_warnings():
            # Warnings of the libraries that TRex ships; a user can do nothing about them.
            warnings.simplefilter('ignore')
            return importlib.import_module(f'trex.{mode}.api')
    except ImportError as error:
        raise Failure(NO_TREX, f'the TRex client in {where} cannot be imported: {error}') from error


def profile_file(mode, name):
    """The file of one of these profiles."""
    return Path(__file__).parent.parent / mode / f'{name}.py'
