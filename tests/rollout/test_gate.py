"""The observation gate: which calls give way, and what stands in the context afterwards."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reframe_vl.mini.video_world import MiniVideoWorld
from reframe_vl.rollout.collector import Plan
from reframe_vl.rollout.encoding import Encoder
from reframe_vl.rollout.episode import Budget
from reframe_vl.rollout.gate import BELOW_THRESHOLD, Gate, GateWatch, Item
from reframe_vl.rollout.statistics import statistics
from reframe_vl.rollout.store import RolloutStore
from reframe_vl.tools.base import Reason, Refusal, ToolRequest
from reframe_vl.tools.crop_image import CropImage
from reframe_vl.types import CallStatus, Evidence, Provenance, RolloutGroup, Termination
from scripted import END, ScriptedEngine, call, collector, sample
from tiny import sampling, tokenizer

ANSWER = f"<answer>7</answer>{END}"
FAR = "Let me look. " + call(0, 0, 30, 30)


def play(*lines, gate=None, of=None, drop=0.0, **kwargs):
    engine = ScriptedEngine(*lines)
    made = collector(engine, **kwargs)
    plan = Plan(0, 1, sampling(max_new_tokens=64), drop_probability=drop, gate=gate or Gate())
    [group] = made.collect([of or sample()], plan)
    made.loop.stop()
    return group.rollouts[0], engine


def text(spans):
    return "".join(tokenizer().decode(span.token_ids) for span in spans)


def of_provenance(context, provenance):
    return [s for s in context.spans if s.provenance is provenance]


def canonical(of):
    [box] = of.evidence.boxes
    rollout, _ = play(FAR, ANSWER, of=of)
    return text(of_provenance(rollout.contexts[0], Provenance.INJECTED)), box


def two_items():
    """The mini's sample with a second, disjoint piece of evidence."""
    base = sample()
    *_, x1, y1 = base.evidence.boxes[0]
    width, height = base.media.size
    other = (width - 40.0, height - 40.0, width - 4.0, height - 4.0)
    assert x1 < other[0] or y1 < other[1]
    return dataclasses.replace(base, evidence=Evidence(boxes=(base.evidence.boxes[0], other)))


def test_a_poor_call_gives_way_and_the_reasoning_before_it_stays():
    of = sample()
    rollout, engine = play(FAR, ANSWER, of=of)
    [context] = rollout.contexts
    _, reasoning, injected, observed, _ = context.spans
    assert [s.provenance.value for s in context.spans] == [
        "prompt",
        "sampled",
        "injected",
        "observed",
        "sampled",
    ]
    assert text([reasoning]) == "Let me look. "
    assert reasoning.logprobs == (-0.5,) * len(reasoning.token_ids)
    assert text([injected]).startswith("<tool_call>")
    assert text([injected]).endswith(f"</tool_call>{END}")
    assert injected.logprobs is None
    assert injected.trained
    assert len(observed.views) == 1
    proposed, executed = rollout.calls
    assert (proposed.status, proposed.reason) == (CallStatus.REPLACED, BELOW_THRESHOLD)
    assert proposed.proposal == call(0, 0, 30, 30)
    assert proposed.arguments == {"bbox_2d": [0, 0, 30, 30]}
    assert (executed.status, executed.by_gate) == (CallStatus.OK, True)
    assert np.allclose(executed.boxes[0], of.evidence.boxes[0], atol=1.0)
    # What the policy went on from holds no trace of its own call.
    assert call(0, 0, 30, 30) not in text(engine.contexts[1])
    assert rollout.termination is Termination.ANSWERED
    assert rollout.num_turns == 2


def test_a_good_call_stands_and_acquires_its_evidence():
    of = sample()
    good = canonical(of)[0]
    rollout, _ = play(good, FAR, ANSWER, of=of)
    assert [c.by_gate for c in rollout.calls] == [False, False]
    assert [c.status for c in rollout.calls] == [CallStatus.OK, CallStatus.OK]
    assert not of_provenance(rollout.contexts[0], Provenance.INJECTED)


@pytest.mark.parametrize(
    "line, reason",
    [
        (f"<tool_call>nonsense</tool_call>{END}", Reason.NOT_JSON),
        (call(500, 500, 100, 100), Reason.REVERSED_BOX),
        ('Hm <tool_call>{"name":"CropIm', Reason.TRUNCATED_CALL),
        (f"<answer>3</answer>{call()}", Reason.CALL_WITH_ANSWER),
        (call().replace("CropImage", "SelectFrames"), Reason.WRONG_MODALITY),
    ],
)
def test_an_invalid_call_gives_way_too(line, reason):
    rollout, _ = play(line, ANSWER)
    proposed, executed = rollout.calls
    assert (proposed.status, proposed.reason) == (CallStatus.REPLACED, reason)
    assert proposed.proposal == line[line.index("<tool_call>") :]
    assert executed.by_gate
    assert rollout.answers == ["7"]
    # The turn's end is the injected call's: none is written twice.
    assert f"{END}{END}" not in text(rollout.contexts[0].spans)


def test_a_tool_that_fails_is_not_made_to_fail_again():
    def broken(tool, request, media):
        raise OSError("the disk is gone")

    rollout, _ = play(FAR, FAR, FAR, ANSWER, run_tool=broken)
    assert [c.status for c in rollout.calls] == [
        CallStatus.REPLACED,
        CallStatus.FAILED,
        CallStatus.FAILED,
        CallStatus.FAILED,
    ]


def test_a_canonical_call_that_does_not_fit_ends_the_rollout_within_its_limit():
    of = sample()
    whole, _ = play(FAR, ANSWER, of=of)
    [context] = whole.contexts
    room = sum(len(span) for span in context.spans[:3]) + 64 - 1
    budget = Budget(max_context_tokens=room, tool_view_pixels=1024)
    rollout, _ = play(FAR, ANSWER, of=of, budget=budget)
    assert rollout.termination is Termination.MAX_TOKENS
    assert not of_provenance(rollout.contexts[0], Provenance.INJECTED)
    assert len(rollout.contexts[0]) + 64 <= room


def test_without_a_call_there_is_no_gate():
    rollout, _ = play(ANSWER)
    assert (rollout.calls, rollout.termination) == ([], Termination.ANSWERED)


def test_without_evidence_there_is_no_gate():
    bare = dataclasses.replace(sample(), evidence=None)
    rollout, _ = play(FAR, ANSWER, of=bare)
    assert [c.by_gate for c in rollout.calls] == [False]


def test_each_item_is_asked_for_once_in_annotation_order_where_nothing_else_decides():
    of = two_items()
    nonsense = f"<tool_call>x</tool_call>{END}"
    rollout, _ = play(nonsense, nonsense, call(), ANSWER, of=of)
    gated = [c for c in rollout.calls if c.by_gate]
    asked = np.array([c.boxes[0] for c in gated])
    assert np.allclose(asked, np.array(of.evidence.boxes), atol=1.0)
    # All acquired: the third call, however poor, stands.
    assert rollout.calls[-1].status is CallStatus.OK
    assert not rollout.calls[-1].by_gate


def test_the_item_that_a_call_overlaps_most_replaces_it():
    of = two_items()
    second = of.evidence.boxes[1]
    grid = np.array(second) * 1000 / np.tile(of.media.size, 2)
    # Twice as high and wide: an IoU of a quarter.
    wide = [*(2 * grid[:2] - grid[2:]).round().astype(int), *grid[2:].round().astype(int)]
    rollout, _ = play(call(*wide), ANSWER, of=of)
    assert rollout.calls[-1].by_gate
    assert np.allclose(rollout.calls[-1].boxes[0], second, atol=1.0)


def test_budget_first_call_and_probability_bound_the_interventions():
    of = two_items()
    lines = (FAR, FAR.replace("30]", "31]"), ANSWER)

    def number(**settings):
        rollout, _ = play(*lines, of=of, gate=Gate(**settings))
        return sum(c.by_gate for c in rollout.calls)

    assert number() == 2
    assert number(budget=1) == number(first_call_only=True) == 1
    assert number(budget=0) == number(probability=0.0) == number(threshold=0.0) == 0


def test_a_drop_after_a_repair_carries_the_repaired_turn():
    rollout, _ = play(FAR, ANSWER, drop=1.0)
    before, after = rollout.contexts
    assert [s.provenance for s in before.spans[1:]] == [Provenance.SAMPLED, Provenance.INJECTED]
    assert all(s.trained for s in before.spans[1:])
    carried = after.spans[1:3]
    assert all(s.carried and not s.trained for s in carried)
    assert text(carried) == text(before.spans[1:])
    assert len(after.views) == 1


def test_without_repair_the_rollout_goes_on_and_the_canonical_call_is_a_branch():
    rollout, engine = play(FAR, ANSWER, gate=Gate(repair=False))
    [context] = rollout.contexts
    assert text(of_provenance(context, Provenance.SAMPLED)) == FAR + ANSWER
    assert [c.status for c in rollout.calls] == [CallStatus.OK]
    [branch] = rollout.branches
    assert [s.trained for s in branch.spans] == [False, False, True]
    assert text(branch.spans[1:2]) == "Let me look. "
    assert branch.spans[-1].provenance is Provenance.INJECTED
    assert FAR in text(engine.contexts[1])


def test_frames_are_gated_by_their_segment():
    of = MiniVideoWorld().sample("test", 0)
    line = f'<tool_call>{{"name":"SelectFrames","arguments":{{"frames":[0]}}}}</tool_call>{END}'
    wanted = of.evidence.segments[0]
    assert wanted != (0,)
    rollout, _ = play(line, ANSWER, of=of)
    assert rollout.calls[-1].by_gate
    assert rollout.calls[-1].frames == wanted


def test_repaired_rollouts_are_read_back_as_they_were(tmp_path):
    of = sample()
    for gate in (Gate(), Gate(repair=False)):
        rollout, _ = play(FAR, ANSWER, of=of, gate=gate)
        store = RolloutStore(tmp_path)
        store.write(0, [RolloutGroup(of, [rollout])], tokenizer().decode)
        [group] = store.read(0)
        assert group.rollouts[0] == rollout


@given(st.text(max_size=20), st.integers(0, 3))
def test_tokens_before_a_call_never_hold_a_piece_of_it(words, cut):
    encoder = Encoder(tokenizer())
    written = words + call()
    ids = tuple(tokenizer()(written, add_special_tokens=False)["input_ids"])
    whole = encoder.decode(ids)
    start = whole.index("<tool_call>") if "<tool_call>" in whole else 0
    start = max(0, start - cut)
    count = encoder.tokens_before(ids, start)
    assert whole[:start].startswith(encoder.decode(ids[:count]))
    assert count == len(ids) or len(encoder.decode(ids[: count + 1])) > start or count == 0


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4, unique=True),
    st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 9), st.integers(0, 9))), max_size=6),
    st.floats(0.05, 0.95),
)
def test_the_gate_follows_its_definition(places, asked, threshold):
    boxes = [(10.0 * x, 10.0 * y, 10.0 * x + 12, 10.0 * y + 12) for x, y in places]
    tool = CropImage()
    items = [Item(tool, {"bbox_2d": list(box)}, box=box) for box in boxes]
    watch = GateWatch(Gate(threshold), items, seed=1)
    acquired = set()
    for place in asked:
        overlaps = {}
        if place is None:
            checked = Refusal(Reason.NOT_JSON, "")
        else:
            x, y = place
            request = ToolRequest(
                "CropImage", boxes=((10.0 * x, 10.0 * y, 10.0 * x + 12, 10.0 * y + 12),)
            )
            checked = (tool, request)
            overlaps = {i: item.overlap(request) for i, item in enumerate(items)}
        left = [i for i in range(len(items)) if i not in acquired]
        found = watch.intervene(checked)
        if not left:
            expected = None
        elif place is None:
            expected = left[0]
        else:
            best = max(overlaps[i] for i in left)
            first = next(i for i in left if overlaps[i] == best)
            expected = None if best >= threshold else first
        assert (found is None) == (expected is None)
        if found is not None:
            assert items.index(found) == expected
            watch.executed(ToolRequest("CropImage", boxes=(found.box,)))
            watch.settle(found)
            acquired |= {
                i
                for i, b in enumerate(boxes)
                if items[i].overlap(ToolRequest("CropImage", boxes=(found.box,))) >= threshold
            }
        elif place is not None:
            watch.executed(request)
            acquired |= {i for i in overlaps if overlaps[i] >= threshold}


@pytest.mark.parametrize("settings", [{"threshold": 1.5}, {"probability": -1}, {"budget": -1}])
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(ValueError, match=r"gate\."):
        Gate(**settings)


@pytest.mark.parametrize("budget", [0.5, True, "two"])
def test_a_budget_that_is_no_whole_number_is_refused(budget):
    settings = SimpleNamespace(threshold=0.5, probability=1.0, budget=budget)
    with pytest.raises(ValueError, match="whole number of 0 or more"):
        Gate.__post_init__(settings)


def test_a_branch_that_is_longer_than_a_context_may_be_is_left_out():
    of, line = sample(), "Let me look. " * 20 + call(0, 0, 30, 30)
    whole, _ = play(line, ANSWER, of=of, gate=Gate(repair=False))
    size = len(whole.branches[0])
    for room, kept in ((size, 1), (size - 1, 0)):
        budget = Budget(max_context_tokens=room, tool_view_pixels=1024)
        rollout, _ = play(line, ANSWER, of=of, gate=Gate(repair=False), budget=budget)
        assert rollout.calls
        assert len(rollout.branches) == kept


def test_an_image_is_gated_by_its_boxes_whatever_else_its_evidence_holds():
    of = sample()
    odd = dataclasses.replace(of, evidence=Evidence(segments=((0, 1),)))
    rollout, _ = play(FAR, ANSWER, of=odd)
    assert [c.status for c in rollout.calls] == [CallStatus.OK]


def test_numbers_of_a_gate_are_there_also_where_it_did_not_step_in():
    stepped_in, _ = play(FAR, ANSWER)
    stood, _ = play(canonical(sample())[0], ANSWER)
    made = [RolloutGroup(sample(), [stepped_in, stood])]
    numbers = statistics(made, gate=True)
    assert (numbers["gated"], numbers["interventions"]) == (0.5, 0.5)
    # The gate's own call is none of the policy's; the call that it replaced shows that it looks.
    assert (numbers["calls"], numbers["call_rate"]) == (0.5, 1.0)
    unreadable, _ = play(f"<tool_call>nonsense</tool_call>{END}", ANSWER)
    assert statistics([RolloutGroup(sample(), [unreadable])], gate=True)["call_rate"] == 0.0
    of_none = statistics([RolloutGroup(sample(), [stood])], gate=True)
    names = ("gated", "interventions", "injected_tokens")
    assert [of_none[name] for name in names] == [0.0, 0.0, 0.0]
    assert not set(names) & set(statistics(made))


def test_a_turn_whose_canonical_call_had_no_room_says_nothing_of_how_turns_end():
    of = sample()
    whole, _ = play(FAR, ANSWER, of=of)
    room = sum(len(span) for span in whole.contexts[0].spans[:3]) + 64 - 1
    budget = Budget(max_context_tokens=room, tool_view_pixels=1024)
    cut, _ = play(FAR, ANSWER, of=of, budget=budget)
    assert cut.calls[-1].status is CallStatus.REPLACED
    assert statistics([RolloutGroup(of, [cut])], gate=True)["ended_turns"] == 1.0
