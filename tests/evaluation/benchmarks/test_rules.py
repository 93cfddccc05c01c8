"""Each benchmark's rule against a reference that is written slowly and obviously."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluation.benchmarks.releases import made
from reframe_vl.evaluation.answers import Answered
from reframe_vl.evaluation.benchmark_scores import draws_of, score_answers
from reframe_vl.evaluation.benchmarks.base import JudgeError, Response
from reframe_vl.evaluation.benchmarks.reason_rft_spatial import sequence_score
from reframe_vl.evaluation.rules.numbers import mean_relative_accuracy, stated_number
from reframe_vl.evaluation.rules.spans import best_iou_and_iop, intervals_iou, spans_of_frames


def scores_of(benchmark, items, texts, judge=None):
    """Scores of answers that are given by item, in order."""
    pairs = zip(items, texts, strict=True)
    answers = {i.sample.id: Answered(i.sample.id, "tools", text=text) for i, text in pairs}
    return score_answers(benchmark, items, answers, judge)[0]


def values(benchmark, items, scores):
    return {name: draws[0] for name, draws in draws_of(benchmark, items, scores).items()}


def rights(items, right):
    """Answers that are right or wrong as told."""
    return [i.sample.answer.value if r else "Z" for i, r in zip(items, right, strict=True)]


def test_vstar_is_accuracy_overall_and_by_category(tmp_path):
    benchmark, items, _ = made("vstar", tmp_path)
    found = values(benchmark, items, scores_of(benchmark, items, ["B", "(B) light blue", "red"]))
    assert found == pytest.approx(
        {
            "accuracy": 1 / 3,
            "accuracy/category=direct_attributes": 1 / 2,
            "accuracy/category=relative_position": 0.0,
        }
    )


def test_hr_bench_averages_over_cycles(tmp_path):
    benchmark, items, _ = made("hr_bench_4k", tmp_path)
    # One cycle of the second question is missing: then cycles do not weigh as items do.
    items = items[:-1]
    right = [True, False, True, True, False, False, True]
    found = values(benchmark, items, scores_of(benchmark, items, rights(items, right)))
    cycles = {}
    for item, r in zip(items, right, strict=True):
        cycles.setdefault(item.groups["cycle"], []).append(r)
    wanted = statistics.mean(statistics.mean(map(float, c)) for c in cycles.values())
    assert found["accuracy"] == pytest.approx(wanted)
    assert found["accuracy"] != pytest.approx(np.mean(right))
    assert found["accuracy/category=single"] == pytest.approx(3 / 4)
    assert found["accuracy/category=cross"] == pytest.approx(1 / 3)


def test_visual_probe_asks_the_judge_only_where_words_differ(tmp_path):
    benchmark, items, _ = made("visual_probe", tmp_path)

    class Judge:
        identity, asked = "", []

        def same(self, question, reference, answer):
            self.asked.append((reference, answer))
            return answer == "the street called Medium"

    texts = ["**easy street.**", "the street called Medium", ""]
    judge = Judge()
    found = values(benchmark, items, scores_of(benchmark, items, texts[:1] * 3, judge))
    assert {a for _, a in judge.asked} == {"**easy street.**"} and len(judge.asked) == 2
    order = [i.groups["difficulty"][0] for i in items]
    by_level = dict(zip(("easy", "medium", "hard"), texts, strict=True))
    texts = [by_level[level] for level in order]
    found = values(benchmark, items, scores_of(benchmark, items, texts, judge))
    assert found["accuracy"] == pytest.approx(2 / 3)
    alone = values(benchmark, items, scores_of(benchmark, items, texts))
    assert alone["accuracy"] == pytest.approx(1 / 3)


def test_d20_a_judge_that_fails_leaves_the_item_out(tmp_path):
    benchmark, items, _ = made("visual_probe", tmp_path)

    class Broken:
        identity = ""

        def same(self, question, reference, answer):
            raise JudgeError("connection refused")

    texts = [items[0].sample.answer.value, "other", "other"]
    answers = {
        i.sample.id: Answered(i.sample.id, "tools", text=t)
        for i, t in zip(items, texts, strict=True)
    }
    scores, left_out = score_answers(benchmark, items, answers, Broken())
    assert list(scores) == [items[0].sample.id] and left_out == {"judge_failed": 2}


def test_treebench_takes_the_best_box_of_each_target(tmp_path):
    benchmark, items, _ = made("treebench", tmp_path)
    targets = items[0].facts["boxes"]
    boxes = (targets[0], (22, 10, 36, 19), (0, 0, 1, 1))
    terms = benchmark.score(items[0], Response("B", boxes))
    half = (9 * 14) / (18 * 14)
    assert terms == pytest.approx({"score": 1.0, "iou": (1 + half) / 2})
    assert benchmark.score(items[0], Response("B"))["iou"] == 0


def test_cv_bench_is_the_mean_of_its_halves(tmp_path):
    benchmark, items, _ = made("cv_bench", tmp_path)
    found = values(
        benchmark, items, scores_of(benchmark, items, rights(items, [True, False, True]))
    )
    assert found["accuracy"] == pytest.approx(0.5 * ((1 + 0) / 2 + 1))
    assert found["accuracy/type=2D"] == pytest.approx(0.5)


def test_mlvu_is_the_mean_over_tasks(tmp_path):
    benchmark, items, _ = made("mlvu", tmp_path)
    right = [item.groups["task"][0] == "count" for item in items]
    found = values(benchmark, items, scores_of(benchmark, items, rights(items, right)))
    assert found["accuracy"] == pytest.approx(0.5) and np.mean(right) == pytest.approx(1 / 3)


def test_lvbench_counts_a_question_under_each_of_its_abilities(tmp_path):
    benchmark, items, _ = made("lvbench", tmp_path)
    found = values(benchmark, items, scores_of(benchmark, items, ["D", "D"]))
    assert found["accuracy"] == 0.5
    assert found["accuracy/ability=reasoning"] == 0.5
    assert found["accuracy/ability=key information retrieval"] == 0.5


def seconds(spans):
    """The milliseconds that windows cover, one by one."""
    return {ms for start, end in spans for ms in range(round(start * 1000), round(end * 1000))}


windows = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 9)).map(lambda w: (w[0] / 10, (w[0] + w[1]) / 10)),
    min_size=1,
    max_size=4,
)


@given(windows, windows)
def test_interval_iou_equals_counting_milliseconds(ours, theirs):
    a, b = seconds(ours), seconds(theirs)
    assert intervals_iou(ours, theirs) == pytest.approx(len(a & b) / len(a | b))


@given(windows, windows)
def test_best_iou_and_iop_equal_counting_milliseconds(ours, theirs):
    span = ours[0]
    a = seconds([span])
    each = [seconds([w]) for w in theirs]
    iou, iop = best_iou_and_iop(span, theirs)
    assert iou == pytest.approx(max(len(a & w) / (max(a | w) - min(a | w) + 1) for w in each))
    assert iop == pytest.approx(max(len(a & w) / len(a) for w in each))


def test_a_span_without_length_and_no_span():
    assert best_iou_and_iop((2.0, 2.0), [(1.0, 3.0)]) == (0.0, 1.0)
    assert best_iou_and_iop((4.0, 4.0), [(1.0, 3.0)]) == (0.0, 0.0)
    assert best_iou_and_iop(None, [(1.0, 3.0)]) == (0.0, 0.0)
    assert intervals_iou([], [(0.0, 1.0)]) == 0.0


def test_frames_stand_for_the_time_up_to_their_neighbours():
    assert spans_of_frames([0], [0.5, 1.5, 2.5]) == [(0.0, 1.0)]
    assert spans_of_frames([1, 2], [0.5, 1.5, 2.5]) == [(1.0, 3.0)]
    assert spans_of_frames([0], [0.0]) == [(0.0, 1.0)]


def test_cg_bench_averages_over_thresholds(tmp_path):
    benchmark, items, _ = made("cg_bench", tmp_path)
    (item,) = items
    iou = 0.35 / 1.0
    response = Response("D", spans=((0.65, 1.0),))
    terms = benchmark.score(item, response)
    assert terms["iou"] == pytest.approx(iou)
    found = values(benchmark, items, {item.sample.id: terms})
    assert found["rec@iou"] == pytest.approx(statistics.mean([1, 1, 1, 0, 0]))
    assert found["acc@iou"] == found["rec@iou"] and found["mean_iou"] == pytest.approx(iou)
    wrong = values(
        benchmark, items, {item.sample.id: benchmark.score(item, Response("A", (), ((0.0, 1.0),)))}
    )
    assert (wrong["rec@iou"], wrong["acc@iou"], wrong["accuracy"]) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("text", "spans", "wanted"),
    [
        ("C", ((0.2, 0.8),), 1.0),
        ("C", ((0.2, 1.2),), 1.0),
        ("C", ((0.0, 1.9),), 0.0),
        ("C", ((0.2, 0.3), (1.9, 2.0)), 0.0),
        ("C", (), 0.0),
        ("A", ((0.2, 0.8),), 0.0),
    ],
)
def test_nextgqa_needs_half_of_the_span_inside_a_window(tmp_path, text, spans, wanted):
    benchmark, items, _ = made("nextgqa", tmp_path)
    terms = benchmark.score(items[0], Response(text, spans=spans))
    assert terms["acc@gqa"] == wanted
    assert set(terms) == set(benchmark.terms)


def slow_mra(given, truth):
    hits = 0
    for threshold in np.linspace(0.5, 0.95, 10):
        if abs(given - truth) / truth <= 1 - threshold:
            hits += 1
    return hits / 10


@given(st.floats(-50, 50), st.floats(0.1, 50))
def test_mean_relative_accuracy_equals_its_definition(given, truth):
    assert mean_relative_accuracy(given, truth) == pytest.approx(slow_mra(given, truth))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4", 4),
        ("4.", 4),
        ("**4**", 4),
        ("4 tables", 4),
        ("about 3.5 m", 3.5),
        ("There are 12 of them.", 12),
        ("-2", -2),
        ("1,250", 1250),
        ("$\\boxed{7}$", 7),
        ("", None),
        ("many", None),
        ("3 or 4", None),
        ("between 2 and 3", None),
        ("v2x", None),
        ("9" * 50_000, None),
        ("about \u22125 m", -5),
        ("about \u0663.\u0665 m", 3.5),
        ("1e999", None),
        ("-1e999", None),
    ],
)
def test_d06_d13_one_number_is_read_or_none(text, number):
    assert stated_number(text) == number


def test_vsi_bench_merges_directions_and_averages_tasks(tmp_path):
    benchmark, items, _ = made("vsi_bench", tmp_path)
    found = values(benchmark, items, scores_of(benchmark, items, ["3", "B", "B"]))
    counting, direction = slow_mra(3, 4), (1 + 0) / 2
    assert found["accuracy"] == pytest.approx((counting + direction) / 2)
    assert found["accuracy/task=object_rel_direction"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("answers", "average", "worst"),
    [
        (["2.5", "2π", "Sine", "C"], 1.0, 1.0),
        (["2.5009", "6.283", "sine", "(C)"], 1.0, 1.0),
        (["2.502", "6.283", "sine", "C"], 3 / 4, 2 / 3),
        (["", "", "", ""], 0.0, 0.0),
        (["2.5", "6.3", "s", "A cat, so C"], 1 / 4, 0.0),
    ],
)
def test_d13_dynamath_average_and_worst_case(tmp_path, answers, average, worst):
    benchmark, items, _ = made("dynamath", tmp_path)
    found = values(benchmark, items, scores_of(benchmark, items, answers))
    assert found["accuracy"] == pytest.approx(average)
    assert found["worst_case"] == pytest.approx(worst)


def test_mathverse_takes_equal_mathematics_and_letters(tmp_path):
    benchmark, items, _ = made("mathverse", tmp_path)
    for texts, wanted in [
        (["14.0", "60°"], [1.0, 1.0]),
        (["$14$", "B: 60°"], [1.0, 1.0]),
        (["14 or 15", "A or B"], [0.0, 0.0]),
        (["", ""], [0.0, 0.0]),
    ]:
        scores = scores_of(benchmark, items, texts)
        assert [scores[i.sample.id]["score"] for i in items] == wanted, texts


def four_dimensions(problems):
    """The shares by counting: problems are (steps right, whole right)."""
    total = len(problems)
    ik = sum(1 for steps, whole in problems if not whole and not all(steps))
    ig = sum(1 for steps, whole in problems if not whole and all(steps))
    found = {"insufficient_knowledge": ik / total, "inadequate_generalisation": ig / total}
    for name, is_enough in (("strict", all), ("loose", any)):
        cm = sum(1 for steps, whole in problems if whole and is_enough(steps))
        rm = sum(1 for steps, whole in problems if whole and not is_enough(steps))
        found[f"complete_mastery_{name}"] = cm / total
        found[f"rote_memorisation_{name}"] = rm / (cm + rm) if cm + rm else math.nan
        found[f"score_{name}"] = (total - 0.5 * ig - rm - ik) / total
    return found


@given(st.lists(st.booleans(), min_size=7, max_size=7))
def test_wemath_four_dimensions_equal_counting(tmp_path_factory, right):
    if not WEMATH:
        WEMATH.extend(made("wemath", tmp_path_factory.mktemp("wemath")))
    benchmark, items, _ = WEMATH
    found = values(benchmark, items, scores_of(benchmark, items, rights(items, right)))
    problems = [(right[0:2], right[2]), (right[3:6], right[6])]
    assert {k: found[k] for k in four_dimensions(problems)} == pytest.approx(
        four_dimensions(problems), nan_ok=True
    )
    assert found["accuracy/level=S2"] == right[2]
    assert found["accuracy/level=S1"] == pytest.approx(np.mean([*right[0:2], *right[3:6]]))


WEMATH: list = []


@pytest.mark.parametrize(
    ("task", "text", "wanted"),
    [
        ("jigsaw", "1, 2, 3, 4", 1.0),
        ("jigsaw", "The order is 1 2 4 3.", 0.5),
        ("jigsaw", "1, 2, 3", 0.0),
        ("spot_difference", "2, 3, 7", 2 / 4),
        ("spot_difference", "[2, 3, 6]", 1.0),
        ("word_search", "row 3, column 6: (3, 6)", 1.0),
        ("word_search", "(6, 3)", 0.0),
        ("ocr", "The sign says open.", 1.0),
        ("ocr", "", 0.0),
        ("color", "**C**", 1.0),
        ("color", "c", 1.0),
        ("color", "a cat", 0.0),
        ("color", "A or C", 0.0),
        ("instrument", "2.5", 1.0),
        ("instrument", "5/2", 1.0),
        ("instrument", "2.51", 0.0),
        ("maze", "12 steps", 1.0),
        ("maze", "11 or 12", 0.0),
        ("refcoco", "C, A", 1.0),
        ("refcoco", "A", 0.0),
    ],
)
def test_tir_bench_scores_each_task_by_its_rule(tmp_path, task, text, wanted):
    benchmark, items, _ = made("tir_bench", tmp_path)
    item = next(i for i in items if i.groups["task"] == (task,))
    assert benchmark.score(item, Response(text)) == pytest.approx({"score": wanted})


def test_reason_rft_counting_and_structure(tmp_path):
    benchmark, items, _ = made("reason_rft_counting", tmp_path / "c")
    scores = scores_of(benchmark, items, ["5.0", "zero"])
    assert sorted(s["score"] for s in scores.values()) == [0.0, 1.0]
    benchmark, items, _ = made("reason_rft_structure", tmp_path / "s")
    found = values(benchmark, items, scores_of(benchmark, items, ["(B)", "5/2"]))
    assert found["accuracy"] == found["accuracy/type=choice"] == 1.0


def best_pairing(ours, theirs):
    """The rounds of the rule by trying every pair in each of them."""
    ours, theirs, total = list(ours), list(theirs), 0.0
    longer = max(len(ours), len(theirs))
    for worth, same in (
        (1.0, lambda a, b: a == b),
        (0.5, lambda a, b: a[:2] == b[:2]),
        (0.5, lambda a, b: (a[0], a[2]) == (b[0], b[2])),
        (0.25, lambda a, b: a[0] == b[0]),
    ):
        while True:
            pairs = [(a, b) for a in ours for b in theirs if same(a, b)]
            if not pairs:
                break
            ours.remove(pairs[0][0])
            theirs.remove(pairs[0][1])
            total += worth
    return total / longer


calls = st.lists(
    st.tuples(st.sampled_from("fg"), st.sampled_from("12"), st.sampled_from("xy")),
    min_size=1,
    max_size=4,
    unique=True,
)


@given(calls, calls)
def test_sequences_of_transformations_are_matched_round_by_round(ours, theirs):
    def written(calls):
        return ", ".join(f"{f}({o}, {v})" for f, o, v in calls)

    assert sequence_score(written(ours), written(theirs)) == pytest.approx(
        best_pairing(ours, theirs)
    )


def test_d13_no_sequence_scores_nothing():
    truth = "change_color(1, red)"
    for text in ("", "change everything", "change_color(1 red)"):
        assert sequence_score(text, truth) == 0.0
    assert sequence_score("change_color(1, 'red'), change_color(1, red)", truth) == 1.0


@pytest.mark.parametrize("text", ["", "Don't know", "None of the above", "(A)(B)(C)(D)"])
def test_d12_d13_no_benchmark_rewards_saying_nothing(tmp_path, text):
    for name in ("vstar", "hr_bench_4k", "video_mme", "cg_bench", "wemath", "vsi_bench"):
        benchmark, items, _ = made(name, tmp_path / name)
        assert (
            sum(t["score"] for t in scores_of(benchmark, items, [text] * len(items)).values()) == 0
        )


@pytest.mark.parametrize("name", ["tir_bench", "vsi_bench", "dynamath", "reason_rft_spatial"])
def test_d09_an_answer_without_sense_is_wrong_and_breaks_no_rule(tmp_path, name):
    benchmark, items, _ = made(name, tmp_path)
    for text in (f"{'1' * 5_000}, 2", "1, " * 5_000, "1e999", "-1e999", "\u00b2", "\ud800"):
        scores = scores_of(benchmark, items, [text] * len(items))
        assert all(0 <= row["score"] < 1 for row in scores.values())
