"""From parts of a message to spans of token ids."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from reframe_vl.tools.codec import PLACEHOLDER, VIDEO_PLACEHOLDER
from reframe_vl.types import Markup, Modality, Part, Provenance, Quoted, Span, View

_TOKENISING = threading.Lock()


class Encoder:
    """Tokenises the pieces of a chat once; sampled ids never pass through it.

    Args:
        tokenizer: A fast transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Raises ValueError where the tokenizer does not know the placeholder of images."""
        self.tokenizer = tokenizer
        ids = tokenizer.get_vocab()
        if PLACEHOLDER not in ids:
            raise ValueError(
                f"The tokenizer has no token {PLACEHOLDER}: it is not of a vision-language model."
            )
        self._placeholders: dict[Modality, int | None] = {
            Modality.IMAGE: ids[PLACEHOLDER],
            Modality.VIDEO: ids.get(VIDEO_PLACEHOLDER),
        }
        # Template text recurs in every rollout.
        self._markup = lru_cache(maxsize=4096)(self._tokenise_markup)
        # A question stands in a prompt with its media and in one without.
        self._quoted = lru_cache(maxsize=64)(self._tokenise_quoted)

    def _tokenise_markup(self, text: str) -> tuple[int, ...]:
        return self._tokenise(text, split_special_tokens=False)

    def _tokenise_quoted(self, text: str) -> tuple[int, ...]:
        # A question that spells a control token must not become one.
        return self._tokenise(text, split_special_tokens=True)

    def _tokenise(self, text: str, split_special_tokens: bool) -> tuple[int, ...]:
        # A fast tokenizer keeps this setting between calls, so threads may not share it.
        with _TOKENISING:
            encoded = self.tokenizer(
                text, add_special_tokens=False, split_special_tokens=split_special_tokens
            )
        return tuple(encoded["input_ids"])

    def span(self, parts: Iterable[Part], provenance: Provenance) -> Span:
        """Encodes parts into one span: each view becomes one placeholder.

        Raises:
            ValueError: A part is a video, for which the tokenizer has no placeholder.
        """
        ids: list[int] = []
        views: list[View] = []
        for part in parts:
            match part:
                case View():
                    ids.append(self._placeholder(part.modality))
                    views.append(part)
                case Markup(text):
                    ids.extend(self._markup(text))
                case Quoted(text):
                    ids.extend(self._quoted(text))
        return Span(provenance, tuple(ids), views=tuple(views))

    def _placeholder(self, modality: Modality) -> int:
        token_id = self._placeholders[modality]
        if token_id is None:
            raise ValueError(
                f"The tokenizer has no token {VIDEO_PLACEHOLDER}: its model takes no native video. "
                "Set rollout.settings.prompt.video_as=frames."
            )
        return token_id

    def cut(self, text: str, max_tokens: int, keep_end: bool = False) -> str:
        """A tool's words, of which the first ``max_tokens`` tokens are kept, or the last.

        A limit in characters would admit several times as many tokens of digits or of CJK text.
        """
        ids = self._tokenise_quoted(text)
        if len(ids) <= max_tokens:
            return text
        if keep_end:
            return f"...{self.decode(ids[-max_tokens:])}"
        return f"{self.decode(ids[:max_tokens])}..."

    def tokens_before(self, token_ids: Sequence[int], position: int) -> int:
        """How many of the first tokens lie wholly before a character of the ids' text."""
        text = self.decode(token_ids)
        count = bisect_right(
            range(1, len(token_ids) + 1), position, key=lambda n: len(self.decode(token_ids[:n]))
        )
        # A character cut in two decodes to others.
        while not text[:position].startswith(self.decode(token_ids[:count])):
            count -= 1
        return count

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of sampled ids, control tokens included."""
        # The wrapper around it takes ten times as long, and may strip spaces.
        text: str = self.tokenizer.backend_tokenizer.decode(
            list(token_ids), skip_special_tokens=False
        )
        return text
