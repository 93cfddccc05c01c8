"""Adapters from published annotations to records, one a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from reframe_vl.data.sources.base import Source
from reframe_vl.data.sources.visual_cot_sroie import VisualCotSroie

SOURCES: dict[str, Callable[[Path, Path], Source]] = {"visual_cot_sroie": VisualCotSroie}
"""Name of a source -> its adapter, made from (annotations, media folder)."""
