"""Rollouts on disk: a file of lines for each step, and the images that they saw.

    rollouts/
      step_000012.jsonl                  one rollout a line (``rollout.write_line``)
      images/ab/abcdef….png              by content: written once, however often it was seen

The same rollouts give the same bytes: nothing here knows the time, the machine or the folder.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from PIL import Image

from reframe_vl.data.report import RecordError
from reframe_vl.rollout.json_field import REMEDY, Field
from reframe_vl.rollout.read_line import read_rollout, read_sample, read_view
from reframe_vl.rollout.write_line import sample_fields, to_line
from reframe_vl.types import RolloutGroup, View

_STEP_FILE = re.compile(r"step_(\d{6,})\.jsonl")
_IMAGES = "images"


@dataclass(frozen=True)
class RolloutStore:
    """The rollouts of a run. One process writes a step's file; all may share the images.

    Attributes:
        folder: Made when the first step is written.
    """

    folder: Path

    def write(
        self,
        step: int,
        groups: Sequence[RolloutGroup],
        decode: Callable[[Sequence[int]], str],
    ) -> Path:
        """Writes a step, in place of an earlier file of it.

        A group without rollouts leaves no line, and so no trace.

        Args:
            step: Names the file.
            groups: In the order in which they are read back.
            decode: From token ids to the text that people read.

        Returns:
            The step's file.
        """
        # Prompts are the same in a whole group, carried turns in both contexts of a rollout.
        text = cache(decode)
        lines = []
        for index, group in enumerate(groups):
            sample = sample_fields(group.sample)
            lines += [to_line(index, sample, rollout, text) for rollout in group.rollouts]
        # Before the file, which so never names an image that is not there.
        self.write_images(groups)
        path = self.file(step)
        _write_whole(path, "".join(f"{line}\n" for line in lines).encode("ascii"))
        return path

    def steps(self) -> list[int]:
        """The steps that were written, ascending."""
        if not self.folder.is_dir():
            return []
        names = (_STEP_FILE.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(name[1]) for name in names if name)

    def cut(self, step: int) -> None:
        """Removes this step and all later ones: a resumed run writes them anew. Images stay."""
        for later in self.steps():
            if later >= step:
                self.file(later).unlink()

    def read(self, step: int, images: bool = True) -> list[RolloutGroup]:
        """Reads a step as ``read_rollouts`` does.

        Raises:
            FileNotFoundError: The step was not written.
            RecordError: Its file or an image is damaged.
        """
        path = self.file(step)
        if not path.is_file():
            steps = self.steps()
            known = f"{len(steps)} steps from {steps[0]} to {steps[-1]}" if steps else "no steps"
            raise FileNotFoundError(
                f"{self.folder} holds no rollouts of step {step}, but {known}: ask for one of them."
            )
        return read_rollouts(path, images)

    def file(self, step: int) -> Path:
        """Where a step is written."""
        return self.folder / f"step_{step:06d}.jsonl"

    def write_images(self, groups: Sequence[RolloutGroup]) -> None:
        """Writes what was seen and is not there yet; ``write`` does it too."""
        views = {
            view.hash: view.pixels
            for group in groups
            for rollout in group.rollouts
            for context in rollout.contexts
            for view in context.views
            if view.pixels is not None
        }
        for name, pixels in views.items():
            path = _image_file(self.folder, name)
            if not path.exists():
                png = BytesIO()
                Image.fromarray(pixels).save(png, "PNG", compress_level=1)
                _write_whole(path, png.getvalue())


def rollout_folders(run: Path) -> list[Path]:
    """The folders of a run's rollouts: one, or one a rank.

    Args:
        run: A run directory, or a folder of rollouts.

    Raises:
        FileNotFoundError: There are no rollouts.
    """
    base = run / "rollouts" if (run / "rollouts").is_dir() else run
    found = [f for f in (base, *sorted(base.glob("rank_*"))) if RolloutStore(f).steps()]
    if not found:
        raise FileNotFoundError(
            f"{base} holds no rollouts (step_NNNNNN.jsonl): name a run that kept them "
            "(callbacks.rollout_log.save=true)."
        )
    return found


def read_rollouts(path: Path, images: bool = True) -> list[RolloutGroup]:
    """Reads a step's file; the samples' media are stand-ins (``rollout.recorded_media``).

    Args:
        path: The file; its images lie in the folder beside it.
        images: Whether views get their pixels.

    Raises:
        RecordError: A line cannot be read, or an image is missing or damaged.
    """

    @cache
    def load(view: View) -> View:
        return load_view(view, path)

    def view(field: Field) -> View:
        read = read_view(field)
        return load(read) if images else read

    groups: dict[int, tuple[Any, RolloutGroup]] = {}
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        line = parse_line(text, f"{path}, line {number}")
        index, sample = line["group"].whole(), line["sample"]
        if index not in groups:
            groups[index] = (sample.value, RolloutGroup(read_sample(sample), []))
        first, group = groups[index]
        if sample.value != first:
            sample.wrong(f"the sample of the other lines of group {index}")
        group.rollouts.append(read_rollout(line, view))
    return [group for _, group in groups.values()]


def parse_line(text: bytes, place: str) -> Field:
    """A line of a step's file.

    Raises:
        RecordError: It is not strict JSON.
    """
    try:
        return Field(json.loads(text, parse_constant=_refuse_constant), place)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{place}: not a line of strict JSON ({error}). {REMEDY}") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _image_file(folder: Path, name: str) -> Path:
    return folder / _IMAGES / name[:2] / f"{name}.png"


def load_view(view: View, step_file: Path) -> View:
    """A view with its pixels, from the images beside its step's file.

    Raises:
        RecordError: The image is missing or damaged.
    """
    path = _image_file(step_file.parent, view.hash)
    try:
        with Image.open(path) as image:
            pixels = np.array(image)
    except FileNotFoundError:
        raise RecordError(
            f"{step_file}: the image {path} is missing. Copy the folder {_IMAGES} together with "
            "the rollouts, or read them without images."
        ) from None
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        raise _damaged(step_file, path, str(error)) from error
    loaded = View.of(pixels, view.grid_thw, view.num_tokens, view.modality, view.patch_seconds)
    if loaded.hash != view.hash:
        raise _damaged(step_file, path, "its pixels are not those that its name stands for")
    return replace(view, pixels=pixels)


def _damaged(step_file: Path, path: Path, why: str) -> RecordError:
    return RecordError(
        f"{step_file}: the image {path} cannot be read ({why}). Restore it from its run, or read "
        "the rollouts without images."
    )


def _write_whole(path: Path, content: bytes) -> None:
    """Writes a file that is there as a whole or not at all, whoever else writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        unfinished.write_bytes(content)
        os.replace(unfinished, path)
    finally:
        with suppress(FileNotFoundError):
            unfinished.unlink()
