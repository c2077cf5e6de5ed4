"""How TRex loads a profile from a file."""

import importlib
import os
import sys


class TRexError(Exception):
    pass


class TRexTimeoutError(TRexError):
    def __init__(self, timeout):
        super().__init__(f"Timeout: operation took more than '{timeout}' seconds")


def profile(filename, make, **arguments):
    """What `make` makes of the module's `register()`; nothing where the tunables ask for help."""
    if not os.path.isfile(filename):
        raise TRexError(f"File '{filename}' does not exist")
    folder, name = os.path.dirname(filename), os.path.basename(filename).split('.')[0]
    sys.path.insert(0, folder)
    try:
        module = importlib.reload(importlib.import_module(name))
        return make(module.register(), **arguments)
    except SystemExit:
        return None
    except Exception as error:
        raise TRexError(repr(error)) from error
    finally:
        sys.path.remove(folder)
