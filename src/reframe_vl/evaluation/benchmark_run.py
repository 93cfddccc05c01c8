"""Evaluates a policy on public benchmarks: reads, plays, scores, reports; goes on where it stopped.

OUT/
results.json               every measure with its interval
report.md  report.png      the same for people
NAME/evaluation.json       what is evaluated and how: it goes on only with the same
NAME/answers.jsonl         every answer
NAME/scores.json           the terms of each answer, by condition and item
NAME/judgements.jsonl      the judge's verdicts
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from reframe_vl.data.chat_endpoint import ChatEndpoint, EndpointSettings
from reframe_vl.data.report import Report
from reframe_vl.data.video import GridRule
from reframe_vl.evaluation.answers import AnswerFile
from reframe_vl.evaluation.benchmark_compare import compared
from reframe_vl.evaluation.benchmark_play import Condition, Player
from reframe_vl.evaluation.benchmark_results import Evaluated, evaluated, mean_over_benchmarks
from reframe_vl.evaluation.benchmarks import BENCHMARKS
from reframe_vl.evaluation.benchmarks.base import Benchmark, Item
from reframe_vl.evaluation.judge import EndpointJudge
from reframe_vl.evaluation.outcomes import FORCED_ARMS, Arm, named_arms
from reframe_vl.evaluation.releases.media import MediaStore
from reframe_vl.files import write_whole
from reframe_vl.policy.loading import Policy
from reframe_vl.rollout.engine import Engine
from reframe_vl.rollout.settings import RolloutSettings
from reframe_vl.tools.base import Tool

logger = logging.getLogger(__name__)

_IDENTITY, _ANSWERS, _SCORES = "evaluation.json", "answers.jsonl", "scores.json"


@dataclass(frozen=True)
class BenchmarkSettings:
    """How benchmarks are played.

    Attributes:
        arms: Of docs/method.md, 1.6. Forced arms need benchmarks with evidence.
        visual_tokens: Budgets of the first view, each a condition of its own; none is the
            experiment's own.
        samples: Answers that are sampled to each item for avg@n and pass@k; 0 for none.
        limit: The first so many items; None takes all.
        fps: Of the grid of a video.
        max_frames: Of that grid.
        unpacked: Where images that releases hold are written.
        judge: Settings of the judge's endpoint; None leaves open answers to the words alone.
        against: The output folder of another checkpoint's evaluation, to compare with.
        seed: Of sampled answers.
    """

    arms: Sequence[str | bool] = ("tools", "no_tools")
    visual_tokens: Sequence[int] = ()
    samples: int = 0
    limit: int | None = None
    fps: float = 2.0
    max_frames: int = 64
    unpacked: str = "logs/benchmark_media"
    judge: Mapping[str, Any] | None = None
    against: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if Arm.CONFLICT in named_arms(self.arms):
            raise ValueError(
                "benchmark_settings.arms: benchmarks have no conflict set. Leave the arm out."
            )
        budgets = self.visual_tokens
        if not isinstance(budgets, list | tuple) or not all(_is_whole(b, 1) for b in budgets):
            raise ValueError(
                f"visual_tokens is {budgets}: give a list of whole numbers, such as [256,1024]."
            )
        if not _is_whole(self.samples, 0):
            raise ValueError(f"samples is {self.samples}: give a whole number, 0 for none.")
        if self.limit is not None and not _is_whole(self.limit, 1):
            raise ValueError(f"limit is {self.limit}: take at least one item, or null for all.")

    @property
    def conditions(self) -> list[Condition]:
        """Every arm at every budget, those that others need first."""
        arms = [arm for arm in Arm if arm in named_arms(self.arms)]
        budgets: list[int | None] = [*self.visual_tokens] or [None]
        return [Condition(arm, budget) for budget in budgets for arm in arms]


@dataclass(frozen=True)
class Place:
    """Where a release lies.

    Attributes:
        path: A file or a folder of files; None is the hub.
        media: The folder of images or videos; None is the release's own folder.
    """

    path: str | None = None
    media: str | None = None

    def opened(self, name: str, settings: BenchmarkSettings) -> Benchmark:
        """The benchmark there.

        Raises:
            ValueError: There is none of this name.
        """
        if name not in BENCHMARKS:
            raise ValueError(
                f"There is no benchmark {name!r}: choose among {', '.join(BENCHMARKS)}."
            )
        path = Path(self.path) if self.path else None
        folder = Path(self.media) if self.media else path
        if folder is not None and folder.is_file():
            folder = folder.parent
        rule = GridRule(settings.fps, settings.max_frames)
        store = MediaStore(folder, Path(settings.unpacked), rule)
        forced = not FORCED_ARMS.isdisjoint(named_arms(settings.arms))
        return BENCHMARKS[name](path, store, with_windows=forced)


@dataclass
class BenchmarkRun:
    """One evaluation of a policy on some benchmarks.

    Attributes:
        places: Where each benchmark lies.
        out: The output folder.
        checkpoint: What is evaluated, as it was named.
        model: The config that it is loaded by.
    """

    places: Mapping[str, Place]
    settings: BenchmarkSettings
    out: Path
    checkpoint: str
    model: Mapping[str, Any] = field(default_factory=dict)
    _opened: dict[str, tuple[Benchmark, list[Item]]] = field(default_factory=dict)
    _found: dict[str, Evaluated] = field(default_factory=dict)

    def open(self, rollouts: RolloutSettings, tools: Sequence[Tool]) -> None:
        """Reads the benchmarks: what is wrong with files or output is told before a model loads.

        Raises:
            ValueError: A benchmark cannot be read, or the output is of another evaluation.
        """
        self._judge()
        for name in self.places:
            self._opened[name] = self._open(name)
            self._claim(name, rollouts, tools, self._opened[name][1])
            self._check_against(name)
            AnswerFile(self.out / name / _ANSWERS)

    def play(
        self,
        policy: Policy,
        rollouts: RolloutSettings,
        tools: Sequence[Tool],
        make_engine: Callable[..., Engine],
    ) -> dict[str, Any]:
        """Plays and scores everything that is missing; the content of results.json."""
        player = Player(
            policy,
            rollouts,
            tools,
            make_engine,
            seed=self.settings.seed,
            max_frames=self.settings.max_frames,
        )
        try:
            for name, (_, items) in self._opened.items():
                self._play(player, name, items)
        finally:
            player.close()
        report: dict[str, Any] = {"benchmarks": {}}
        for name, (benchmark, items) in self._opened.items():
            report["benchmarks"][name] = self._score(name, benchmark, items)
        report["mean"] = mean_over_benchmarks(self._found)
        return report

    def _open(self, name: str) -> tuple[Benchmark, list[Item]]:
        benchmark = self.places[name].opened(name, self.settings)
        report = Report(log_level=logging.DEBUG)
        items = benchmark.items(report)
        for (reason, _), number in report.count_by_reason().items():
            first = next(p for p in report.problems if p.reason == reason)
            logger.warning("%s: %d rows left out (%s); the first: %s", name, number, reason, first)
        if self.settings.limit is not None:
            items = items[: self.settings.limit]
        logger.info("%s: %d items.", name, len(items))
        return benchmark, items

    def _claim(
        self,
        name: str,
        rollouts: RolloutSettings,
        tools: Sequence[Tool],
        items: Sequence[Item],
    ) -> None:
        """Notes what is evaluated, or checks that it is the same as before."""
        asked = "\n".join(
            json.dumps([i.sample.id, i.sample.question, i.sample.options]) for i in items
        )
        identity = {
            "benchmark": name,
            "checkpoint": self.checkpoint,
            "model": self.model,
            "items": hashlib.sha256(asked.encode()).hexdigest()[:32],
            "rollouts": asdict(rollouts),
            "tools": [type(tool).__name__ for tool in tools],
            "seed": self.settings.seed,
            "grid": [self.settings.fps, self.settings.max_frames],
        }
        text = json.dumps(identity, indent=2, sort_keys=True) + "\n"
        path = self.out / name / _IDENTITY
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text)
        elif (before := json.loads(path.read_text())) != json.loads(text):
            now = json.loads(text)
            changed = ", ".join(key for key in now if before.get(key) != now[key])
            raise ValueError(
                f"{path.parent} holds another evaluation (other {changed}): give another out, or "
                "remove the folder."
            )

    def _judge(self) -> ChatEndpoint | None:
        if not self.settings.judge:
            return None
        return ChatEndpoint(EndpointSettings.of(self.settings.judge, "benchmark_settings.judge"))

    def _check_against(self, name: str) -> None:
        if not self.settings.against:
            return
        theirs, ours = Path(self.settings.against, name), self.out / name
        if not (theirs / _SCORES).is_file() or theirs.resolve() == ours.resolve():
            raise ValueError(
                f"benchmark_settings.against is {self.settings.against}: give the output folder "
                f"of another evaluation on {name} that is finished, one with {name}/{_SCORES}."
            )
        others, own = (
            json.loads((folder / _IDENTITY).read_text())["items"] for folder in (theirs, ours)
        )
        if others != own:
            logger.warning(
                "%s: %s was evaluated on other items. Those with the same ids are compared.",
                name,
                self.settings.against,
            )

    def _play(self, player: Player, name: str, items: Sequence[Item]) -> None:
        file = AnswerFile(self.out / name / _ANSWERS)
        for condition in self.settings.conditions:
            player.play(items, condition, file)
        if self.settings.samples:
            player.sample(items, self.settings.samples, file)

    def _score(self, name: str, benchmark: Benchmark, items: Sequence[Item]) -> dict[str, Any]:
        folder = self.out / name
        endpoint = self._judge()
        judge = EndpointJudge(endpoint, folder / "judgements.jsonl") if endpoint else None
        try:
            found = evaluated(
                benchmark,
                items,
                AnswerFile(folder / _ANSWERS),
                [condition.name for condition in self.settings.conditions],
                self.settings.samples,
                judge,
            )
        finally:
            if judge is not None:
                judge.close()
        self._found[name] = found
        write_whole(folder / _SCORES, json.dumps(found.scores, indent=0) + "\n")
        if self.settings.against:
            others = json.loads(Path(self.settings.against, name, _SCORES).read_text())
            found.report["against"] = compared(benchmark, items, found.scores, others)
        return found.report


def _is_whole(number: object, least: int) -> bool:
    return type(number) is int and number >= least
