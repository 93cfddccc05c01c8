"""What a verifier is: it is shown text and pictures, and answers in words."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from reframe_vl.types import RGB, Box, Media, VideoMedia

LOOKS_VERSION = "1"
"""Of the rules by which pictures are made of media; kept answers are known by it."""


@dataclass(frozen=True)
class Picture:
    """An image, a region of it, or a frame of a video; looked at only when it is shown.

    Attributes:
        max_pixels: The view's budget.
        box: The region, in pixels of the image; None for the whole.
        frame: Of a video: the index on its grid.
    """

    media: Media
    max_pixels: int
    box: Box | None = None
    frame: int | None = None

    @property
    def caption(self) -> str:
        """When a video's frame is shown; empty for an image."""
        if not isinstance(self.media, VideoMedia) or self.frame is None:
            return ""
        return f"<{self.media.timestamps_s[self.frame]:.1f} seconds>"

    @property
    def identity(self) -> str:
        """Equal for equal pixels."""
        return f"{self.media.key} {self.box} {self.frame} {self.max_pixels} {self.caption}"


@dataclass(frozen=True)
class Query:
    """One question to a verifier.

    Attributes:
        text: All that is said, the question's wording and what is wanted as an answer.
        pictures: What is shown before the text, in order.
        question: The question alone, for verifiers that are no language models.
        options: Of a multiple-choice question.
    """

    text: str
    pictures: tuple[Picture, ...] = ()
    question: str = ""
    options: tuple[str, ...] = ()

    @property
    def identity(self) -> str:
        """A hash of all that is shown and said."""
        parts = [LOOKS_VERSION, self.text, *(picture.identity for picture in self.pictures)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def pixels(self) -> list[RGB]:
        """The pictures' pixels; the frames of a video are read together.

        Raises:
            MediaError: A file cannot be read.
        """
        by_video: dict[tuple[int, int], list[int]] = {}
        found: dict[int, RGB] = {}
        for index, picture in enumerate(self.pictures):
            if isinstance(picture.media, VideoMedia):
                by_video.setdefault((id(picture.media), picture.max_pixels), []).append(index)
            else:
                found[index] = picture.media.look(picture.box, picture.max_pixels)
        for (_, max_pixels), indices in by_video.items():
            video = self.pictures[indices[0]].media
            assert isinstance(video, VideoMedia)
            frames = [self.pictures[index].frame or 0 for index in indices]
            found |= zip(indices, video.look(frames, max_pixels), strict=True)
        return [found[index] for index in range(len(self.pictures))]


@dataclass(frozen=True)
class Reply:
    """What came of a query.

    Attributes:
        text: The answer in words; None where there is none for the infrastructure's sake. That is
            no verdict: nothing may be concluded from it.
        failure: Then: a short code and a sentence.
        tries: Requests that were made.
        cost: In the currency of the verifier's prices.
        finish: ``length`` where the answer was cut by its limit.
    """

    text: str | None
    failure: tuple[str, str] | None = None
    tries: int = 1
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    finish: str = "stop"


@runtime_checkable
class Verifier(Protocol):
    """Answers queries."""

    @property
    def name(self) -> str:
        """For reports."""

    @property
    def identity(self) -> str:
        """All that its answers depend on beside the query: kept answers are known by it."""

    def answer(self, queries: Sequence[Query]) -> Iterator[tuple[int, Reply]]:
        """Yields (position, reply) for each query as it is answered, in any order."""
