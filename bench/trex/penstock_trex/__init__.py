"""Measures Penstock with a TRex server. `../run.py` is the command."""
