"""Tests of the profiles and the runner: `python3 -m unittest discover -t bench/trex -s bench/trex/tests`.

With TREX_DIR the profiles are loaded by TRex's own library, and the stand-in is held against it; without, by the stand-in.
"""

import os
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
STANDIN = FOLDER / 'standin'
TREX_DIR = os.environ.get('TREX_DIR')
sys.dont_write_bytecode = True
sys.path.insert(0, str(FOLDER.parent))
if not TREX_DIR:
    sys.path.insert(0, str(STANDIN))
WHICH = f'the TRex client in {TREX_DIR}' if TREX_DIR else 'a stand-in for the TRex client (TREX_DIR is not set)'
