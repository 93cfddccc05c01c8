"""Questions as lmms-eval puts them, for the agent: a text, and what is to be seen."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from reframe_vl.data.formats.media_folder import VIDEO_SUFFIXES
from reframe_vl.data.formats.rows import Refused
from reframe_vl.data.media import ImageFile, to_rgb
from reframe_vl.data.video import VideoFile
from reframe_vl.evaluation.releases.media import MediaStore
from reframe_vl.types import Answer, Modality, Sample


def question(name: str, text: str, visuals: Sequence[Any], store: MediaStore) -> Sample:
    """The sample of a question; its answer is lmms-eval's to know.

    Args:
        name: Of the question: the sample's id.
        text: With the options, where there are any.
        visuals: One video by its path, or images: Pillow's or by their paths.
        store: Where images are kept while the agent looks at them.

    Raises:
        ValueError: The agent cannot look at this.
    """
    try:
        media = _media(visuals, store)
    except (Refused, OSError) as error:
        why = error.message if isinstance(error, Refused) else str(error)
        raise ValueError(f"{name}: {why} Mend the task's data, or leave the task out.") from error
    modality = Modality.IMAGE if isinstance(media, ImageFile) else Modality.VIDEO
    return Sample(name, modality, media, text.strip(), Answer("open", ""), split="test")


def _media(visuals: Sequence[Any], store: MediaStore) -> ImageFile | VideoFile:
    if len(visuals) == 1 and _is_video(visuals[0]):
        return VideoFile(Path(visuals[0]).absolute(), store.rule)
    if visuals and all(_is_image(visual) for visual in visuals):
        return store.side_by_side([_bytes(visual) for visual in visuals])
    kinds = ", ".join(sorted({type(visual).__name__ for visual in visuals})) or "nothing"
    raise Refused(
        "media_unknown", f"the agent looks at images or at one video, and it was given {kinds}."
    )


def _is_video(visual: Any) -> bool:
    return isinstance(visual, str | Path) and Path(visual).suffix.lower() in VIDEO_SUFFIXES


def _is_image(visual: Any) -> bool:
    return isinstance(visual, Image.Image | str | Path) and not _is_video(visual)


def _bytes(visual: Image.Image | str | Path) -> bytes:
    """An image as a file holds it."""
    if not isinstance(visual, Image.Image):
        return Path(visual).read_bytes()
    stream = io.BytesIO()
    # Large images would take longer to compress than to look at.
    to_rgb(ImageOps.exif_transpose(visual)).save(stream, "PNG", compress_level=1)
    return stream.getvalue()
