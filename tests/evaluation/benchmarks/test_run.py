import json
import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from PIL import Image

import grey_world
from evaluation.benchmarks.releases import MAKERS, write_json
from reframe_vl.evaluation.answers import Answered, AnswerFile
from reframe_vl.evaluation.benchmark_report import write_report
from reframe_vl.evaluation.benchmark_results import table
from reframe_vl.evaluation.benchmark_run import BenchmarkRun, BenchmarkSettings, Place
from reframe_vl.evaluation.benchmarks import BENCHMARKS
from reframe_vl.policy.loading import Policy
from reframe_vl.rollout.episode import Budget
from reframe_vl.rollout.hf_engine import HFEngine
from reframe_vl.rollout.prompt import PromptSettings
from reframe_vl.rollout.settings import RolloutSettings
from reframe_vl.runs import register_resolvers
from reframe_vl.tools.registry import default_tools
from tiny import tiny_model, tokenizer

CONFIGS = Path(__file__).parents[3] / "configs"
SETTINGS = RolloutSettings(
    prompt=PromptSettings(view_pixels=1024), budget=Budget(), max_new_tokens=8, max_concurrent=2
)


def policy():
    return Policy(tiny_model("qwen3_vl"), tokenizer(), grey_world.CODEC, "tiny")


def evaluate(release, out, engine, name="vstar", rollouts=SETTINGS, model=None, **settings):
    chosen = BenchmarkSettings(unpacked=str(release / "unpacked"), **settings)
    run = BenchmarkRun({name: Place(str(release))}, chosen, out, "a/checkpoint", model or {})
    tools = default_tools()
    run.open(rollouts, tools)
    report = run.play(policy(), rollouts, tools, engine)
    (out / "results.json").write_text(json.dumps(report))
    return report


class Dying(HFEngine):
    """Dies, with its process, as a turn is asked for."""

    turns_left = 0

    async def generate(self, session, context, sampling, seed):
        Dying.turns_left -= 1
        if Dying.turns_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().generate(session, context, sampling, seed)


def bytes_of(out):
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }


def test_an_evaluation_that_is_killed_and_goes_on_gives_the_same_bytes(tmp_path):
    release = tmp_path / "release"
    MAKERS["vstar"](release)
    how = {"arms": ["tools", "no_tools"], "samples": 2}
    evaluate(release, tmp_path / "whole", HFEngine, **how)
    out = tmp_path / "killed"
    lines = []
    # Each one dies a little later than the last came.
    for turns in (1, 3, 4, 6):
        Dying.turns_left = turns
        dying = multiprocessing.get_context("fork").Process(
            target=evaluate, args=(release, out, Dying), kwargs=how
        )
        dying.start()
        dying.join()
        assert dying.exitcode == -signal.SIGKILL
        file = out / "vstar" / "answers.jsonl"
        lines.append(len(file.read_text().splitlines()) if file.exists() else 0)
        if turns == 4:
            with file.open("a") as stream:
                stream.write('{"item": "vstar/cut sho')
    assert lines == sorted(lines) and 0 < lines[-1] < 12
    evaluate(release, out, HFEngine, **how)
    assert bytes_of(out) == bytes_of(tmp_path / "whole")
    assert len((out / "vstar" / "answers.jsonl").read_text().splitlines()) == 12


def grey_release(folder, answers=(2, 2, 3)):
    """The whole view shows 1, the region that the engine crops shows 2."""
    for number, answer in enumerate(answers):
        pixels = grey_world.paint(1, 64, 64)
        x0, y0, x1, y1 = map(int, grey_world.BOX)
        pixels[y0:y1, x0:x1] = grey_world.paint(2, y1 - y0, x1 - x0)
        pixels[63, 63] = number
        path = folder / "images" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
        row = {"id": str(number), "image": f"images/{number}.png", "answer": str(answer)}
        row["problem"] = "What digit is it?"
        write_json(folder / f"Visual-Counting-{'id' if number else 'ood'}-{number}.json", [row])
    return folder


LONG = replace(SETTINGS, max_new_tokens=40, prompt=PromptSettings())


def reading(model):
    return grey_world.ReadingEngine()


def test_conditions_tool_gain_and_answers(tmp_path):
    release, out = grey_release(tmp_path / "release"), tmp_path / "out"
    report = evaluate(
        release,
        out,
        reading,
        "reason_rft_counting",
        LONG,
        arms=["tools", "no_tools", "no_tools_matched", "true"],
        samples=4,
    )
    one = report["benchmarks"]["reason_rft_counting"]
    means = {
        n: s["measures"].get("accuracy", {}).get("value") for n, s in one["conditions"].items()
    }
    assert means == {"tools": 0.75, "no_tools": 0.0, "no_tools_matched": 0.0, "true": None}
    assert one["tool_gain"]["value"] == one["tool_gain_matched"]["value"] == 0.75
    assert one["observation_dependence"] is None
    assert [one[name]["value"] for name in ("gain_called", "gain_not_called", "harm")] == [
        pytest.approx(2 / 3),
        0.0,
        0.0,
    ]
    assert one["conditions"]["true"]["left_out"] == {"no_evidence": 3}
    assert one["conditions"]["tools"]["calls_per_answer"]["value"] == 1
    matched = one["conditions"]["no_tools_matched"]["visual_tokens"]["value"]
    assert matched >= one["conditions"]["tools"]["visual_tokens"]["value"]
    assert one["sampled"]["measures"]["accuracy"]["value"] == 0.75
    assert [e["value"] for e in one["sampled"]["pass_at_k"].values()] == pytest.approx([2 / 3] * 3)
    assert report["mean"]["tools"] == one["conditions"]["tools"]["measures"]["accuracy"]
    line = AnswerFile(out / "reason_rft_counting" / "answers.jsonl").of("tools")
    first = line["reason_rft_counting/Visual-Counting-id-1/1"]
    assert (first.text, first.calls, first.termination) == ("2", 1, "answered")
    assert first.boxes == (grey_world.BOX,)


def test_budgets_of_visual_tokens_are_conditions_of_their_own(tmp_path):
    release = grey_release(tmp_path / "release")
    report = evaluate(
        release,
        tmp_path / "out",
        reading,
        "reason_rft_counting",
        LONG,
        arms=["no_tools"],
        visual_tokens=[4, 16],
    )
    sections = report["benchmarks"]["reason_rft_counting"]["conditions"]
    tokens = {name: section["visual_tokens"]["value"] for name, section in sections.items()}
    assert list(tokens) == ["no_tools@4", "no_tools@16"]
    assert report["benchmarks"]["reason_rft_counting"]["tool_gain@4"] is None
    assert tokens["no_tools@4"] <= 4 < tokens["no_tools@16"] <= 16


class Remote(grey_world.ReadingEngine):
    """As one that runs elsewhere: it is started, and given the weights."""

    shared = False

    async def start(self, device):
        self.told = ["start"]

    async def sync(self, model, version):
        self.told += ["sync", version]

    async def rest(self):
        raise AssertionError("Nothing is trained.")


def test_an_engine_with_weights_of_its_own_gives_the_same_answers(tmp_path):
    release = grey_release(tmp_path / "release", (2, 1, 1, 3, 2))
    engines = []

    def remote(model):
        engines.append(Remote())
        return engines[0]

    name = "reason_rft_counting"
    here = evaluate(release, tmp_path / "here", reading, name, LONG)
    assert evaluate(release, tmp_path / "there", remote, name, LONG) == here
    assert engines[0].told == ["start", "sync", 0]
    assert bytes_of(tmp_path / "here") == bytes_of(tmp_path / "there")


def test_a_failed_engine_leaves_the_item_out_of_the_score(tmp_path):
    release = grey_release(tmp_path / "release")

    def broken(model):
        return grey_world.ReadingEngine(
            fails=frozenset({"reason_rft_counting/Visual-Counting-id-1/1"})
        )

    report = evaluate(release, tmp_path / "out", broken, "reason_rft_counting", LONG)
    section = report["benchmarks"]["reason_rft_counting"]["conditions"]["tools"]
    assert (section["items"], section["left_out"]) == (2, {"failed": 1})


def test_other_settings_do_not_go_on_in_the_same_folder(tmp_path):
    release, out = grey_release(tmp_path / "release"), tmp_path / "out"
    evaluate(release, out, reading, "reason_rft_counting", LONG, arms=["no_tools"])
    other = replace(LONG, max_new_tokens=41)
    with pytest.raises(ValueError, match="other rollouts"):
        evaluate(release, out, reading, "reason_rft_counting", other, arms=["no_tools"])
    with pytest.raises(ValueError, match="other model"):
        evaluate(release, out, reading, "reason_rft_counting", LONG, {"thinking": True})
    with pytest.raises(ValueError, match="choose among"):
        Place(str(release)).opened("vqa", BenchmarkSettings())
    with pytest.raises(ValueError, match="conflict"):
        BenchmarkSettings(arms=["conflict"])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"visual_tokens": [0]}, r"\[256,1024\]"),
        ({"samples": -1}, "samples"),
        ({"limit": 0}, "limit"),
        ({"limit": -3}, "limit"),
    ],
)
def test_settings_that_cannot_be_are_told_in_a_sentence(settings, words):
    with pytest.raises(ValueError, match=words):
        BenchmarkSettings(**settings)


def test_what_is_wrong_is_told_before_anything_is_played(tmp_path):
    release, name = grey_release(tmp_path / "release"), "reason_rft_counting"

    def unwanted(model):
        raise AssertionError("Nothing is to be played.")

    with pytest.raises(ValueError, match=r"benchmark_settings\.judge"):
        evaluate(release, tmp_path / "a", unwanted, name, LONG, judge={"url": "x"})
    assert not (tmp_path / "a").exists()
    answers = tmp_path / "b" / name / "answers.jsonl"
    answers.parent.mkdir(parents=True)
    answers.write_text("no\n")
    with pytest.raises(ValueError, match="Remove the line"):
        evaluate(release, tmp_path / "b", unwanted, name, LONG)


def test_two_checkpoints_are_compared_item_by_item_and_reported(tmp_path):
    release = grey_release(tmp_path / "release", (2, 1, 1, 3))
    name = "reason_rft_counting"
    evaluate(release, tmp_path / "a", reading, name, LONG)

    def blind(model):
        return grey_world.ReadingEngine(calls=False)

    against = str(tmp_path / "a")
    report = evaluate(release, tmp_path / "b", blind, name, LONG, against=against)
    part = report["benchmarks"][name]["against"]["tools"]
    assert (part["gained"], part["lost"]) == (
        [f"{name}/Visual-Counting-id-{n}/1" for n in (1, 2)],
        [f"{name}/Visual-Counting-ood-0/1"],
    )
    assert part["items"] == 4 and part["p_value"] == 1.0
    assert part["differences"]["accuracy"]["value"] == pytest.approx((2 / 3 - 1) / 2)
    with pytest.raises(ValueError, match="against"):
        evaluate(release, tmp_path / "c", blind, name, LONG, against=str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="another evaluation"):
        evaluate(release, tmp_path / "a", blind, name, LONG, against=against)
    write_report(report, tmp_path, {"reward": [(0, 0.1), (1, 0.4)]})
    text = (tmp_path / "report.md").read_text()
    assert f"## {name}" in text and "2 gained, 1 lost" in text and "tool_gain" in text
    assert np.asarray(Image.open(tmp_path / "report.png")).std() > 0
    assert table(report).row_count == 2


def test_configs_name_a_place_for_each_benchmark_and_take_several():
    register_resolvers()
    given = ["ckpt=x", "paths.run_dir=unused", "benchmark_path=/all", "benchmarks.vstar.path=/v"]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        cfg = compose("eval", [*given, f"benchmark=[{','.join(BENCHMARKS)}]", "scale=paper"])
        plain = compose("eval", given[:2])
    places = {name: instantiate(node) for name, node in cfg.benchmarks.items()}
    assert set(places) == set(BENCHMARKS) and all(isinstance(p, Place) for p in places.values())
    assert (places["vstar"].path, places["wemath"].path) == ("/v", "/all")
    assert instantiate(cfg.benchmark_settings) == BenchmarkSettings(
        arms=["tools", "no_tools"], visual_tokens=[], unpacked="./logs/benchmark_media"
    )
    assert not plain.benchmarks


def test_checkpoints_are_compared_on_the_items_that_both_answered(tmp_path, caplog):
    name = "reason_rft_counting"
    few = grey_release(tmp_path / "few", (2, 1))
    evaluate(few, tmp_path / "a", reading, name, LONG, arms=["no_tools"])
    many = grey_release(tmp_path / "many", (2, 1, 3))
    how = {"arms": ["no_tools"], "against": str(tmp_path / "a")}
    report = evaluate(many, tmp_path / "b", reading, name, LONG, **how)
    part = report["benchmarks"][name]["against"]["no_tools"]
    assert (part["items"], part["gained"], part["lost"], part["p_value"]) == (2, [], [], 1.0)
    assert "evaluated on other items" in caplog.text


def test_answers_are_read_back_and_a_bad_line_is_named(tmp_path):
    path = tmp_path / "answers.jsonl"
    line = Answered(
        "a", "tools", text="\u05d0 <b>", boxes=((0.0, 1.0, 2.5, 3.0),), spans=((0.5, 2.0),)
    )
    file = AnswerFile(path)
    file.add([line, replace(line, item="b", left_out="failed"), line])
    again = AnswerFile(path)
    assert again.of("tools")["a"] == line and len(again.of("tools")) == 2
    assert again[("tools", 0, "b")].left_out == "failed" and ("tools", 1, "a") not in again
    path.write_text("no\n" + path.read_text())
    with pytest.raises(ValueError, match="line 1"):
        AnswerFile(path)
    for damaged in (b'{"item": "\xff"}\n', b'{"boxes": [[0.0]], "spans": []}\n', b"[]\n", b"\0\n"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"line 1.*Remove the line"):
            AnswerFile(path)
