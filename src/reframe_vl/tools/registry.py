"""The tools that a run offers by default."""

from __future__ import annotations

from reframe_vl.tools.base import Tool
from reframe_vl.tools.crop_image import CropImage
from reframe_vl.tools.select_frames import SelectFrames
from reframe_vl.types import Modality


def default_tools(modality: Modality | None = None) -> list[Tool]:
    """The tools for a modality, or for all of them where it is None."""
    tools: list[Tool] = [CropImage(), SelectFrames()]
    return [tool for tool in tools if modality is None or tool.modality is modality]
