"""Whether checkpoints belong together: by their tokens, and by the base they were trained from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def differing_token(one: Mapping[str, int], other: Mapping[str, int]) -> str | None:
    """The first token that two vocabularies give different ids, or that one of them lacks.

    Example:
        >>> differing_token({"a": 0, "b": 1}, {"a": 0, "b": 2, "c": 1})
        'b'
    """
    return next((t for t in sorted(one.keys() | other.keys()) if one.get(t) != other.get(t)), None)


def model_name(path: str | Path) -> str:
    """A model's own name, whether it is given by its folder, on the hub, or in the hub's cache.

    Example:
        >>> model_name("/models/base2"), model_name("Qwen/Qwen3-VL-4B")
        ('base2', 'Qwen3-VL-4B')
        >>> model_name("/cache/models--Qwen--Qwen3-VL-4B/snapshots/5f1e")
        'Qwen3-VL-4B'
        >>> model_name("/logs/gdgrpo_spatial/RUN/policy")
        'gdgrpo_spatial/RUN/policy'
    """
    path = Path(path)
    if path.parent.name == "snapshots":
        return path.parent.parent.name.rpartition("--")[2]
    # Every run calls what it trained so.
    return "/".join(path.absolute().parts[-3:]) if path.name == "policy" else path.name


def same_model(one: str | Path, other: str | Path) -> bool:
    """Whether two paths or names are of one model: one place, or copies of one name."""
    places = [Path(path).expanduser() for path in (one, other)]
    if all(place.is_dir() for place in places) and places[0].samefile(places[1]):
        return True
    return model_name(one) == model_name(other)
