import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import CompactHydraException
from hydra.utils import instantiate

from reframe_vl.data.media import ImageFile
from reframe_vl.evaluation.answers import AnswerFile
from reframe_vl.evaluation.benchmark_play import Condition, Player
from reframe_vl.evaluation.benchmarks.base import Item
from reframe_vl.evaluation.outcomes import Arm
from reframe_vl.mini.model import base_folder
from reframe_vl.mini.world import MiniWorld
from reframe_vl.runs import ConfigError, register_resolvers

ROOT = Path(__file__).parents[2]
CKPT = base_folder(2)
TASK = "mini_digits"


@pytest.fixture(scope="module")
def ours(task, tmp_path_factory):
    """What this project's own evaluation answers to the same questions about the same images."""
    register_resolvers()
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        cfg = compose("eval", [f"ckpt={CKPT}"])
    items = []
    for index, path in enumerate(task.images):
        sample = replace(MiniWorld().sample("test", index), media=ImageFile(path), evidence=None)
        items.append(Item(sample, str(index)))
    file = AnswerFile(tmp_path_factory.mktemp("ours") / "answers.jsonl")
    tools, engine = instantiate(cfg.rollout.tools), instantiate(cfg.rollout.engine)
    player = Player(instantiate(cfg.model), instantiate(cfg.rollout.settings), tools, engine)
    player.play(items, Condition(Arm.TOOLS), file)
    player.close()
    answers = file.of("tools")
    return [answers[item.sample.id] for item in items]


@pytest.fixture(scope="module")
def manager(task):
    from lmms_eval.tasks import TaskManager

    return TaskManager(include_path=str(task.folder))


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """What the agent unpacks lies below the folder that lmms-eval is started in."""
    monkeypatch.chdir(tmp_path)


def evaluate(manager, name=TASK, **settings):
    from lmms_eval.evaluator import simple_evaluate

    return simple_evaluate(
        model="reframe", model_args=f"ckpt={CKPT}", tasks=[name], task_manager=manager, **settings
    )


def share(answers, references):
    return sum(a == b for a, b in zip(answers, references, strict=True)) / len(references)


def test_lmms_eval_finds_the_agent_by_its_entry_point():
    from lmms_eval.models import get_model, list_available_models

    assert "reframe" in list_available_models()
    assert get_model("reframe").__module__ == "reframe_vl.lmms_plugin.agent"


def test_a_run_ends_with_the_agents_own_score(task, manager, ours):
    results = evaluate(manager)
    said = [sample["filtered_resps"] for sample in results["samples"][TASK]]
    assert said == [[answer.text] for answer in ours]
    score = results["results"][TASK]["exact_match,none"]
    assert score == pytest.approx(share([a.text for a in ours], task.answers))
    # The agent looked, was right and was wrong: none of it by default.
    assert 0 < score < 1 and any(answer.calls for answer in ours)


def test_the_command_line_ends_with_the_same_score(task, ours, tmp_path):
    command = [sys.executable, "-m", "lmms_eval", "--model", "reframe"]
    command += ["--model_args", f"ckpt={CKPT},overrides=base=2 rollout.engine.max_batch_size=8"]
    command += ["--tasks", TASK, "--include_path", str(task.folder), "--output_path", "out"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    [written] = Path("out").rglob("*_results.json")
    score = json.loads(written.read_text())["results"][TASK]["exact_match,none"]
    assert score == pytest.approx(share([a.text for a in ours], task.answers))
    assert TASK in done.stdout


def test_a_question_that_is_asked_again_gets_the_same_answer(manager, ours):
    results = evaluate(manager, limit=4, repeats=2)
    said = [sample["resps"] for sample in results["samples"][TASK]]
    assert said == [[[answer.text] * 2] for answer in ours[:4]]


def test_sampling_that_a_task_asks_for_is_told_of(manager, caplog):
    evaluate(manager, limit=1, gen_kwargs="temperature=0.7,do_sample=True")
    assert "the agent's are greedy" in caplog.text


def test_a_question_without_an_image_ends_the_run_by_name(manager):
    with pytest.raises(ValueError, match=r"mini_without_images/test/0: .* given nothing"):
        evaluate(manager, "mini_without_images", limit=1)


def test_likelihoods_are_refused(manager):
    with pytest.raises(NotImplementedError, match="answers in words"):
        evaluate(manager, "mini_likelihood", limit=1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("ckpt=no/such/folder", "No checkpoint at no/such/folder"),
        (f"ckpt={CKPT},configs=/", "No eval.yaml in /"),
        (f"ckpt={CKPT},overrides=limits.max_turns=0", "max_turns is 0"),
        (f"ckpt={CKPT},overrides=no_such_key=1", "no_such_key"),
    ],
)
def test_settings_that_cannot_be_are_told_in_a_sentence(arguments, words):
    from lmms_eval.models import get_model

    with pytest.raises(CompactHydraException, match=words):
        get_model("reframe").create_from_arg_string(arguments)


def test_several_processes_are_refused(monkeypatch):
    from lmms_eval.models import get_model

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="in one process"):
        get_model("reframe")(ckpt=str(CKPT))
