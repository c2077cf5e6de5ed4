"""The library that the tests use: TRex's own, or the stand-in."""

import importlib

from penstock_trex import library

from . import TREX_DIR


def api(mode):
    return library.load(mode, TREX_DIR) if TREX_DIR else importlib.import_module(f'trex.{mode}.api')
