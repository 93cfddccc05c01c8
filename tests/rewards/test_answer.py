import logging
from collections.abc import Callable

import pytest

from reframe_vl.rewards import math_check
from reframe_vl.rewards.answer import answer_reward
from reframe_vl.rewards.math_check import MathChecker, MathCheckError
from reframe_vl.types import Answer, Rollout, Sample, Termination

Make = Callable[..., Rollout]
MakeSample = Callable[..., Sample]

OPTIONS = ("a cat", "a dog", "a cow", "a fox")
RIGHT = {
    "mcq": Answer("mcq", "D"),
    "open": Answer("open", "red car", aliases=("crimson car",)),
    "number": Answer("number", "1200", tolerance=0.01),
    "span": Answer("span", "$1,204.50"),
    "expression": Answer("expression", r"\frac{1}{2}", aliases=("50%",)),
}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("mcq", "D"), ("mcq", "a fox"), ("mcq", "Answer: **D**"), ("open", "The **red car**."),
        ("open", "Answer: crimson car"), ("number", "1,205"), ("number", "$1,190"),
        ("span", "$1,204.50"), ("expression", "0.5"), ("expression", "**1/2**"),
    ],
)  # fmt: skip
def test_d06_a_right_answer_scores_one(
    make_rollout: Make, make_sample: MakeSample, kind: str, text: str
) -> None:
    sample = make_sample(answer=RIGHT[kind], options=OPTIONS if kind == "mcq" else ())
    assert answer_reward(make_rollout(text), sample) == 1.0


@pytest.mark.parametrize("kind", RIGHT)
@pytest.mark.parametrize(
    "exploit",
    ["", " ", "\n", "**", "``", "ABCD", "A B C D", "A, B, C, D", "the", ".", "red", "car", "1", "$",
     " ".join(OPTIONS), " ".join(f"({x}) {o}" for x, o in zip("ABCD", OPTIONS, strict=True)),
     "What is it?", "What is it? A. a cat B. a dog C. a cow D. a fox", "None of the above",
     "red car crimson car", "red car or blue car", "1200 1300", "1100-1300", "0.5 or 0.6",
     "$1,204.50 $1,204.51", "1,204.50 or 12", "0 1 2 3 4 5 6 7 8 9", "I do not know"],
)  # fmt: skip
def test_d13_exploits_score_zero(
    make_rollout: Make, make_sample: MakeSample, kind: str, exploit: str
) -> None:
    sample = make_sample(answer=RIGHT[kind], options=OPTIONS if kind == "mcq" else ())
    assert answer_reward(make_rollout(exploit), sample) == 0.0


def test_d13_no_answer_block_scores_zero(make_rollout: Make, make_sample: MakeSample) -> None:
    for answer in RIGHT.values():
        assert answer_reward(make_rollout(), make_sample(answer=answer)) == 0.0


def test_d15_the_last_of_several_answer_blocks_counts(
    make_rollout: Make, make_sample: MakeSample
) -> None:
    assert answer_reward(make_rollout("red car", "blue car"), make_sample()) == 0.0
    assert answer_reward(make_rollout("blue car", "red car"), make_sample()) == 1.0
    assert answer_reward(make_rollout("red car", ""), make_sample()) == 0.0


def test_d20_an_infrastructure_error_is_no_score(
    make_rollout: Make, make_sample: MakeSample
) -> None:
    rollout = make_rollout("red car", termination=Termination.ERROR)
    assert answer_reward(rollout, make_sample()) is None


def test_d20_a_checker_that_does_not_work_raises(
    make_rollout: Make, make_sample: MakeSample, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = MathChecker(command=("/no/such/python",))
    monkeypatch.setattr(math_check._Shared, "checker", broken)
    with pytest.raises(MathCheckError):
        answer_reward(make_rollout("2"), make_sample(answer=Answer("expression", "1")))


@pytest.mark.parametrize(
    "answer",
    [Answer("mcq", "Z"), Answer("mcq", ""), Answer("number", "seven"), Answer("open", " ")],
)
def test_a_reference_that_cannot_be_read_gives_no_score_and_says_so(
    make_rollout: Make,
    make_sample: MakeSample,
    answer: Answer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sample = make_sample(
        id=f"unreadable {answer.kind} {answer.value}", answer=answer, options=OPTIONS
    )
    with caplog.at_level(logging.WARNING):
        assert answer_reward(make_rollout("7"), sample) is None
        assert answer_reward(make_rollout("8"), sample) is None
    assert len(caplog.records) == 1
    assert sample.id in caplog.text
