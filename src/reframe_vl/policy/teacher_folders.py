"""Finds what is wrong with a teacher before it is loaded: its folder, its tokens, its base."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, Literal, TypeAlias

from transformers import AutoTokenizer

from reframe_vl.policy.kinship import differing_token, same_model
from reframe_vl.policy.loading import Policy

logger = logging.getLogger(__name__)

Hosting: TypeAlias = Literal["models", "adapters"]

_FILES: dict[Hosting, tuple[str, tuple[str, ...]]] = {
    "models": (
        "config.json",
        (
            "model.safetensors",
            "model.safetensors.index.json",
            "pytorch_model.bin",
            "pytorch_model.bin.index.json",
        ),
    ),
    "adapters": ("adapter_config.json", ("adapter_model.safetensors", "adapter_model.bin")),
}
"""By hosting: the settings that a teacher's folder has, and its weights in one of some forms."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def checked_folder(student: Policy, path: str, hosting: Hosting, name: str) -> Path:
    """The folder of a teacher that fits its student, as far as can be told without its weights.

    Args:
        student: Whom it teaches.
        path: A run directory or a checkpoint folder.
        hosting: What the folder must hold.
        name: Of the teacher.

    Raises:
        FileNotFoundError: There is no checkpoint at the path, or it lacks a file.
        ValueError: Its tokens are not the student's, or its adapter is of another base.
    """
    folder = checkpoint_folder(path, hosting, f"teachers.{name}")
    if hosting == "adapters":
        check_base(student.path, folder, name)
    if any((folder / file).is_file() for file in _TOKENIZER_FILES):
        check_tokens(student.tokenizer, AutoTokenizer.from_pretrained(folder), name)
    elif hosting == "models":
        raise FileNotFoundError(
            f"teachers.{name}={path}: {folder} has no {_TOKENIZER_FILES[0]}: copy the tokenizer of "
            "its model there, since token ids must mean the same to student and teacher."
        )
    return folder


def checkpoint_folder(path: str, hosting: Hosting, setting: str) -> Path:
    """The folder with a model's weights, or with an adapter, that a path names.

    Args:
        path: A run directory or a checkpoint folder.
        hosting: What the folder must hold.
        setting: Where the path was given, to be named.

    Raises:
        FileNotFoundError: There is none, or it lacks its weights.
        ValueError: The path is a checkpoint's of a run, whose weights stand in no folder.
    """
    start, given = Path(path).expanduser(), f"{setting}={path}"
    if start.suffix == ".ckpt" and start.exists():
        raise ValueError(
            f"{given} holds what a run trained alone. Write it as a model's folder first, with "
            f"python src/merge.py method=consolidate 'checkpoints=[{path}]' output=FOLDER, and "
            f"give {setting}=FOLDER."
        )
    if not start.is_dir():
        raise FileNotFoundError(
            f"{given}: there is no such folder. Give the directory of a finished run, or a "
            "checkpoint folder."
        )
    wanted, weights = _FILES[hosting]
    places = [start, start / "policy", start / "adapter", start / "policy" / "adapter"]
    found = next((place for place in places if (place / wanted).is_file()), None)
    if found is None:
        other: Hosting = "models" if hosting == "adapters" else "adapters"
        fits_other = any((place / _FILES[other][0]).is_file() for place in places)
        held = {"models": "a whole model", "adapters": "an adapter alone"}[other]
        hint = f"; it holds {held}: take hosting={other}" if fits_other else ""
        raise FileNotFoundError(
            f"{given} has no {wanted}, nor has its folder policy: give the directory of a finished "
            f"run, or a checkpoint folder{hint}."
        )
    if not any((found / file).is_file() for file in weights):
        raise FileNotFoundError(
            f"{given}: {found} has {wanted} but no {weights[0]}: copy or save it again."
        )
    return found


def check_tokens(student: Any, teacher: Any, name: str) -> None:
    """Token ids must mean the same to both; rows that only pad a vocabulary may differ.

    Raises:
        ValueError: They do not.
    """
    mine, other = student.get_vocab(), teacher.get_vocab()
    token = differing_token(mine, other)
    if token is not None:
        raise ValueError(
            f"Teacher {name} has id {other.get(token)} for the token {token!r}, the student "
            f"{mine.get(token)}: distillation compares ids, so both need one tokenizer."
        )
    if student.eos_token != teacher.eos_token:
        logger.warning(
            "Teacher %s ends its text with %s, the student with %s: lengths may explode.",
            name,
            teacher.eos_token,
            student.eos_token,
        )


def check_base(student: str, folder: Path, name: str) -> None:
    """Checks that an adapter was trained on the student's base, as far as paths and names tell.

    Args:
        student: The path or name of its base.
        folder: The adapter's.
        name: Of the teacher.

    Raises:
        ValueError: It was not.
    """
    settings = json.loads((folder / "adapter_config.json").read_text())
    trained_on = settings.get("base_model_name_or_path")
    if trained_on and not same_model(trained_on, student):
        raise ValueError(
            f"The adapter of teacher {name} was trained on {trained_on}, the student's base is "
            f"{student}: adapters share one base. Take hosting=models for other teachers. Where "
            "both are the same model in two places, change base_model_name_or_path in "
            f"{folder / 'adapter_config.json'}."
        )
