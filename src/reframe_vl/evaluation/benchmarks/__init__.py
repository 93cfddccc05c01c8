"""Public benchmarks, one a file, each with its reader and its scoring rule (docs/evaluation.md).

Each file but ``base.py`` holds one subclass of ``Benchmark`` of its own and is found by its name.
"""

from __future__ import annotations

from reframe_vl.evaluation.benchmarks.base import Benchmark
from reframe_vl.one_a_file import one_a_file

BENCHMARKS = one_a_file(__name__, __path__, Benchmark)  # type: ignore[type-abstract]
"""Name of a benchmark -> its class."""
