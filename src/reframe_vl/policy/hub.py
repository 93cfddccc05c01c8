"""Checkpoints by their folder, or by their name on the model hub."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

COMPANIONS = ("*.json", "*.jinja", "*.txt", "*.model")
"""The files that go with the weights: settings, tokenizer, processor, chat template."""


def local_folder(path: str) -> Path:
    """A checkpoint's folder; one that is a name on the model hub is fetched, or found in its cache.

    Raises:
        FileNotFoundError: There is no such folder, and no such name on the hub.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path):
        raise FileNotFoundError(
            f"No checkpoint folder at {path}: set model.path, or what else names it, to one."
        )
    try:
        return Path(snapshot_download(path, allow_patterns=["*.safetensors", *COMPANIONS]))
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise FileNotFoundError(
            f"No checkpoint folder at {path}, nor can a model of this name be had from the hub: "
            f"{error}"
        ) from error
