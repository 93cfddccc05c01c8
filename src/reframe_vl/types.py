"""The vocabulary of the whole program: what a sample, a rollout and a micro-batch are.

Every other module speaks in these words and this module imports none of them.

Axis legend, used as suffixes of tensor names and as jaxtyping axis names everywhere:

    G  rollouts of one group          P  prompts (samples) of a step
    T  tokens                         V  vocabulary
    E  evidence items                 F  frames of a video's grid
    N  anything else that is counted

Coordinates: boxes are ``(x0, y0, x1, y1)``, x first, half-open, in pixels of the *original
upright* image. Frames are 0-based indices on the sample's one grid. A model's own coordinate
frame exists only inside ``tools.codec``.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Box: TypeAlias = tuple[float, float, float, float]
RGB: TypeAlias = npt.NDArray[np.uint8]
"""An upright 8-bit image, shape (height, width, 3)."""


# --------------------------------------------------------------------------- samples


class Modality(StrEnum):
    """What the model is asked about."""

    IMAGE = "image"
    VIDEO = "video"


class Applicability(StrEnum):
    """Whether a tool call helps with a sample, by evidence coverage (docs/method.md, 1.3)."""

    BENEFICIAL = "beneficial"
    NEUTRAL = "neutral"
    NON_BENEFICIAL = "non_beneficial"


AnswerKind: TypeAlias = Literal["mcq", "open", "number", "span", "expression"]


@dataclass(frozen=True, slots=True)
class Answer:
    """The reference answer.

    Attributes:
        kind: How an answer is compared; ``span`` is a verbatim string such as a receipt's total.
        value: The reference itself; for ``mcq`` the option's letter.
        aliases: Further answers that count as right.
        tolerance: For ``number``: the relative error that is still right.
    """

    kind: AnswerKind
    value: str
    aliases: tuple[str, ...] = ()
    tolerance: float = 0.0


@dataclass(frozen=True, slots=True)
class Evidence:
    """The *expanded, clipped* evidence of docs/method.md, 1.3, never the raw annotation.

    Attributes:
        boxes: Evidence boxes of an image, in annotation order.
        segments: Evidence frames of a video, ascending: one item a run of frames, thinned out where
            it is longer than a call may select.
    """

    boxes: tuple[Box, ...] = ()
    segments: tuple[tuple[int, ...], ...] = ()

    @property
    def frames(self) -> frozenset[int]:
        """The union of all segments."""
        return frozenset(f for segment in self.segments for f in segment)

    def __len__(self) -> int:
        return len(self.boxes) + len(self.segments)


class ImageMedia(ABC):
    """An image that can be looked at, whole or in part."""

    @property
    @abstractmethod
    def key(self) -> str:
        """Names the content: equal keys, equal pixels."""

    @property
    @abstractmethod
    def size(self) -> tuple[int, int]:
        """(width, height) of the original upright image in pixels."""

    @abstractmethod
    def look(self, box: Box | None, max_pixels: int) -> RGB:
        """Returns the whole image (None) or a region; at most about ``max_pixels`` pixels."""


class VideoMedia(ABC):
    """A video on its grid of frames."""

    @property
    @abstractmethod
    def key(self) -> str:
        """Names the content: equal keys, equal pixels."""

    @property
    @abstractmethod
    def size(self) -> tuple[int, int]:
        """(width, height) of an upright frame in pixels."""

    @property
    @abstractmethod
    def timestamps_s(self) -> tuple[float, ...]:
        """The time of each frame of the grid, in seconds; its length is the number of frames."""

    @abstractmethod
    def look(self, frames: Sequence[int], max_pixels: int) -> list[RGB]:
        """Returns frames of the grid, each of at most about ``max_pixels`` pixels."""


Media: TypeAlias = ImageMedia | VideoMedia


@dataclass(frozen=True, slots=True)
class Sample:
    """One question about one image or video.

    Attributes:
        id: Unique within the data set; seeds depend on it.
        domain: Routes to a teacher and labels logs; by default the modality.
        evidence: None where the source has none: R_obs is then omitted, not zero.
        applicability: None where there is no evidence to decide it by.
        split: ``train``, ``val``, …; with ``source`` only for reports.
    """

    id: str
    modality: Modality
    media: Media
    question: str
    answer: Answer
    options: tuple[str, ...] = ()
    evidence: Evidence | None = None
    applicability: Applicability | None = None
    domain: str = ""
    source: str = ""
    split: str = "train"

    def __post_init__(self) -> None:
        if not self.domain:
            object.__setattr__(self, "domain", self.modality.value)


# --------------------------------------------------------------------------- what the model saw


class Provenance(StrEnum):
    """Where tokens come from (docs/method.md, 1.2)."""

    PROMPT = "prompt"
    SAMPLED = "sampled"
    INJECTED = "injected"
    OBSERVED = "observed"
    EXTERNAL = "external"


TRAINABLE = frozenset({Provenance.SAMPLED, Provenance.INJECTED, Provenance.EXTERNAL})


@dataclass(frozen=True)
class View:
    """An image or a video exactly as it is fed to the model: resized, 8-bit, token count known.

    Attributes:
        pixels: The image, or the frames of the video one below the other; None where a rollout was
            read back without its images.
        grid_thw: Patches along time, height and width, before merging.
        num_tokens: Placeholder tokens that stand for it in an expanded sequence.
        hash: Content hash of pixels and shape, and of what else tells videos apart.
        modality: Which of the two it is: each has its own placeholder.
        patch_seconds: Of a video of several temporal patches: from one to the next.
    """

    pixels: RGB | None = field(repr=False, compare=False)
    grid_thw: tuple[int, int, int]
    num_tokens: int
    hash: str
    modality: Modality = Modality.IMAGE
    patch_seconds: float = 0.0

    @classmethod
    def of(
        cls,
        pixels: RGB,
        grid_thw: tuple[int, int, int],
        num_tokens: int,
        modality: Modality = Modality.IMAGE,
        patch_seconds: float = 0.0,
    ) -> View:
        """Makes a view of pixels and names it by their content."""
        kind = f"video {grid_thw} {patch_seconds}" if modality is Modality.VIDEO else ""
        digest = hashlib.sha256(f"{pixels.shape}{kind}".encode())
        digest.update(np.ascontiguousarray(pixels).data)
        name = digest.hexdigest()[:32]
        return cls(pixels, grid_thw, num_tokens, name, modality, patch_seconds)

    @property
    def frames(self) -> list[RGB]:
        """The frames of the video, or the image alone; none where there are no pixels."""
        if self.pixels is None:
            return []
        _, grid_h, grid_w = self.grid_thw
        width = self.pixels.shape[1]
        return list(self.pixels.reshape(-1, grid_h * width // grid_w, width, 3))


@dataclass(frozen=True)
class Markup:
    """Text of the chat template: its special tokens are special."""

    text: str


@dataclass(frozen=True)
class Quoted:
    """Text of the world (a question, a tool's words): special tokens in it are plain text."""

    text: str


Part: TypeAlias = Markup | Quoted | View


@dataclass(frozen=True)
class Span:
    """A run of tokens of one provenance.

    Attributes:
        token_ids: *Unexpanded* ids: one placeholder a view. ``policy.inputs`` alone expands.
        logprobs: The sampler's log-probs, one a token, for SAMPLED spans; None where the engine
            gave none for that token.
        views: The images and videos whose placeholders stand in ``token_ids``, in order.
        carried: Produced in an earlier context of the rollout and only shown again here: it is
            never trained in this context.
        teacher_logprobs: The teacher's, one a trained token, where an algorithm asked for them.
    """

    provenance: Provenance
    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...] | None = None
    views: tuple[View, ...] = ()
    carried: bool = False
    teacher_logprobs: tuple[float | None, ...] | None = None

    @cached_property
    def ids(self) -> npt.NDArray[np.int64]:
        """``token_ids`` as an array that is not written to."""
        ids = np.array(self.token_ids, np.int64)
        ids.flags.writeable = False
        return ids

    @cached_property
    def trained(self) -> bool:
        """Whether the tokens are trained in this context."""
        return self.provenance in TRAINABLE and not self.carried

    @cached_property
    def num_visual_tokens(self) -> int:
        """Placeholder tokens after expansion."""
        return sum(view.num_tokens for view in self.views)

    def __len__(self) -> int:
        """Tokens after expansion."""
        return len(self.token_ids) + self.num_visual_tokens - len(self.views)


@dataclass
class Context:
    """One thing the policy really saw: spans in order."""

    spans: list[Span] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        """Unexpanded ids of all spans."""
        return [t for span in self.spans for t in span.token_ids]

    @property
    def views(self) -> list[View]:
        """Images of all spans, in reading order."""
        return [view for span in self.spans for view in span.views]

    @property
    def num_visual_tokens(self) -> int:
        """Placeholder tokens after expansion."""
        return sum(span.num_visual_tokens for span in self.spans)

    @property
    def num_trained(self) -> int:
        """Tokens that are trained in this context."""
        return sum(len(span.token_ids) for span in self.spans if span.trained)

    def __len__(self) -> int:
        """Tokens after expansion."""
        return sum(len(span) for span in self.spans)


# --------------------------------------------------------------------------- rollouts


@dataclass(frozen=True)
class Sampling:
    """The distribution that tokens are drawn from; ``policy.score`` applies the same one.

    Attributes:
        temperature: 0 is greedy decoding.
        max_new_tokens: Of one turn.
        banned_ids: Ids that have probability 0: placeholder and vision tokens
            (docs/architecture.md).
        stop_ids: Ids that end a turn; the id that did is part of the sampled tokens.
    """

    temperature: float = 1.0
    max_new_tokens: int = 64
    banned_ids: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()


class Termination(StrEnum):
    """Why a rollout ended."""

    ANSWERED = "answered"
    NO_ANSWER = "no_answer"
    """A turn without a call and without an answer."""
    TRUNCATED = "truncated"
    """The turn's token limit cut a turn that was neither a call nor an answer."""
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    """The context would exceed its token budget."""
    MAX_VISUAL_TOKENS = "max_visual_tokens"
    REFUSAL_STREAK = "refusal_streak"
    """Too many refused calls in a row."""
    ERROR = "error"
    """The infrastructure failed: not scorable."""


class CallStatus(StrEnum):
    """What became of a proposed call."""

    OK = "ok"
    REPEATED = "repeated"
    """Identical to an earlier successful call: answered from its result."""
    REFUSED = "refused"
    """The model's fault: malformed or invalid."""
    FAILED = "failed"
    """The tool's fault: the model's call was valid."""
    REPLACED = "replaced"
    """The gate wrote another call in its place, which follows."""


@dataclass(frozen=True)
class CallRecord:
    """One proposed tool call, executed or not.

    Attributes:
        turn: Index of the assistant turn that proposed it.
        name: The tool's name; empty where none could be read.
        arguments: As the model wrote them, in the model's coordinate frame.
        boxes: Regions returned, in original pixels; empty unless the status is OK or REPEATED.
        frames: Frames returned, on the sample's grid; likewise.
        reason: Reason code of a refusal or failure.
        coercions: Arguments that were converted without loss.
        by_gate: Written by the environment, not by the policy (docs/method.md, 1.2).
        proposal: The text of a call that the gate replaced, from its opening tag on.
    """

    turn: int
    name: str
    arguments: dict[str, Any]
    status: CallStatus
    boxes: tuple[Box, ...] = ()
    frames: tuple[int, ...] = ()
    reason: str = ""
    coercions: int = 0
    by_gate: bool = False
    proposal: str = ""

    @property
    def succeeded(self) -> bool:
        """Whether the tool returned something new."""
        return self.status is CallStatus.OK


@dataclass(frozen=True)
class RolloutKey:
    """Names a rollout within a run; its seed is derived from it and nothing else.

    Attributes:
        index: Within its group; a sample's second group of a step goes on counting.
        author: The auxiliary model whose actions it holds; empty for the policy's own.
    """

    seed: int
    step: int
    sample_id: str
    index: int
    author: str = ""

    @cached_property
    def entropy(self) -> int:
        """A 128-bit seed for this rollout's own random draws."""
        text = f"{self.seed}/{self.step}/{self.sample_id}/{self.index}"
        if self.author:
            text = f"{text}/{self.author}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big")


@dataclass
class Rollout:
    """One episode of the policy on one sample.

    Attributes:
        contexts: One, or two where the original input was dropped (before and after).
        drop_assigned: d_i of docs/method.md, 1.1: drawn before the rollout starts.
        dropped: Whether the original input really left (a call succeeded).
        answers: The contents of all answer blocks of the last turn.
        num_turns: Assistant turns taken.
        policy_version: Optimiser steps that the sampling weights had seen.
        rewards: Each component; None where it does not apply or could not be scored.
        reward: The total; None leaves this rollout out of all statistics.
        advantage: Set by the algorithm; None before, and where the reward is None.
        error: The infrastructure's failure, where ``termination`` is ERROR.
        branches: Contexts beside the rollout, which end in a canonical call that it did not make:
            trained, but not part of what happened.
    """

    key: RolloutKey
    contexts: list[Context]
    sampling: Sampling
    termination: Termination
    drop_assigned: bool = False
    calls: list[CallRecord] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    num_turns: int = 0
    policy_version: int = 0
    rewards: dict[str, float | None] = field(default_factory=dict)
    reward: float | None = None
    advantage: float | None = None
    error: str = ""
    branches: list[Context] = field(default_factory=list)

    @property
    def played(self) -> bool:
        """Whether the policy had its say: else nothing about it can be scored."""
        return self.termination is not Termination.ERROR and self.num_turns > 0

    @property
    def dropped(self) -> bool:
        """Whether the original visual input left the context."""
        return len(self.contexts) > 1

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled."""
        return sum(
            len(span.token_ids)
            for context in self.contexts
            for span in context.spans
            if span.provenance is Provenance.SAMPLED and not span.carried
        )

    @property
    def num_visual_tokens(self) -> int:
        """Visual tokens fed, each image of the rollout counted once a context's first showing."""
        seen: dict[str, int] = {}
        for context in self.contexts:
            shown: dict[str, int] = {}
            for view in context.views:
                shown[view.hash] = shown.get(view.hash, 0) + view.num_tokens
            for name, tokens in shown.items():
                seen[name] = max(seen.get(name, 0), tokens)
        return sum(seen.values())


@dataclass
class RolloutGroup:
    """The rollouts of one sample at one step."""

    sample: Sample
    rollouts: list[Rollout]


# --------------------------------------------------------------------------- training


@dataclass
class TrainItem:
    """One context to train, with what its trained tokens need.

    Attributes:
        advantages: One a trained token of ``context``.
        weights: One a trained token: its share in the loss of the whole optimiser step (the
            global normaliser is inside), so that micro-losses simply add up.
        old_logprobs: Before the first update of the step; None where the policy is unchanged.
        ref_logprobs: Of the reference policy; None without a KL term.
        teacher_logprobs: Of the teacher of its domain; None without one.
        injected: Which trained tokens the environment wrote.
        domain: Of the sample.
    """

    context: Context
    advantages: npt.NDArray[np.float32]
    weights: npt.NDArray[np.float32]
    sampler_logprobs: npt.NDArray[np.float32]
    old_logprobs: npt.NDArray[np.float32] | None = None
    ref_logprobs: npt.NDArray[np.float32] | None = None
    teacher_logprobs: npt.NDArray[np.float32] | None = None
    injected: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    domain: str = ""


@dataclass
class MicroBatch:
    """One backward pass: K of them make an optimiser update.

    Attributes:
        sampling: The distribution that the tokens were drawn from.
        num_micro: K, the same on every rank.
        step: The reinforcement-learning step it belongs to.
        update: Which of the step's U updates.
    """

    items: list[TrainItem]
    sampling: Sampling
    num_micro: int
    step: int
    update: int = 0
