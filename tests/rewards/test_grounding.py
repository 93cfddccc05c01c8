import itertools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reframe_vl.rewards.grounding import (
    box_reward,
    frame_reward,
    grounding_reward,
    pairwise_iou,
)
from reframe_vl.types import (
    CallRecord,
    CallStatus,
    Evidence,
    Modality,
    Rollout,
    Sample,
    Termination,
)

Make = Callable[..., Rollout]
MakeSample = Callable[..., Sample]
MakeCall = Callable[..., CallRecord]
Boxes = npt.NDArray[np.float64]

ANY_BOX = st.tuples(*[st.floats(-10, 10)] * 4)
GRID_BOX = st.tuples(*[st.integers(0, 6)] * 4)
STRANGE = st.tuples(*[st.floats(allow_nan=True, allow_infinity=True)] * 4)


def boxes_of(box: st.SearchStrategy[tuple[float, ...]], least: int = 0) -> st.SearchStrategy[Boxes]:
    return st.lists(box, min_size=least, max_size=4).map(
        lambda boxes: np.array(boxes, dtype=np.float64).reshape(-1, 4)
    )


def area(box: Boxes) -> float:
    return float(max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1]))


def slow_iou(a: Boxes, b: Boxes) -> float:
    if area(a) == 0 or area(b) == 0:
        return 0.0
    overlap = area(np.concatenate([np.maximum(a[:2], b[:2]), np.minimum(a[2:], b[2:])]))
    return overlap / (area(a) + area(b) - overlap)


def slow_box_reward(asked: Boxes, evidence: Boxes) -> float:
    few, many = sorted([asked, evidence], key=len)
    return max(
        sum(slow_iou(a, many[j]) for a, j in zip(few, chosen, strict=True)) / len(many)
        for chosen in itertools.permutations(range(len(many)), len(few))
    )


@given(boxes_of(GRID_BOX), boxes_of(GRID_BOX))
def test_iou_of_grid_boxes_is_the_share_of_cells(asked: Boxes, evidence: Boxes) -> None:
    def cells(box: Boxes) -> set[tuple[int, int]]:
        x0, y0, x1, y1 = box.astype(int)
        return set(itertools.product(range(x0, x1), range(y0, y1)))

    iou = pairwise_iou(asked, evidence)
    assert iou.shape == (len(asked), len(evidence))
    for i, j in np.ndindex(*iou.shape):
        a, b = cells(asked[i]), cells(evidence[j])
        assert iou[i, j] == pytest.approx(len(a & b) / len(a | b) if a | b else 0.0)


@given(boxes_of(STRANGE), boxes_of(STRANGE))
def test_iou_of_any_floats_lies_in_0_1_and_is_never_nan(asked: Boxes, evidence: Boxes) -> None:
    iou = pairwise_iou(asked, evidence)
    assert ((iou >= 0) & (iou <= 1)).all()


@given(boxes_of(STRANGE, 1), boxes_of(STRANGE, 1))
def test_one_pair_is_worth_its_iou_whatever_its_floats(asked: Boxes, evidence: Boxes) -> None:
    with np.errstate(over="ignore"):
        assert box_reward(asked[:1], evidence[:1]) == pairwise_iou(asked, evidence)[0, 0]


@given(boxes_of(ANY_BOX, 1), boxes_of(ANY_BOX, 1))
def test_the_matching_is_the_best_of_all(asked: Boxes, evidence: Boxes) -> None:
    assert box_reward(asked, evidence) == pytest.approx(slow_box_reward(asked, evidence))


@given(boxes_of(ANY_BOX, 1), boxes_of(ANY_BOX, 1))
def test_the_order_of_boxes_does_not_matter(asked: Boxes, evidence: Boxes) -> None:
    assert box_reward(asked[::-1], evidence) == pytest.approx(box_reward(asked, evidence))
    assert box_reward(evidence, asked) == pytest.approx(box_reward(asked, evidence))


def test_missing_and_surplus_boxes_both_cost() -> None:
    two = np.array([[0.0, 0, 2, 2], [4, 4, 6, 6]])
    assert box_reward(two, two) == 1.0
    assert box_reward(two[:1], two) == 0.5
    assert box_reward(two, two[:1]) == 0.5
    assert box_reward(np.repeat(two, 5, axis=0), two) == pytest.approx(0.2)


@given(st.lists(st.integers(0, 9)), st.lists(st.integers(0, 9)))
def test_frame_reward_is_the_iou_of_sets(frames: list[int], evidence: list[int]) -> None:
    shared = sum(f in frames and f in evidence for f in range(10))
    either = sum(f in frames or f in evidence for f in range(10))
    assert frame_reward(frames, evidence) == (shared / either if either else 0.0)


def test_d16_d17_the_oracle_box_and_frames_give_one(
    make_rollout: Make, make_sample: MakeSample, make_call: MakeCall
) -> None:
    boxes = ((0.0, 0.0, 640.0, 597.0), (10.5, 20.0, 30.25, 40.0))
    image = make_sample(evidence=Evidence(boxes=boxes))
    calls = [make_call(boxes=(box,)) for box in reversed(boxes)]
    assert grounding_reward(make_rollout("x", calls=calls), image) == 1.0
    video = make_sample(modality=Modality.VIDEO, evidence=Evidence(segments=((1, 2), (7,))))
    calls = [make_call(frames=(7, 1)), make_call(frames=(2,))]
    assert grounding_reward(make_rollout("x", calls=calls), video) == 1.0


def test_d16_a_crop_of_the_whole_picture_earns_only_the_share_of_a_small_box(
    make_rollout: Make, make_sample: MakeSample, make_call: MakeCall
) -> None:
    sample = make_sample(evidence=Evidence(boxes=((0.0, 0.0, 10.0, 10.0),)))
    rollout = make_rollout("x", calls=[make_call(boxes=((0.0, 0.0, 100.0, 100.0),))])
    assert grounding_reward(rollout, sample) == pytest.approx(0.01)


def test_without_evidence_there_is_no_term_and_nothing_asked_is_zero(
    make_rollout: Make, make_sample: MakeSample
) -> None:
    box = Evidence(boxes=((0.0, 0.0, 1.0, 1.0),))
    assert grounding_reward(make_rollout("x"), make_sample()) is None
    assert grounding_reward(make_rollout("x"), make_sample(evidence=Evidence())) is None
    assert grounding_reward(make_rollout("x"), make_sample(evidence=box)) == 0.0
    video = {"modality": Modality.VIDEO}
    assert grounding_reward(make_rollout("x"), make_sample(evidence=box, **video)) is None
    frames = Evidence(segments=((1,),))
    assert grounding_reward(make_rollout("x"), make_sample(evidence=frames, **video)) == 0.0


def test_only_successful_calls_of_the_policy_count(
    make_rollout: Make, make_sample: MakeSample, make_call: MakeCall
) -> None:
    box = (0.0, 0.0, 1.0, 1.0)
    sample = make_sample(evidence=Evidence(boxes=(box,)))
    repeated = make_call(CallStatus.REPEATED, boxes=(box,))
    gate = make_call(boxes=(box,), by_gate=True)
    others = [repeated, gate, make_call(CallStatus.REFUSED)]
    assert grounding_reward(make_rollout("x", calls=others), sample) == 0.0
    assert (
        grounding_reward(make_rollout("x", calls=[make_call(boxes=(box,)), *others]), sample) == 1
    )


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ([CallStatus.FAILED], None),
        ([CallStatus.FAILED, CallStatus.REFUSED], None),
        ([CallStatus.FAILED, CallStatus.OK], 1.0),
        ([CallStatus.REFUSED], 0.0),
    ],
)
def test_d20_a_tool_that_failed_omits_the_term_where_nothing_was_returned(
    make_rollout: Make,
    make_sample: MakeSample,
    make_call: MakeCall,
    statuses: list[CallStatus],
    expected: float | None,
) -> None:
    box = (0.0, 0.0, 1.0, 1.0)
    sample = make_sample(evidence=Evidence(boxes=(box,)))
    calls = [make_call(s, boxes=(box,) if s is CallStatus.OK else ()) for s in statuses]
    assert grounding_reward(make_rollout("x", calls=calls), sample) == expected


def test_a_failed_call_of_the_gate_does_not_omit_the_term(
    make_rollout: Make, make_sample: MakeSample, make_call: MakeCall
) -> None:
    sample = make_sample(evidence=Evidence(boxes=((0.0, 0.0, 1.0, 1.0),)))
    gate = make_call(CallStatus.FAILED, by_gate=True)
    assert grounding_reward(make_rollout("x", calls=[gate]), sample) == 0.0


def test_d20_an_infrastructure_error_is_no_score(
    make_rollout: Make, make_sample: MakeSample
) -> None:
    sample = make_sample(evidence=Evidence(boxes=((0.0, 0.0, 1.0, 1.0),)))
    assert grounding_reward(make_rollout(termination=Termination.ERROR), sample) is None
