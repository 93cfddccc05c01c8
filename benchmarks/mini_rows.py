"""Finished runs of a mini experiment as files, and the protocol that they have in common."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common
import yaml

from reframe_vl.evaluation.packing import Items

PROTOCOL_FILES = (
    "src/reframe_vl/mini/*.py",
    "src/reframe_vl/mini/assets/**/*.json",
    "src/reframe_vl/mini/assets/**/*.jinja",
    "src/reframe_vl/mini/assets/**/*.safetensors",
    "configs/scale/mini.yaml",
    "configs/trainer/mini.yaml",
    "configs/data/mini_image.yaml",
    "configs/data/mini_video.yaml",
    "configs/callbacks/ground_drop/constant.yaml",
    "configs/algorithm/gdgrpo.yaml",
    "configs/algorithm/grpo.yaml",
    "configs/reward/gdgrpo.yaml",
    "configs/reward/outcome.yaml",
    "configs/experiment/gdgrpo_spatial.yaml",
    "configs/experiment/gdgrpo_temporal.yaml",
    "configs/experiment/grpo_outcome.yaml",
    "configs/experiment/grpo_outcome_temporal.yaml",
)
"""What a run's outcome is made of, apart from code that must not change it: world and bases, and
the settings of method and training."""

MAKERS = frozenset(
    {
        "base_measure.py",
        "base_training.py",
        "lessons.py",
        "make_base.py",
        "vision_training.py",
        "verifier.py",
    }
)
"""They made the bases, which are compared themselves, or build data sets."""


class ProtocolError(Exception):
    """Rows and the protocol at hand do not belong together."""


@dataclass(frozen=True)
class Settings:
    """How long runs are and how they are evaluated.

    Attributes:
        steps: Of training.
        every: Steps between points of the learning curve.
        items: Of the final evaluation.
        curve_items: The first so many of them are used for the curve.
    """

    steps: int = 240
    every: int = 30
    items: int = 256
    curve_items: int = 128

    def curve_steps(self) -> list[int]:
        """Points between the start, which is the base, and the end."""
        return list(range(self.every, self.steps, self.every))


def protocol(
    settings: Any, root: Path = common.ROOT, files: Sequence[str] = PROTOCOL_FILES
) -> dict[str, Any]:
    """The settings, a digest of every file that counts, and a fingerprint of all of it."""
    digests = {
        path.relative_to(root).as_posix(): digest(path)
        for pattern in files
        for path in sorted(root.glob(pattern))
        if path.name not in MAKERS
    }
    content = {"settings": asdict(settings), "files": digests}
    return {"fingerprint": _sha(json.dumps(content, sort_keys=True).encode()), **content}


def digest(path: Path) -> str:
    """A digest of what a file says: comments, docstrings and layout of code do not count."""
    if path.suffix == ".py":
        return _sha(ast.unparse(_without_docstrings(ast.parse(path.read_text()))).encode())
    if path.suffix == ".yaml":
        return _sha(json.dumps(yaml.safe_load(path.read_text()), sort_keys=True).encode())
    return _sha(path.read_bytes())


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            bare = [s for s in body if not (isinstance(s, ast.Expr) and _is_text(s.value))]
            node.body = bare or [ast.Pass()]  # type: ignore[attr-defined]
    return tree


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


class Rows:
    """A folder with a file for every finished run, the items they share, and their protocol.

    Args:
        folder: Where they lie.
        files: Patterns of the files that decide outcomes.
    """

    def __init__(self, folder: Path, files: Sequence[str] = PROTOCOL_FILES) -> None:
        self.folder = folder
        self.files = files

    @property
    def protocol(self) -> dict[str, Any]:
        """That of the rows.

        Raises:
            ProtocolError: There are no rows yet.
        """
        path = self.folder / "protocol.json"
        if not path.is_file():
            raise ProtocolError(f"No rows in {self.folder}: run the experiment first.")
        content: dict[str, Any] = json.loads(path.read_text())
        return content

    def begin(self, settings: Any) -> str:
        """The fingerprint of the protocol at hand, which from the first row on is that of all.

        Raises:
            ProtocolError: The rows have another one.
        """
        own = protocol(settings, files=self.files)
        if not (self.folder / "protocol.json").is_file():
            common.write_json(
                self.folder / "protocol.json", {**own, "first_commit": common.commit()}
            )
        theirs = self.protocol
        if theirs["fingerprint"] != own["fingerprint"]:
            changed = [
                f"{name}: was {was}, is {now}"
                for part in ("settings", "files")
                for name, was, now in _changes(theirs[part], own[part])
            ]
            raise ProtocolError(
                f"The rows in {self.folder} are of another protocol (commit "
                f"{theirs['first_commit']}) and cannot be mixed with new ones:\n  "
                + "\n  ".join(changed)
                + "\nCheck that commit out to go on with them, or move the folder away to start "
                "anew."
            )
        fingerprint: str = own["fingerprint"]
        return fingerprint

    def has(self, name: str) -> bool:
        """Whether a run is finished."""
        return self._path(name).is_file()

    def read(self, name: str) -> dict[str, Any]:
        """A finished run.

        Raises:
            ProtocolError: It is of another protocol than the folder.
        """
        row: dict[str, Any] = json.loads(self._path(name).read_text())
        if row["fingerprint"] != self.protocol["fingerprint"]:
            raise ProtocolError(
                f"{self._path(name)} is of another protocol ({row['fingerprint']}) than "
                f"{self.folder / 'protocol.json'}: remove it, and it is measured again."
            )
        return row

    def write(self, name: str, row: dict[str, Any]) -> None:
        """Keeps a finished run."""
        common.write_json(self._path(name), row, indent=None)

    def items(self, world: str) -> Items:
        """What the runs on a world were evaluated on."""
        content = json.loads(self._items_path(world).read_text())
        return Items(content["main"], content["conflict"])

    def keep_items(self, world: str, items: dict[str, dict[str, str]]) -> None:
        """Writes the items of a world's first run; those of all others must be the same.

        Raises:
            ProtocolError: They are not, so that runs could not be paired.
        """
        path = self._items_path(world)
        if not path.is_file():
            common.write_json(path, items)
        elif json.loads(path.read_text()) != items:
            raise ProtocolError(
                f"This run was evaluated on other items than those of {path}: runs are compared "
                "item by item, so all need the same."
            )

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _items_path(self, world: str) -> Path:
        return self.folder / "items" / f"{world}.json"


def _changes(old: dict[str, Any], new: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            yield name, old.get(name, "absent"), new.get(name, "absent")
