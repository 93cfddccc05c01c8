"""Tests of the data package; a package, so that it is not taken for ``benchmarks/data.py``."""
