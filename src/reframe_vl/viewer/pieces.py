"""The text of each single token, which rollout records do not hold."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from tokenizers import Tokenizer

from reframe_vl.viewer.reading import Run

logger = logging.getLogger(__name__)

_FILE = "tokenizer.json"
_CUT = "\ufffd"
_MOST = 4
"""Tokens that one character may be cut into."""


@dataclass
class Splitter:
    """Cuts a span's text where its tokens meet."""

    tokenizer: Tokenizer
    _known: dict[int, str] = field(default_factory=dict)

    def split(self, token_ids: Sequence[int], text: str) -> list[str] | None:
        """One text a token; of the tokens of a cut character the last has it, the others nothing.

        Returns:
            None where the tokens are not those of the text: they are another tokenizer's.
        """
        pieces: list[str] = []
        done, waiting = 0, []
        for token_id in token_ids:
            waiting.append(token_id)
            piece = self._one(token_id) if len(waiting) == 1 else self._decode(waiting)
            if _CUT in piece and len(waiting) < _MOST and not text.startswith(piece, done):
                continue
            if not text.startswith(piece, done):
                return None
            pieces += [""] * (len(waiting) - 1) + [piece]
            done, waiting = done + len(piece), []
        # What the limit of a turn cut within a character ends in a sign of its own.
        if waiting:
            pieces += [""] * (len(waiting) - 1) + [text[done:]]
            done = len(text)
        return pieces if done == len(text) else None

    def _one(self, token_id: int) -> str:
        if token_id not in self._known:
            self._known[token_id] = self._decode([token_id])
        return self._known[token_id]

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text


def find_splitter(run: Run, named: Path | None = None) -> Splitter | None:
    """The tokenizer of a run, from what is on this machine alone.

    Args:
        run: Looked through for its exported policy, then for the model that it started from.
        named: A tokenizer.json, or a folder that holds one, that is taken in place of it.

    Raises:
        FileNotFoundError: ``named`` is not there.
    """
    if named is not None:
        path = named / _FILE if named.is_dir() else named
        if not path.is_file():
            raise FileNotFoundError(f"No tokenizer at {path}: give a {_FILE}, or its folder.")
        return Splitter(Tokenizer.from_file(str(path)))
    places = [run.path / "policy" / _FILE]
    if run.model:
        places.append(Path(run.model).expanduser() / _FILE)
        if not run.model.startswith((".", "/", "~")):
            cached = try_to_load_from_cache(run.model, _FILE)
            places += [Path(cached)] if isinstance(cached, str) else []
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        logger.warning(
            "Run %s: no tokenizer is at hand, so turns are coloured as a whole. Name one: "
            "--tokenizer FOLDER.",
            run.name,
        )
        return None
    return Splitter(Tokenizer.from_file(str(found)))
