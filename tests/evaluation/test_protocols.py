import json
from dataclasses import replace

import numpy as np
import pytest

import grey_world
from reframe_vl.evaluation.outcomes import FORCED_ARMS, Arm
from reframe_vl.evaluation.protocols import matched_views
from reframe_vl.evaluation.report import results
from reframe_vl.mini.world import MiniWorld
from reframe_vl.rollout.engine import Generation
from reframe_vl.rollout.episode import Budget
from reframe_vl.rollout.prompt import PromptSettings
from reframe_vl.tools.turns import CALL_OPEN
from reframe_vl.types import Evidence, Provenance
from tiny import tokenizer, view_maker

MAIN_ARMS = [arm for arm in Arm if arm is not Arm.CONFLICT and arm not in FORCED_ARMS]


def evaluate(samples, engine=None, conflict=None, arms=tuple(Arm), **kw):
    engine = engine or grey_world.ReadingEngine()
    judge = grey_world.evaluator(engine, **kw)
    try:
        return judge.evaluate(samples, conflict, arms), engine
    finally:
        judge.close()


def accuracy(result, arm):
    outcomes = result.outcomes[arm].values()
    return sum(o.correct for o in outcomes) / len(outcomes)


def test_each_arm_shows_what_it_says():
    samples = [grey_world.image_sample(f"s{i}", whole=1, evidence=2, answer=2) for i in range(3)]
    conflict = [grey_world.image_sample("c", whole=3, evidence=2, answer=3)]
    result, _ = evaluate(samples, conflict=conflict)
    right = {arm for arm in Arm if accuracy(result, arm) == 1}
    assert right == {Arm.TOOLS, Arm.DROPPED, Arm.TRUE, Arm.TRUE_DROPPED}
    assert all(accuracy(result, arm) == 0 for arm in Arm if arm not in right)
    assert result.num_items == 3
    assert {len(result.outcomes[arm]) for arm in Arm if arm is not Arm.CONFLICT} == {3}
    tools = result.outcomes[Arm.TOOLS]["s0"]
    assert (tools.calls, tools.iou) == (1, pytest.approx(1.0))
    assert result.outcomes[Arm.TRUE]["s0"].calls == 0
    assert result.outcomes[Arm.NO_TOOLS]["s0"].visual_tokens == 16


def test_controls_show_background_and_grey():
    samples = [grey_world.image_sample(f"s{i}", answer=grey_world.BACKGROUND) for i in range(4)]
    result, _ = evaluate(samples, arms=FORCED_ARMS)
    assert accuracy(result, Arm.RANDOM) == accuracy(result, Arm.RANDOM_DROPPED) == 1
    grey = [grey_world.image_sample(f"s{i}", answer=5) for i in range(4)]
    result, _ = evaluate(grey, arms=FORCED_ARMS)
    assert accuracy(result, Arm.BLANK) == accuracy(result, Arm.BLANK_DROPPED) == 1
    assert accuracy(result, Arm.TRUE) == accuracy(result, Arm.RANDOM) == 0


def test_forced_arms_differ_in_pixels_alone():
    boxes = (grey_world.BOX, (32.0, 40.0, 48.0, 48.0))
    samples = [grey_world.image_sample("s", boxes=boxes)]
    seen = {}
    for arm in sorted(FORCED_ARMS):
        _, engine = evaluate(samples, arms=[arm])
        ((_, seen[arm], _),) = engine.seen
    for kept in (True, False):
        arms = [a for a in seen if a.endswith("dropped") != kept]
        ids, grids, provenance = (
            {tuple(tuple(part(span)) for span in seen[arm]) for arm in arms}
            for part in (
                lambda s: s.token_ids,
                lambda s: (v.grid_thw for v in s.views),
                lambda s: (s.provenance,),
            )
        )
        assert len(arms) == 3 and len(ids) == len(grids) == len(provenance) == 1
        shown = {a: [v.hash for span in seen[a] for v in span.views] for a in arms}
        first = 1 if kept else 0
        assert all(len(h) == first + 2 for h in shown.values())
        assert len({tuple(h[:first]) for h in shown.values()}) == 1
        assert len({tuple(h[first:]) for h in shown.values()}) == 3
    spans = seen[Arm.TRUE]
    assert [s.provenance for s in spans[1:]] == [Provenance.INJECTED, Provenance.OBSERVED] * 2


def test_only_arms_with_tools_may_call_and_all_are_greedy():
    call = tokenizer().convert_tokens_to_ids("<tool_call>")
    for arm in Arm:
        arms = {arm, Arm.TOOLS} if arm is Arm.NO_TOOLS_MATCHED else {arm}
        _, engine = evaluate(
            [grey_world.image_sample("s")], conflict=[grey_world.image_sample("c")], arms=arms
        )
        _, spans, how = engine.seen[-1]
        with_tools = arm in (Arm.TOOLS, Arm.DROPPED, Arm.CONFLICT)
        assert (call in how.banned_ids) != with_tools
        assert how.temperature == 0
        section = "CropImage" in grey_world.text_of(spans[:1])
        assert section == (arm not in (Arm.NO_TOOLS, Arm.NO_TOOLS_MATCHED))


def test_a_prompt_without_tool_section_has_it_in_no_arm():
    for arm in (Arm.TOOLS, Arm.TRUE):
        _, engine = evaluate(
            [grey_world.image_sample("s")], arms=[arm], prompts=PromptSettings(show_tools=False)
        )
        assert "CropImage" not in grey_world.text_of(engine.seen[0][1][:1])


def test_a_dropped_arm_takes_the_original_away():
    _, engine = evaluate([grey_world.image_sample("s")], arms=[Arm.DROPPED])
    first, second = ([v for span in spans for v in span.views] for _, spans, _ in engine.seen)
    assert len(first) == len(second) == 1
    assert first[0].hash != second[0].hash


@pytest.mark.parametrize("broken", ["whole", "crop"])
def test_an_item_whose_media_fail_leaves_all_arms(broken):
    samples = [grey_world.image_sample("good"), grey_world.image_sample("bad", broken=broken)]
    result, _ = evaluate(samples)
    assert all(set(items) == {"good"} for items in result.outcomes.values())
    assert result.num_items == 1
    assert result.left_out == {"all": {"failed": 1}, "forced": {}, "conflict": {}}


def test_an_item_on_which_the_engine_fails_leaves_all_arms():
    samples = [grey_world.image_sample("good"), grey_world.image_sample("bad")]
    engine = grey_world.ReadingEngine(fails=frozenset({"bad"}))
    result, _ = evaluate(samples, engine)
    assert all(set(items) == {"good"} for items in result.outcomes.values())
    assert result.left_out["all"] == {"failed": 1}


def test_a_reference_that_cannot_be_read_is_nobodys_fault():
    samples = [grey_world.image_sample("good"), grey_world.image_sample("bad", answer="?")]
    result, _ = evaluate(samples, conflict=[grey_world.image_sample("c", answer="?")])
    assert result.num_items == 1
    assert result.left_out["all"] == result.left_out["conflict"] == {"unreadable_reference": 1}
    assert result.outcomes[Arm.CONFLICT] == {}


def test_items_without_evidence_or_control_leave_the_forced_arms_only():
    wide = (0.0, 0.0, 60.0, 60.0)
    samples = [
        grey_world.image_sample("good"),
        grey_world.image_sample("wide", boxes=(wide,)),
        replace(grey_world.image_sample("none"), evidence=Evidence()),
        replace(grey_world.image_sample("unknown"), evidence=None),
    ]
    result, _ = evaluate(samples)
    assert all(set(result.outcomes[arm]) == {"good"} for arm in FORCED_ARMS)
    assert all(len(result.outcomes[arm]) == 4 for arm in MAIN_ARMS)
    assert result.num_items == 4
    assert result.left_out["forced"] == {"no_control": 1, "no_evidence": 2}
    assert result.outcomes[Arm.TOOLS]["unknown"].iou is None


def test_evidence_too_small_to_ask_for_leaves_the_forced_arms_only(caplog):
    boxes = (grey_world.BOX, (40.0, 40.0, 41.0, 56.0))
    samples = [grey_world.image_sample("good"), grey_world.image_sample("tiny", boxes=boxes)]
    result, _ = evaluate(samples)
    assert all(set(result.outcomes[arm]) == {"good"} for arm in FORCED_ARMS)
    assert all(len(result.outcomes[arm]) == 2 for arm in MAIN_ARMS)
    assert result.left_out == {"all": {}, "forced": {"no_canonical_call": 1}, "conflict": {}}
    (line,) = (r.message for r in caplog.records if "forced-call arms" in r.message)
    assert "tiny" in line and "41.0" in line


def test_forced_calls_that_do_not_fit_the_context_leave_the_forced_arms_only():
    many = tuple((float(x), 8.0, x + 8.0, 16.0) for x in range(0, 64, 8))
    samples = [grey_world.image_sample("good"), grey_world.image_sample("many", boxes=many)]
    result, _ = evaluate(samples, budget=Budget(max_visual_tokens=20))
    assert all(set(result.outcomes[arm]) == {"good"} for arm in FORCED_ARMS)
    assert result.num_items == 2
    assert result.left_out == {"all": {}, "forced": {"over_budget": 1}, "conflict": {}}


def test_a_prompt_that_does_not_fit_is_no_wrong_answer():
    result, _ = evaluate(
        [grey_world.image_sample("s")], arms=[Arm.NO_TOOLS], budget=Budget(max_visual_tokens=3)
    )
    assert (result.num_items, result.left_out["all"]) == (0, {"over_budget": 1})
    assert results(result)["accuracy"]["no_tools"] is None


def test_the_matched_arm_has_at_least_the_visual_tokens_of_the_tools_arm():
    world = MiniWorld()
    samples = [world.sample("test", i) for i in range(3)]
    mean = {}
    for calls in (True, False):
        result, _ = evaluate(samples, grey_world.ReadingEngine(calls), arms=MAIN_ARMS)
        mean[calls] = {
            arm: np.mean([o.visual_tokens for o in items.values()])
            for arm, items in result.outcomes.items()
        }
    assert mean[True] == {"tools": 32, "no_tools": 16, "dropped": 32, "no_tools_matched": 36}
    assert mean[False] == {"tools": 16, "no_tools": 16, "dropped": 16, "no_tools_matched": 16}


def test_matched_views_enlarge_small_images_and_shrink_none():
    maker, pixels = matched_views(view_maker(), None, 32.0)
    assert maker.view(np.zeros((16, 16, 3), np.uint8), pixels).num_tokens == 36
    assert maker.view(np.zeros((900, 900, 3), np.uint8), pixels).num_tokens == 36
    maker, pixels = matched_views(view_maker(), None, 4.0)
    assert maker.view(np.zeros((64, 64, 3), np.uint8), pixels).num_tokens == 16
    maker, pixels = matched_views(view_maker(), 1024, 4.0)
    assert maker.view(np.zeros((64, 64, 3), np.uint8), pixels).num_tokens == 4


def test_forced_calls_work_on_videos_and_keep_the_evidences_captions():
    digits = (1, 1, 7, 7, 1, 1, 1, 1)
    samples = [
        grey_world.video_sample("v", digits, ((2, 3),), 7),
        grey_world.video_sample("w", (7,) * 3, ((0, 1),), 7),
    ]
    texts = {}
    for arm in (Arm.TRUE, Arm.RANDOM, Arm.BLANK):
        result, engine = evaluate(samples, arms=[arm])
        assert result.left_out["forced"] == {"no_control": 1}
        assert accuracy(result, arm) == (arm is Arm.TRUE)
        session, spans, _ = engine.seen[0]
        assert session.endswith("v")
        texts[arm] = grey_world.text_of(spans)
    assert len(set(texts.values())) == 1
    assert texts[Arm.TRUE].count("<2.0 seconds>") == 2
    assert texts[Arm.TRUE].count("<5.0 seconds>") == 1


def test_images_and_videos_are_matched_each_by_itself():
    samples = [grey_world.image_sample("i"), grey_world.video_sample("v", (1,) * 4, ((1,),), 1)]
    result, _ = evaluate(samples, arms=MAIN_ARMS)
    tokens = {
        arm: {name: o.visual_tokens for name, o in result.outcomes[arm].items()}
        for arm in (Arm.TOOLS, Arm.NO_TOOLS_MATCHED)
    }
    assert tokens == {Arm.TOOLS: {"i": 17, "v": 16}, Arm.NO_TOOLS_MATCHED: {"i": 25, "v": 16}}


class SelectingEngine(grey_world.ReadingEngine):
    """Selects three frames of a video first."""

    async def generate(self, session, context, how, seed):
        if len(context.spans) > 1 or tokenizer().convert_tokens_to_ids(CALL_OPEN) in how.banned_ids:
            return await super().generate(session, context, how, seed)
        text = grey_world.CODEC.render_call("SelectFrames", {"frames": [0, 1, 2]})
        ids = tuple(tokenizer()(text, add_special_tokens=False)["input_ids"])
        return Generation(ids, (0.0,) * len(ids), "stop")


@pytest.mark.parametrize(
    ("video_as", "tools", "matched"),
    [("frames", 3 * 4 + 3 * 4, 3 * 9), ("video", 2 * 4 + 2 * 4, 2 * 9)],
)
def test_a_videos_first_view_is_matched_by_what_it_is_fed_as(video_as, tools, matched):
    samples = [grey_world.video_sample("v", (1,) * 3, ((1,),), 1)]
    prompts = PromptSettings(video_as=video_as)
    result, _ = evaluate(samples, SelectingEngine(), arms=MAIN_ARMS, prompts=prompts)
    tokens = {arm: result.outcomes[arm]["v"].visual_tokens for arm in MAIN_ARMS}
    assert (tokens[Arm.TOOLS], tokens[Arm.NO_TOOLS_MATCHED]) == (tools, matched)


def test_outcomes_do_not_depend_on_how_many_play_at_once():
    samples = [grey_world.image_sample(f"s{i}", answer=1 + i % 2) for i in range(5)]
    assert evaluate(samples)[0] == evaluate(samples, max_concurrent=2)[0]


def test_requests_that_cannot_be_met_are_refused():
    sample = grey_world.image_sample("s")
    with pytest.raises(ValueError, match="Two samples have the id s"):
        evaluate([sample, sample])
    with pytest.raises(ValueError, match="needs the arm tools"):
        evaluate([sample], arms=[Arm.NO_TOOLS_MATCHED])


def test_arms_without_a_conflict_set_are_played_without_it():
    result, _ = evaluate([grey_world.image_sample("s")])
    assert Arm.CONFLICT not in result.outcomes


def test_a_model_is_evaluated_from_end_to_end_on_the_mini_world():
    samples = [MiniWorld().sample("test", i) for i in range(3)]
    conflict = [MiniWorld(conflict=True).sample("test", i) for i in range(3)]
    judge = grey_world.evaluator(prompts=PromptSettings(show_tools=False))
    try:
        first, again = (judge.evaluate(samples, conflict) for _ in range(2))
    finally:
        judge.close()
    assert first == again
    assert first.num_items == 3 and not any(first.left_out.values())
    report = results(first, again)
    assert set(report["accuracy"]) == set(Arm)
    assert json.loads(json.dumps(report)) == report
    assert report["tool_gain_vs_base"] is not None and report["base"]["tool_gain_vs_base"] is None
