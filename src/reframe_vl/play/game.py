"""What a game is made of, and what it gives in the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import AutoConfig, AutoTokenizer

from reframe_vl.data.datamodule import SampleDataModule
from reframe_vl.policy.hub import local_folder
from reframe_vl.policy.views import ViewMaker
from reframe_vl.rewards.total import RewardWeights, score
from reframe_vl.rollout.encoding import Encoder
from reframe_vl.rollout.episode import Environment, Episode
from reframe_vl.rollout.gate import Gate, GateWatch, evidence_items
from reframe_vl.rollout.prompt import build_prompt
from reframe_vl.rollout.settings import RolloutSettings
from reframe_vl.rollout.store import RolloutStore
from reframe_vl.rollout.transcript import call_line, printable, quoted
from reframe_vl.tools.base import Tool
from reframe_vl.tools.codec import BANNED_STRINGS, STOP_STRINGS, Codec, codec_for
from reframe_vl.tools.coordinates import CoordinateFrame
from reframe_vl.types import Rollout, RolloutGroup, RolloutKey, Sample, Sampling


@dataclass(frozen=True)
class Game:
    """One episode, ready to be played.

    Attributes:
        tools: To be closed in the end.
        evidence: The calls that ask for the evidence, as the model would write them.
    """

    episode: Episode
    codec: Codec
    encoder: Encoder
    tools: Sequence[Tool]
    weights: RewardWeights
    evidence: Sequence[str]


def make_game(
    cfg: DictConfig, items: str, number: int, *, drop: bool, threshold: float | None
) -> Game:
    """Sets up an episode as training would, but for the model's weights, which nobody needs.

    Args:
        cfg: A training config.
        items: ``train``, ``evaluation`` or ``conflict``.
        number: Of the sample among them.
        drop: Drop the original after the first successful call.
        threshold: Of the gate; None plays without one.

    Raises:
        ValueError: There is no such sample, or the config is not for this.
        FileNotFoundError: The model's folder, or the data, are not there.
        MediaError: The media cannot be read.
    """
    weights = instantiate(cfg.reward)
    if not isinstance(weights, RewardWeights):
        raise ValueError("The reward is not of reframe_vl.rewards.total: it has no known parts.")
    sample = _sample(instantiate(cfg.data), items, number)
    codec, encoder, view_maker = _speech(cfg.model)
    settings: RolloutSettings = instantiate(cfg.rollout.settings)
    tools: list[Tool] = instantiate(cfg.rollout.tools)
    pixels = settings.budget.tool_view_pixels or view_maker.max_pixels
    environment = Environment(
        codec,
        encoder,
        view_maker,
        tools,
        settings.budget,
        run_tool=lambda tool, request, media: tool.run(request, media, pixels),
    )
    prompt = build_prompt(sample, codec, encoder, view_maker, tools, settings.prompt)
    key = RolloutKey(cfg.seed, 0, sample.id, 0)
    found = evidence_items(sample, prompt, tools)
    gate = None if threshold is None else GateWatch(Gate(threshold), found, key.entropy)
    vocabulary = encoder.tokenizer.get_vocab()
    sampling = Sampling(
        settings.temperature,
        settings.max_new_tokens,
        banned_ids=tuple(vocabulary[t] for t in BANNED_STRINGS if t in vocabulary),
        stop_ids=tuple(vocabulary[t] for t in STOP_STRINGS if t in vocabulary),
    )
    episode = Episode(key, sample, prompt, environment, sampling, drop=drop, gate=gate)
    calls = [codec.render_call(item.tool.name, item.arguments) for item in found]
    return Game(episode, codec, encoder, tools, weights, calls)


def _sample(data: SampleDataModule, items: str, number: int) -> Sample:
    source = {"train": data.train, "evaluation": data.evaluation, "conflict": data.conflict}[items]
    if source is None:
        raise ValueError("These data have no conflict set: take --items train or evaluation.")
    if not 0 <= number < len(source):
        raise ValueError(f"--number is {number}, but there are {len(source)} {items} samples.")
    return source[number]


def _speech(model: DictConfig) -> tuple[Codec, Encoder, ViewMaker]:
    """What speaks for a model, from its config, without its weights."""
    folder = Path(model.path).expanduser()
    if not folder.is_dir():
        folder = local_folder(model.path)
    family = model.get("family") or AutoConfig.from_pretrained(folder).model_type
    frame = model.get("coordinate_frame")
    codec = codec_for(
        family,
        CoordinateFrame(frame) if frame else None,
        model.get("thinking", False),
        model.get("compact_calls", False),
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return codec, Encoder(tokenizer), ViewMaker.from_pretrained(folder)


def finish(
    console: Console, game: Game, rollout: Rollout, progress: float, folder: Path
) -> RolloutGroup:
    """Scores a rollout, shows the reward part by part, and keeps it as training would.

    Args:
        console: Where to.
        game: That was played.
        rollout: What came of it.
        progress: P in [0, 1], for the weight of R_call.
        folder: Of rollouts: each game is a step of its own.
    """
    sample = game.episode.sample
    rollout.rewards, rollout.reward = score(rollout, sample, game.weights, progress)
    store = RolloutStore(folder)
    step = max(store.steps(), default=-1) + 1
    rollout.key = RolloutKey(rollout.key.seed, step, sample.id, 0)
    group = RolloutGroup(sample, [rollout])
    store.write(step, [group], game.encoder.decode)
    lines = [
        f"Ended: {rollout.termination}. Answered {quoted(rollout.answers)}, right is "
        f"{quoted([sample.answer.value, *sample.answer.aliases])}.",
        *(f"Call {number}, {call_line(call)}" for number, call in enumerate(rollout.calls, 1)),
        *(f"The evidence: {call}" for call in game.evidence),
        *([f"Error: {rollout.error}"] if rollout.error else []),
    ]
    console.rule(style="dim")
    for line in lines:
        console.print(Text(printable(line)))
    console.print(_table(rollout, game.weights.factors(progress)))
    tokenizer = game.encoder.tokenizer.name_or_path
    shown_by = f"python -m reframe_vl.viewer {folder.parent} --tokenizer {tokenizer}"
    console.print(Text(f"Kept: {folder} ({shown_by})", "dim"))
    return group


def _table(rollout: Rollout, factors: dict[str, float]) -> Table:
    table = Table("part", box=None)
    for name in ("value", "weight", "reward"):
        table.add_column(name, justify="right")
    for name, value in rollout.rewards.items():
        share = "-" if value is None else f"{value * factors[name]:+.3f}"
        shown = "-" if value is None else f"{value:.3f}"
        table.add_row(name, shown, f"{factors[name]:.3f}", share)
    total = "not scorable" if rollout.reward is None else f"{rollout.reward:+.3f}"
    table.add_row("total", "", "", total, style="bold")
    return table
