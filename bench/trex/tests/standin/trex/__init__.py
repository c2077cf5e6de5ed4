"""Stands in for TRex's client where there is none: the names that the profiles and the runner use, and their signatures.

It builds packets and keeps what it is given; `test_signatures.py` holds it against a real TRex where there is one.
"""
