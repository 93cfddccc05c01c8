"""Public benchmarks, one a file, each with its reader and its scoring rule (docs/evaluation.md).

Each file but ``base.py`` holds one subclass of ``Benchmark`` of its own and is found by its name.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from reframe_vl.evaluation.benchmarks.base import Benchmark


def _benchmark(name: str) -> type[Benchmark]:
    module = import_module(f"{__name__}.{name}")
    found = [
        thing
        for thing in vars(module).values()
        if isinstance(thing, type)
        and issubclass(thing, Benchmark)
        and thing.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise ImportError(f"{module.__name__} has {len(found)} benchmarks: give it one.")
    return found[0]


BENCHMARKS: dict[str, type[Benchmark]] = {
    module.name: _benchmark(module.name)
    for module in pkgutil.iter_modules(__path__)
    if module.name != "base"
}
"""Name of a benchmark -> its class."""
