"""The agent as a model of lmms-eval: to a question it gives its final answer and nothing else."""

from __future__ import annotations

import logging
import os
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from lmms_eval.api.instance import Instance
from lmms_eval.api.model import lmms
from omegaconf import DictConfig

from reframe_vl import runs
from reframe_vl.data.video import GridRule
from reframe_vl.evaluating import load_checkpoint
from reframe_vl.evaluation.answers import Answered, AnswerFile
from reframe_vl.evaluation.benchmark_play import Condition, Player
from reframe_vl.evaluation.benchmark_run import BenchmarkSettings
from reframe_vl.evaluation.benchmarks.base import Item
from reframe_vl.evaluation.outcomes import Arm
from reframe_vl.evaluation.releases.media import MediaStore
from reframe_vl.lmms_plugin.questions import question
from reframe_vl.rollout.settings import RolloutSettings
from reframe_vl.tools.base import close_tools

logger = logging.getLogger(__name__)

_CONFIGS = Path(__file__).resolve().parents[3] / "configs"


class ReframeAgent(lmms):
    """Plays an episode on each question, with tools, greedily, as ``src/eval.py`` does.

    Args:
        ckpt: As for that command.
        overrides: Of that command, with spaces between them.
        configs: The folder of configs; by default that of the clone which this package lies in.
        batch_size: lmms-eval's own, which it always gives: here episodes are played together.
        max_batch_size: Likewise.
        device: Where the policy generates, as torch names it; vLLM finds its own.

    Raises:
        ConfigError: The agent cannot be set up so.
    """

    def __init__(
        self,
        ckpt: str,
        overrides: str = "",
        configs: str = str(_CONFIGS),
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str = "cpu",
    ) -> None:
        super().__init__()
        with runs.readable_errors():
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise ValueError(
                    "The agent runs in one process: start lmms-eval without accelerate or torchrun "
                    "and give further accelerators to vLLM (rollout=vllm, docs/vllm.md)."
                )
            self._device = torch.device(device)
            self._cfg = _config(Path(configs), [f"ckpt={ckpt}", *shlex.split(overrides)])
            if self._cfg.num_threads:
                torch.set_num_threads(self._cfg.num_threads)
            self._rollouts: RolloutSettings = instantiate(self._cfg.rollout.settings)
            self._benchmarks: BenchmarkSettings = instantiate(self._cfg.benchmark_settings)
            self._policy = load_checkpoint(self._cfg, Path(ckpt))

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """The content of the last answer block to each question; empty where there is none.

        Raises:
            ValueError: The agent cannot look at what a question is about.
        """
        _tell_of_sampling([request.args[1] for request in requests])
        rule = GridRule(self._benchmarks.fps, self._benchmarks.max_frames)
        store = MediaStore(None, Path(self._benchmarks.unpacked), rule)
        items: dict[str, Item] = {}
        for request in requests:
            # What is asked again gets the same answer: nothing is drawn.
            if (name := _name(request)) not in items:
                text, _, to_visual, number, task, split = request.args
                visuals = to_visual(self.task_dict[task][split][number]) or []
                items[name] = Item(question(name, text, visuals, store), name)
        answers = self._play(list(items.values()))
        _tell_of_failures(answers)
        return [answers[_name(request)].text for request in requests]

    def loglikelihood(self, requests: Sequence[Instance]) -> NoReturn:
        """What an agent looks at depends on what it says: an answer has no likelihood.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("The agent answers in words: take tasks of generate_until.")

    def generate_until_multi_round(self, requests: Sequence[Instance]) -> NoReturn:
        """The agent takes turns of its own, and none that a task prescribes.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("The agent takes turns of its own: take tasks of generate_until.")

    def _play(self, items: Sequence[Item]) -> Mapping[str, Answered]:
        tools, condition = instantiate(self._cfg.rollout.tools), Condition(Arm.TOOLS)
        make_engine = instantiate(self._cfg.rollout.engine)
        model = self._policy.model.to(self._device)
        try:
            with (
                tempfile.TemporaryDirectory(prefix="reframe_answers_") as folder,
                closing(Player(self._policy, self._rollouts, tools, make_engine)) as player,
            ):
                file = AnswerFile(Path(folder) / "answers.jsonl")
                player.play(items, condition, file)
        finally:
            close_tools(tools)
            # A judge of lmms-eval's may need the memory now.
            model.cpu()
        return file.of(condition.name)


def _config(configs: Path, overrides: Sequence[str]) -> DictConfig:
    if not (configs / "eval.yaml").is_file():
        raise FileNotFoundError(
            f"No eval.yaml in {configs}: name the configs of a clone with configs=FOLDER."
        )
    runs.register_resolvers()
    with initialize_config_dir(str(configs.resolve()), version_base="1.3"):
        return compose("eval", list(overrides))


def _name(request: Instance) -> str:
    number, task, split = request.args[3:]
    return f"{task}/{split}/{number}"


def _tell_of_sampling(settings: Sequence[Mapping[str, Any]]) -> None:
    if any(asked.get("do_sample") or (asked.get("temperature") or 0) > 0 for asked in settings):
        logger.warning(
            "The task asks for sampled answers: the agent's are greedy, so those to one question "
            "are alike. (To sample: src/eval.py benchmark_settings.samples=N.)"
        )


def _tell_of_failures(answers: Mapping[str, Answered]) -> None:
    lost = [found for found in answers.values() if found.left_out is not None]
    if lost:
        why = lost[0].error or lost[0].left_out
        logger.warning(
            "%d of %d questions were not played to their end, which lmms-eval counts as wrong "
            "answers. The first: %s (%s)",
            len(lost),
            len(answers),
            lost[0].item,
            why,
        )
