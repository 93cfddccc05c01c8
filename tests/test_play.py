"""A person in the place of the policy sees what the model would see, and is judged as it is."""

import io
import json

import pytest
from PIL import Image
from rich.console import Console

from reframe_vl.data.media import MediaError
from reframe_vl.mini.model import base_folder
from reframe_vl.mini.source import mini_image_data
from reframe_vl.play import __main__ as play
from reframe_vl.play.screen import half_blocks
from reframe_vl.play.typed import turn_text
from reframe_vl.policy.loading import load_policy
from reframe_vl.rewards.total import RewardWeights, score
from reframe_vl.rollout.collector import Collector, EventLoopThread, Plan
from reframe_vl.rollout.engine import Generation
from reframe_vl.rollout.episode import Budget
from reframe_vl.rollout.prompt import PromptSettings
from reframe_vl.rollout.settings import make_environment
from reframe_vl.rollout.store import RolloutStore
from reframe_vl.tools.codec import codec_for
from reframe_vl.tools.crop_image import CropImage
from reframe_vl.tools.select_frames import SelectFrames
from reframe_vl.types import CallStatus, Provenance, Termination


@pytest.fixture
def game(tmp_path, monkeypatch, capsys):
    """Plays with typed lines; gives the rollout that was kept, its sample, and what was printed."""

    def run(*lines, args=()):
        typed = iter(lines)

        def ask(prompt=""):
            try:
                return next(typed)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr("builtins.input", ask)
        play.main([*args, "--out", str(tmp_path)])
        assert not list(typed)
        store = RolloutStore(tmp_path / "rollouts")
        groups = store.read(store.steps()[-1]) if store.steps() else []
        group = groups[0] if groups else None
        return group and group.rollouts[0], group and group.sample, capsys.readouterr().out

    return run


class Spoken:
    """An engine that says given tokens."""

    def __init__(self, turns):
        self.turns = list(turns)

    def open(self, sessions):
        pass

    async def generate(self, session, context, sampling, seed):
        ids = self.turns.pop(0)
        return Generation(ids, (None,) * len(ids), "stop")

    def release(self, session):
        pass

    def close(self):
        pass


def test_the_contexts_are_those_of_the_model(game):
    rollout, sample, _ = game("crop 250 250 500 500", "= 7", args=["--drop"])
    policy = load_policy(base_folder(2), family="qwen3_vl", compact_calls=True)
    turns = [
        span.token_ids
        for context in rollout.contexts
        for span in context.spans
        if span.provenance is Provenance.SAMPLED and not span.carried
    ]
    budget = Budget(3, 512, 192, 2, 160, 1024)
    settings = PromptSettings(
        show_tools=False, view_pixels=1024, frame_pixels=256, max_frames=4, frame_hint=False
    )
    environment = make_environment(policy, [CropImage(), SelectFrames()], budget)
    loop = EventLoopThread()
    collector = Collector(Spoken(turns), environment, settings, loop)
    # The world draws an item as it is looked at: the same one is the same to the last pixel.
    data = mini_image_data(0.5, 1, 0.8, 4, seed=0)
    [group] = collector.collect(
        [data.evaluation[0]], Plan(0, 1, policy.sampling(1.0, 16), drop_probability=1.0)
    )
    loop.stop()
    [theirs] = group.rollouts
    assert rollout.contexts == theirs.contexts
    assert rollout.calls == theirs.calls
    assert rollout.dropped and len(rollout.contexts) == 2
    assert sample.id == group.sample.id
    expected, total = score(theirs, group.sample, RewardWeights(), 0.0)
    assert (rollout.rewards, rollout.reward) == (expected, pytest.approx(total))


def test_what_is_seen_is_kept_as_files_and_the_reward_is_shown_by_its_parts(game, tmp_path):
    rollout, _, printed = game("crop 250 250 500 500", "= 7", args=["--progress", "1"])
    assert rollout.termination is Termination.ANSWERED
    [given, crop] = [view for context in rollout.contexts for view in context.views]
    for name, view in (("seen_001.png", given), ("seen_002.png", crop)):
        with Image.open(tmp_path / name) as image:
            assert image.size == view.pixels.shape[1::-1]
    assert "What digit is on the" in printed
    assert "<|im_start|>assistant" in printed
    for part in ("answer", "call", "grounding", "penalty", "total"):
        assert part in printed
    # Nothing of R_call is left at the end of training.
    assert rollout.reward == pytest.approx(rollout.rewards["answer"])


def test_what_the_model_could_not_write_is_asked_for_anew(game):
    rollout, _, printed = game("<|image_pad|>", "?", "= 7")
    assert rollout.num_turns == 1 and rollout.answers == ["7"]
    assert "can never write <|image_pad|>" in printed


def test_a_turn_that_is_too_long_is_cut_as_the_models_is(game):
    rollout, _, printed = game("one two three four five six seven eight nine " * 3)
    assert rollout.termination is Termination.TRUNCATED
    assert rollout.num_sampled == 16
    assert "limits.max_new_tokens=16" in printed


def test_the_gate_steps_in(game):
    rollout, _, printed = game("crop 0 0 100 100", "= 7", args=["--gate", "0.9"])
    assert [call.status for call in rollout.calls] == [CallStatus.REPLACED, CallStatus.OK]
    assert "injected" in printed


def test_a_video_is_played_in_the_same_way(game):
    rollout, sample, _ = game("frames 1 2", "= 7", args=["--data", "mini_video", "seed=1"])
    assert sample.modality == "video"
    assert rollout.calls[0].frames == (1, 2)


def test_the_end_of_the_input_ends_the_game(game):
    rollout, _, printed = game()
    assert rollout is None and "without a reward" in printed


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--number", "100000"], "samples"),
        (["--data", "no_such"], "no_such"),
        (["--gate", "2"], "gate"),
        (["--progress", "2"], "--progress"),
        (["--configs", "/nowhere"], "--configs"),
        (["model.path=/nowhere"], "/nowhere"),
    ],
)
def test_what_cannot_be_played_is_told_in_a_sentence(args, words, tmp_path):
    with pytest.raises(SystemExit, match=words) as stopped:
        play.main([*args, "--out", str(tmp_path)])
    assert isinstance(stopped.value.code, str)


@pytest.mark.parametrize(
    ("error", "words"), [(MediaError("a.png: no such file"), "a.png"), (KeyboardInterrupt(), "off")]
)
def test_what_ends_a_game_is_told_in_a_sentence(error, words, tmp_path, monkeypatch):
    def broken(*args, **kw):
        raise error

    monkeypatch.setattr(play, "make_game", broken)
    with pytest.raises(SystemExit, match=words):
        play.main(["--out", str(tmp_path)])


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_short_forms_are_the_familys_own_calls(family):
    codec = codec_for(family)
    parsed = codec.parse(turn_text("crop 1, 2, 3, 4", codec), truncated=False)
    assert parsed.call.name == "CropImage" and parsed.call.arguments == {"bbox_2d": [1, 2, 3, 4]}
    parsed = codec.parse(turn_text("frames 5 6", codec), truncated=False)
    assert parsed.call.arguments == {"frames": [5, 6]}
    assert codec.parse(turn_text("= two words", codec), truncated=False).answers == ("two words",)
    # What only looks like one is the model's turn as it stands.
    for typed in ("crop the image", "frames", 'crop "1"', "=7"):
        assert turn_text(typed, codec) == f"{typed}<|im_end|>"


def test_an_image_in_the_terminal_has_two_pixels_a_character():
    image = Image.new("RGB", (2, 2), "#ff0000")
    image.putpixel((0, 1), (0, 0, 255))
    console = Console(
        file=io.StringIO(), force_terminal=True, color_system="truecolor", legacy_windows=False
    )
    console.print(half_blocks(image, 2))
    printed = console.file.getvalue()
    assert printed.count("▀") == 2
    assert "38;2;255;0;0" in printed and "48;2;0;0;255" in printed
    assert half_blocks(Image.new("RGB", (500, 100)), 60).plain.splitlines()[0] == "▀" * 60


def test_what_is_kept_is_a_line_like_any_other(game, tmp_path):
    game("= 7")
    game("= 8")
    files = sorted((tmp_path / "rollouts").glob("*.jsonl"))
    assert [file.name for file in files] == ["step_000000.jsonl", "step_000001.jsonl"]
    assert json.loads(files[1].read_text())["key"]["step"] == 1
