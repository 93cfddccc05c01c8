"""Finds classes by the files they stand in: a new one is a new file, and no list knows of it."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable
from importlib import import_module
from typing import TypeVar

T = TypeVar("T")


def one_a_file(package: str, path: Iterable[str], base: type[T]) -> dict[str, type[T]]:
    """The one subclass of ``base`` in each file of a package but ``base.py``, by the file's name.

    Args:
        package: Its dotted name.
        path: Its ``__path__``.
        base: What they are subclasses of.

    Raises:
        ImportError: A file has none, or several.
    """
    names = [module.name for module in pkgutil.iter_modules(path) if module.name != "base"]
    return {name: _only_one(f"{package}.{name}", base) for name in names}


def _only_one(name: str, base: type[T]) -> type[T]:
    found = [
        thing
        for thing in vars(import_module(name)).values()
        if isinstance(thing, type) and issubclass(thing, base) and thing.__module__ == name
    ]
    if len(found) != 1:
        raise ImportError(f"{name} has {len(found)} subclasses of {base.__name__}: give it one.")
    return found[0]
