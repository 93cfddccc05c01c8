"""Gives each step rollouts that earlier runs kept, in place of rollouts of the policy's own."""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from reframe_vl.algorithms.module import PolicyModule
from reframe_vl.algorithms.sft import trainable
from reframe_vl.data.order import SeededOrder
from reframe_vl.data.report import RecordError
from reframe_vl.policy.loading import Policy
from reframe_vl.policy.views import ViewMaker
from reframe_vl.rollout.encoding import Encoder
from reframe_vl.rollout.json_field import Field
from reframe_vl.rollout.read_line import read_rollout, read_sample, read_view
from reframe_vl.rollout.store import RolloutStore, load_view, parse_line, rollout_folders
from reframe_vl.types import Context, Provenance, RolloutGroup, Termination, View

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Keep:
    """Which rollouts are learned from. Those that failed never are.

    Attributes:
        provenances: Whose tokens are trained: a rollout must hold some.
        min_reward: The least reward; None takes any.
        answered: Only those that ended in an answer.
        scorable: Only those that have a reward.
        first_step: Only those of this step of their run, or a later one.
    """

    provenances: Sequence[str]
    min_reward: float | None = None
    answered: bool = True
    scorable: bool = True
    first_step: int = 0

    def __post_init__(self) -> None:
        trainable(self.provenances)

    def problem(self, line: Field) -> str | None:
        """Why the rollout of a line is left out."""
        termination = line["termination"].member(Termination)
        if termination is Termination.ERROR:
            return "failed"
        if self.answered and termination is not Termination.ANSWERED:
            return "not answered"
        reward = line["reward"].optional_number()
        if self.scorable and reward is None:
            return "without a reward"
        if self.min_reward is not None and not (reward is not None and reward >= self.min_reward):
            return f"reward below {self.min_reward:g}"
        if not any(map(self._trained, _spans(line))):
            return f"no tokens that are {' or '.join(self.provenances)}"
        return None

    def _trained(self, span: Field) -> bool:
        provenance = span["provenance"].member(Provenance)
        return (
            provenance in self.provenances
            and not span["carried"].flag()
            and bool(span["token_ids"].exactly(list))
        )


class RecordedGroups:
    """Groups of rollouts by number. Only where their lines are is held, not what they say.

    Args:
        runs: Run directories, or folders of rollouts.
        keep: Which rollouts are taken.

    Attributes:
        firsts: The first group of each file that has any.
        num_rollouts: How many were kept.
        left_out: How many were not, by reason.
        digest: Of the lines that were kept.
    """

    def __init__(self, runs: Sequence[str | Path], keep: Keep) -> None:
        """Reads every line once.

        Raises:
            FileNotFoundError: A folder holds no rollouts.
            RecordError: A line cannot be read, or an image of it is missing.
        """
        self.folders = [folder for run in runs for folder in rollout_folders(Path(run))]
        self.firsts: list[int] = []
        self.left_out: Counter[str] = Counter()
        self._files: list[Path] = []
        # A file, a place in it and the number of the line there, for each line; the first line of
        # each group. Millions of rollouts take tens of megabytes.
        self._lines, self._starts = array("q"), array("q", [0])
        digest = hashlib.blake2b(digest_size=16)
        for folder in self.folders:
            images = {path.stem for path in folder.glob("*/*/*.png")}
            for step in RolloutStore(folder).steps():
                if step >= keep.first_step:
                    self._add(folder / f"step_{step:06d}.jsonl", keep, digest, images)
        self.digest = digest.hexdigest()

    @property
    def num_rollouts(self) -> int:
        """Rollouts of all groups."""
        return len(self._lines) // 3

    def __len__(self) -> int:
        """Groups that have a rollout to learn from."""
        return len(self._starts) - 1

    def read(self, index: int, policy: Policy) -> RolloutGroup:
        """A group with the images it saw.

        Raises:
            RecordError: A line or an image is damaged, or not of the policy's kind.
        """
        first, end = self._starts[index], self._starts[index + 1]
        path = self._files[self._lines[3 * first]]
        lines = []
        with path.open("rb") as stream:
            for place in range(first, end):
                _, offset, number = self._lines[3 * place : 3 * place + 3]
                stream.seek(offset)
                lines.append(parse_line(stream.readline(), f"{path}, line {number}"))
        decode = cache(Encoder(policy.tokenizer).decode)
        for line in lines:
            _check_tokens(line, decode, policy.path)

        @cache
        def load(view: View) -> View:
            return load_view(view, path)

        rollouts = [read_rollout(line, lambda field: load(read_view(field))) for line in lines]
        for line, rollout in zip(lines, rollouts, strict=True):
            for context in (*rollout.contexts, *rollout.branches):
                _check_context(context, policy, line.place)
        return RolloutGroup(read_sample(lines[0]["sample"]), rollouts)

    def _add(self, path: Path, keep: Keep, digest: Any, images: set[str]) -> None:
        groups: dict[int, list[tuple[int, int]]] = {}
        offset = 0
        with path.open("rb") as stream:
            for number, text in enumerate(stream, 1):
                line = parse_line(text, f"{path}, line {number}")
                problem = keep.problem(line)
                if problem is None:
                    _check_images(line, path, images)
                    groups.setdefault(line["group"].whole(), []).append((offset, number))
                    digest.update(text)
                else:
                    self.left_out[problem] += 1
                offset += len(text)
        if groups:
            self.firsts.append(len(self))
            self._files.append(path)
        for places in groups.values():
            for place in places:
                self._lines.extend((len(self._files) - 1, *place))
            self._starts.append(len(self._lines) // 3)


class RecordedRolloutsCallback(Callback):
    """Connects recorded rollouts to the loader, where ``RolloutCallback`` connects an engine.

    Args:
        runs: Directories of earlier runs, or their folders of rollouts.
        keep: Which rollouts are taken.
        prompts_per_step: P, groups of a step over all ranks.
        passes: Training ends before it would go through all groups once more; None goes on for all
            steps.
        seed: Of the order, which is another one in each pass.

    Attributes:
        position: Groups served so far, over all ranks; saved with checkpoints.
    """

    def __init__(
        self,
        runs: str | Path | Sequence[str | Path],
        keep: Keep,
        prompts_per_step: int,
        passes: int | None = None,
        seed: int = 0,
    ) -> None:
        """Finds the rollouts, so that what is wrong is told before a model loads.

        Raises:
            FileNotFoundError: A folder holds no rollouts.
            RecordError: A line cannot be read, or an image is missing.
            ValueError: There are fewer groups than a step takes, or no pass is allowed.
        """
        runs = [runs] if isinstance(runs, str | Path) else runs
        if not runs:
            raise ValueError("There are no rollouts to learn from: add rollouts=[RUN,…].")
        if passes is not None and passes < 1:
            raise ValueError(f"passes is {passes}: give at least 1, or null for as many as needed.")
        self.groups = RecordedGroups(runs, keep)
        self.prompts_per_step, self.passes = prompts_per_step, passes
        self.position = 0
        self._order = SeededOrder(seed)
        if len(self.groups) < prompts_per_step:
            raise ValueError(
                f"{', '.join(map(str, self.groups.folders))}: {len(self.groups)} groups to learn "
                f"from are fewer than prompts_per_step={prompts_per_step}. Left out: "
                f"{self._left_out()}. Name more runs, keep more (keep.…), or lower "
                "prompts_per_step."
            )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks a group of each file against the policy, and hands the rest to the loader.

        Raises:
            RecordError: The rollouts are of another tokenizer or model family, or damaged.
        """
        if stage != "fit":
            return
        if not isinstance(pl_module, PolicyModule):
            raise TypeError(f"{type(pl_module).__name__} is not a PolicyModule.")
        for index in self.groups.firsts:
            self.groups.read(index, pl_module.components)
        steps = trainer.max_epochs
        if self.passes is not None:
            most = self.passes * len(self.groups) // self.prompts_per_step
            if steps is None or not 0 <= steps <= most:
                trainer.fit_loop.max_epochs = steps = most
        logger.info(
            "Learning from %d groups with %d rollouts; left out: %s. %s steps of %d groups.",
            len(self.groups),
            self.groups.num_rollouts,
            self._left_out(),
            steps,
            self.prompts_per_step,
        )
        pl_module.loader.generate = lambda: self._next(
            pl_module.components, trainer.global_rank, trainer.world_size
        )

    def state_dict(self) -> dict[str, Any]:
        """The cursor, and what it points into."""
        return {"position": self.position, "rollouts": self.groups.digest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Puts the cursor back.

        Raises:
            ValueError: The rollouts have changed since.
        """
        if state_dict["rollouts"] != self.groups.digest:
            raise ValueError(
                "The rollouts to learn from are not those that the checkpoint had: give the same "
                f"keep.… and restore {', '.join(map(str, self.groups.folders))}, or start a run "
                "of its own without resume."
            )
        self.position = state_dict["position"]

    def _next(self, policy: Policy, rank: int, world_size: int) -> list[RolloutGroup]:
        """This rank's share of the next groups; all ranks advance together."""
        end = self.position + self.prompts_per_step
        positions = range(self.position + rank, end, world_size)
        self.position = end
        size = len(self.groups)
        return [self.groups.read(self._order.index(at, size), policy) for at in positions]

    def _left_out(self) -> str:
        reasons = sorted(self.groups.left_out.items())
        return ", ".join(f"{number} {reason}" for reason, number in reasons) or "none"


def _spans(line: Field) -> list[Field]:
    spans: list[Field] = []
    for name in ("contexts", "branches"):
        line[name].each(lambda context: context.each(spans.append))
    return spans


def _check_images(line: Field, path: Path, known: set[str]) -> None:
    """Looks for the images of a line: training would meet a missing one after hours.

    Args:
        line: A line.
        path: Its file.
        known: The images that are there; what is found otherwise joins them.

    Raises:
        RecordError: An image is missing or damaged.
    """
    for span in _spans(line):
        for view in span["views"].each(read_view):
            if view.hash not in known:
                load_view(view, path)
                known.add(view.hash)


def _check_tokens(line: Field, decode: Callable[[tuple[int, ...]], str], policy: str) -> None:
    """The same ids with another text are other tokens."""
    for span in _spans(line):
        text, here = span["text"].text(), decode(span["token_ids"].wholes())
        if text != here:
            raise RecordError(
                f"{line.place}: the tokens of {span.name} were recorded as {ascii(text)[:40]}, but "
                f"are {ascii(here)[:40]} to the tokenizer of {policy}. These rollouts are of "
                "another tokenizer: name rollouts of models that have this one."
            )


def _check_context(context: Context, policy: Policy, place: str) -> None:
    if not all(_fits(view, policy.model.view_maker) for view in context.views):
        raise RecordError(
            f"{place}: its images are not cut into patches as {policy.path} cuts them. These "
            "rollouts are of another model family: name rollouts of this one."
        )
    try:
        policy.model.expand(context)
    except ValueError as error:
        raise RecordError(f"{place}: {error}") from error


def _fits(view: View, maker: ViewMaker) -> bool:
    """Whether a view's pixels, patches and tokens belong together for this model."""
    if view.pixels is None:
        return False
    time, height, width = view.grid_thw
    rows, columns = view.pixels.shape[:2]
    frames = rows // max(height * maker.patch_size, 1)
    return (
        (rows, columns) == (frames * height * maker.patch_size, width * maker.patch_size)
        and maker.temporal_patches(frames) == time
        and view.num_tokens * maker.merge_size**2 == time * height * width
    )
