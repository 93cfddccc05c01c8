"""Tests with a real lmms-eval, and a task for it of a few images."""

import importlib.util
from pathlib import Path
from typing import NamedTuple

import datasets
import pytest
from PIL import Image

from reframe_vl.mini.world import MiniWorld

HAS_LMMS = importlib.util.find_spec("lmms_eval") is not None
TASK = "mini_digits"
NUM_QUESTIONS = 24

YAML = """
task: {task}
dataset_path: {data}
dataset_kwargs:
  load_from_disk: true
test_split: test
output_type: {kind}
doc_to_visual: {visual}
doc_to_text: question
doc_to_target: answer
generation_kwargs:
  max_new_tokens: 16
  temperature: 0
  do_sample: false
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""


def pytest_collection_modifyitems(items):
    for item in items:
        if "with_lmms" in item.path.parts:
            # lmms-eval reads thousands of tasks before it runs one.
            item.add_marker(pytest.mark.timeout(900))
            if not HAS_LMMS:
                item.add_marker(pytest.mark.skip(reason="no lmms-eval: make test-lmms"))


class Task(NamedTuple):
    """A task, and what it asks."""

    folder: Path
    images: list[Path]
    questions: list[str]
    answers: list[str]


@pytest.fixture(scope="session")
def task(tmp_path_factory):
    """Questions of the mini world as lmms-eval reads them; a second task has no images."""
    folder = tmp_path_factory.mktemp("tasks")
    images, questions, answers = [], [], []
    for index in range(NUM_QUESTIONS):
        sample = MiniWorld().sample("test", index)
        images.append(folder / f"{index}.png")
        Image.fromarray(sample.media.canvas.round().astype("uint8")).save(images[-1])
        questions.append(sample.question)
        answers.append(sample.answer.value)
    columns = {"image": [str(path) for path in images], "question": questions, "answer": answers}
    rows = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    datasets.DatasetDict({"test": rows}).save_to_disk(folder / "data")
    for name, visual, kind in (
        (TASK, "image", "generate_until"),
        ("mini_without_images", "null", "generate_until"),
        ("mini_likelihood", "image", "loglikelihood"),
    ):
        text = YAML.format(task=name, data=folder / "data", visual=visual, kind=kind)
        (folder / f"{name}.yaml").write_text(text)
    return Task(folder, images, questions, answers)
