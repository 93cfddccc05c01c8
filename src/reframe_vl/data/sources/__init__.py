"""Adapters from published annotations to records, one a file.

Each file but ``base.py`` holds one subclass of ``Source`` and is found by its name.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from reframe_vl.data.sources.base import Source


def _adapter(name: str) -> type[Source]:
    module = import_module(f"{__name__}.{name}")
    found = [
        thing
        for thing in vars(module).values()
        if isinstance(thing, type)
        and issubclass(thing, Source)
        and thing.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise ImportError(f"{module.__name__} has {len(found)} subclasses of Source: give it one.")
    return found[0]


SOURCES: dict[str, type[Source]] = {
    module.name: _adapter(module.name)
    for module in pkgutil.iter_modules(__path__)
    if module.name != "base"
}
"""Name of a source -> its adapter, made from (annotations, media folder)."""
