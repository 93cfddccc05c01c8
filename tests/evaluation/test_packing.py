import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reframe_vl.evaluation.outcomes import Arm, EvaluationResult, Outcome
from reframe_vl.evaluation.packing import Items, pack, unpack

MAIN = {f"item/{i}": f"medium-{i // 2}" for i in range(70)}
CONFLICT = {f"item/{i}/conflict": f"other-{i}" for i in range(3)}
ITEMS = Items(MAIN, CONFLICT)

outcomes = st.builds(
    Outcome,
    correct=st.booleans(),
    calls=st.integers(0, 3),
    visual_tokens=st.integers(0, 200),
    iou=st.none() | st.integers(0, 10_000).map(lambda i: i / 10_000),
)


@st.composite
def results(draw):
    arms = draw(st.sets(st.sampled_from(list(Arm)), min_size=1))
    played = {
        arm: draw(st.dictionaries(st.sampled_from(list(ITEMS.of(arm))), outcomes)) for arm in arms
    }
    names = sorted(name for items in played.values() for name in items)
    media = {name: (MAIN | CONFLICT)[name] for name in names}
    return EvaluationResult(played, media, 70, {"all": {"failed": 2}, "forced": {}, "conflict": {}})


@settings(max_examples=30)
@given(results())
def test_unpacking_a_packed_result_as_json_gives_it_back(result):
    packed = json.loads(json.dumps(pack(result, ITEMS)))
    assert unpack(packed, ITEMS) == result


def test_more_values_than_there_are_letters_are_kept():
    arm = {name: Outcome(True, 0, i, i / 1000) for i, name in enumerate(MAIN)}
    result = EvaluationResult({Arm.TOOLS: arm}, dict(sorted(MAIN.items())), 70, {})
    assert unpack(pack(result, ITEMS), ITEMS) == result


def test_packing_is_compact():
    arm = {name: Outcome(True, i % 2, 32, 0.0) for i, name in enumerate(MAIN)}
    packed = pack(EvaluationResult({Arm.TOOLS: arm}, MAIN, 70, {}), ITEMS)
    assert len(json.dumps(packed["arms"]["tools"])) < 3.5 * len(MAIN)


def test_items_that_are_not_listed_are_refused():
    result = EvaluationResult({Arm.TOOLS: {"x": Outcome(True, 0, 1, None)}}, {"x": "m"}, 1, {})
    with pytest.raises(ValueError, match="the item x"):
        pack(result, ITEMS)
    packed = pack(EvaluationResult({Arm.TOOLS: {}}, {}, 0, {}), ITEMS)
    packed["arms"]["tools"]["correct"] = "1" * 71
    with pytest.raises(ValueError, match="71 packed items"):
        unpack(packed, ITEMS)
