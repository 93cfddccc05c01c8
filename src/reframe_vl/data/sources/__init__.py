"""Adapters from published annotations to records, one a file.

Each file but ``base.py`` holds one subclass of ``Source`` and is found by its name.
"""

from __future__ import annotations

from reframe_vl.data.sources.base import Source
from reframe_vl.one_a_file import one_a_file

SOURCES = one_a_file(__name__, __path__, Source)  # type: ignore[type-abstract]
"""Name of a source -> its adapter, made from (annotations, media folder)."""
