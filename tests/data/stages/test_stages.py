from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clips import make_clip
from data.stages.scripted import Blank, Scripted, record
from reframe_vl.data.fingerprint import as_words, distances, fingerprint
from reframe_vl.data.media import MediaError
from reframe_vl.data.record_parts import AuditEntry
from reframe_vl.data.records import Record, write_records
from reframe_vl.data.stages import pool as pool_module
from reframe_vl.data.stages.audit import AuditSettings, audit
from reframe_vl.data.stages.base import open_file
from reframe_vl.data.stages.diagnose import DiagnoseSettings, diagnose, settle_readings
from reframe_vl.data.stages.finalise import FinaliseSettings, finalise
from reframe_vl.data.stages.held_out import HeldOut, held_out_of, read_held_out
from reframe_vl.data.stages.looks import LookSettings
from reframe_vl.data.stages.pool import PoolSettings, asked, pool, settle_doubles
from reframe_vl.data.stages.shortcut import ShortcutSettings, shortcut
from reframe_vl.data.stages.variants import box_readings, segment_readings
from reframe_vl.data.verifiers.asker import Asker
from reframe_vl.data.verifiers.base import Query
from reframe_vl.data.video import GridRule, VideoFile
from reframe_vl.tools.coordinates import CoordinateFrame

LOOKS = LookSettings()
MCQ = {"answer": {"kind": "mcq", "value": "B"}, "options": ["cat", "dog", "cow"]}
VIDEO = {
    "modality": "video",
    "media": {
        "path": "v.mp4",
        "width": 100,
        "height": 80,
        "duration_s": 10,
        "fps": 25,
        "n_frames": 250,
        "grid": {"fps": 1, "max_frames": 64},
        "timestamps_s": list(range(10)),
    },
    "boxes": [],
    "segments": [[2, 4]],
}


def codes(outcomes) -> list[tuple[str | None, str]]:
    return [(outcome.verdict, outcome.reason) for outcome in outcomes]


def blank(_: Record) -> Blank:
    return Blank()


# --------------------------------------------------------------------------- pool


def pooled(*records: Record, prints: dict[str, str] | None = None, monkeypatch, **settings):
    known = prints or {}
    monkeypatch.setattr(pool_module, "fingerprint", lambda media: (known.get(media.key, "0"),))
    held_out = settings.pop("held_out", HeldOut())
    chosen = PoolSettings(**settings)
    outcomes = pool(records, lambda r: Blank(r.media.path), held_out, chosen)
    settled = settle_doubles(outcomes, chosen)
    return codes([settled.get(n, outcome) for n, outcome in enumerate(outcomes)])


def test_the_same_question_of_the_same_media_stays_once(monkeypatch) -> None:
    loud = record(1, media={"path": "0.png"}, question="what is NUMBER 0 ??", answer=ANSWER_0)
    other = record(2, media={"path": "0.png"})
    turned = record(3, media={"path": "0.png"}, **MCQ | {"options": ["dog", "cat"]})
    assert pooled(record(0), loud, other, turned, monkeypatch=monkeypatch) == [
        ("kept", ""),
        ("dropped", "duplicate"),
        ("kept", ""),
        ("kept", ""),
    ]


ANSWER_0 = {"kind": "number", "value": "0"}


@pytest.mark.parametrize("has_media", [True, False])
def test_equal_names_of_two_sources_are_one_medium_only_where_they_are_one_file(
    monkeypatch, has_media
) -> None:
    monkeypatch.setattr(pool_module, "fingerprint", lambda media: ("0",))
    open_media = (lambda r: Blank(r.media.path)) if has_media else None
    same = {"media": {"path": "0.png"}, "question": record(0).question}
    records = [
        record(0),
        record(1, source="t", answer={"kind": "number", "value": "5"}, **same),
        record(2, **same, answer=ANSWER_0),
    ]
    outcomes = pool(records, open_media, HeldOut(), PoolSettings())
    settled = settle_doubles(outcomes, PoolSettings())
    found = codes([settled.get(n, outcome) for n, outcome in enumerate(outcomes)])
    apart = [("kept", ""), ("kept", ""), ("dropped", "duplicate")]
    assert found == ([("dropped", "answers_disagree")] * 3 if has_media else apart)


def test_of_contradictions_none_stays(monkeypatch) -> None:
    other = record(1, media={"path": "0.png"}, question="What is number 0?")
    found = pooled(record(0), other, monkeypatch=monkeypatch)
    assert found == [("dropped", "answers_disagree")] * 2


def test_media_that_look_the_same_are_doubles_only_with_the_same_answer(monkeypatch) -> None:
    same = [record(n, question="How many?", answer=ANSWER_0) for n in range(3)]
    wrong = record(3, question="How many?")
    prints = {"0.png": "0", "1.png": "7", "2.png": "ff", "3.png": "1"}
    found = pooled(*same, wrong, prints=prints, monkeypatch=monkeypatch)
    assert [verdict for verdict, _ in found] == ["kept", "dropped", "kept", "kept"]
    found = pooled(*same, prints=prints, monkeypatch=monkeypatch, max_distance=None)
    assert [verdict for verdict, _ in found] == ["kept"] * 3


NYC = {"kind": "open", "value": "NYC", "aliases": ["New York"]}


@pytest.mark.parametrize(
    ("first", "second", "count"),
    [
        ({"kind": "number", "value": "2"}, {"kind": "number", "value": "2.0"}, 1),
        ({"kind": "open", "value": "New York"}, NYC, 1),
        (NYC, {"kind": "open", "value": "New York"}, 1),
        ({"kind": "number", "value": "2"}, {"kind": "number", "value": "3"}, 2),
    ],
)
def test_answers_that_mean_the_same_do_not_disagree(monkeypatch, first, second, count) -> None:
    same = {"media": {"path": "0.png"}, "question": "What?"}
    records = [record(n, answer=answer, **same) for n, answer in enumerate((first, second))]
    found = pooled(*records, monkeypatch=monkeypatch)
    reasons = ["", "duplicate"] if count == 1 else ["answers_disagree"] * 2
    assert [reason for _, reason in found] == reasons


def test_a_video_looks_the_same_whatever_the_grid_of_its_record(tmp_path: Path) -> None:
    clip = make_clip(tmp_path / "a.mp4", n=20)
    prints = {fingerprint(VideoFile(clip, rule)) for rule in (GridRule(1, 3), GridRule(5, 64))}
    assert {len(found) for found in prints} == {8} and len(prints) == 1


def picture(path: Path, seed: int) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 10, 3), np.uint8)
    Image.fromarray(pixels).resize((100, 80)).save(path)
    return str(path)


@pytest.mark.parametrize("is_there", [True, False])
def test_media_of_evaluations_are_known_by_name_only_where_their_file_is_missing(
    tmp_path: Path, caplog, is_there
) -> None:
    held = record(9, media={"path": picture(tmp_path / "eval" / "A" / "0001.png", 0)})
    write_records(tmp_path / "eval.jsonl", [held])
    if not is_there:
        Path(held.media.path).unlink()
    held_out = read_held_out([tmp_path / "eval.jsonl"])
    assert ("1 of 1 media are not there" in caplog.text) is not is_there
    records = [
        record(n, media={"path": picture(tmp_path / "train" / name, n + 1)})
        for n, name in enumerate(("A/0001.png", "B/0001.png", "A/0002.png"))
    ]
    found = codes(pool(records, open_file, held_out, PoolSettings()))
    first = ("kept", "") if is_there else ("dropped", "evaluation_id")
    assert found == [first, ("kept", ""), ("kept", "")]
    unread = codes(pool(records, None, held_out, PoolSettings()))
    assert unread == [("dropped", "evaluation_id")] * 2 + [("kept", "")]


def test_a_missing_video_of_an_evaluation_is_counted_as_an_image_is(caplog) -> None:
    held_out = held_out_of([record(**VIDEO)], open_file)
    assert held_out.missing == {"s/v"} and "1 of 1 media are not there" in caplog.text


def test_files_are_hashed_of_all_sources_but_those_without_media(monkeypatch) -> None:
    monkeypatch.setattr(pool_module, "fingerprint", lambda media: ("0",))
    records = [record(0), record(1, id="t/1", source="t")]
    unread = frozenset({"t"})
    found = pool(
        records, lambda r: Blank(f"file {r.media.path}"), HeldOut(), PoolSettings(), unread
    )
    assert [outcome.facts["key"] for outcome in found] == ["file 0.png", "t/1.png"]


@pytest.mark.parametrize(
    ("held_out", "reason"),
    [
        (HeldOut(keys=frozenset({"0.png"})), "evaluation_media"),
        (HeldOut(ids=frozenset({"s/0"})), "evaluation_id"),
        (HeldOut(ids=frozenset({"another/0"})), ""),
        (HeldOut(prints=(("3",),)), "evaluation_media"),
        (HeldOut(prints=(("ffff",),)), ""),
        (HeldOut(prints=(("0", "0"),)), ""),
    ],
)
def test_media_of_evaluations_are_kept_out_by_hash_and_id(monkeypatch, held_out, reason) -> None:
    verdict = "dropped" if reason else "kept"
    assert pooled(record(0), held_out=held_out, monkeypatch=monkeypatch) == [(verdict, reason)]


def test_what_cannot_be_read_is_dropped_with_its_message() -> None:
    def broken(_: Record) -> Blank:
        raise MediaError("a.png: it is broken")

    unreadable = record(1, answer={"kind": "number", "value": "many"})
    (outcome,) = pool([record()], broken, HeldOut(), PoolSettings())
    assert (outcome.reason, outcome.record.audit[-1].note) == (
        "media_unreadable",
        "a.png: it is broken",
    )
    assert codes(pool([unreadable], None, HeldOut(), PoolSettings())) == [
        ("dropped", "answer_unreadable")
    ]


def test_signs_that_change_a_number_stay_in_a_normalised_question() -> None:
    first, second = (record(0, question=f"Is it {n} %?") for n in ("1.5", "15"))
    assert asked(first) != asked(second)
    assert asked(record(0, question="Is it  1.5 %")) == asked(first)


def test_distances_count_bits_and_average_over_frames() -> None:
    others = np.stack([as_words(("ffffffffffffffff", "0")), as_words(("0", "3"))])
    assert distances(as_words(("0", "0")), others).tolist() == [32.0, 1.0]


# --------------------------------------------------------------------------- shortcut


def test_multiple_choice_has_to_be_answered_in_every_order_of_its_options() -> None:
    choose = {"first": lambda q: "A", "knows": lambda q: chr(65 + q.options.index("dog"))}
    for name, verdict in (("first", "kept"), ("knows", "dropped")):
        verifier = Scripted(choose[name])
        (outcome,) = shortcut([record(**MCQ)], [Asker(verifier)], ShortcutSettings())
        assert outcome.verdict == verdict
        assert {q.options[0] for q in verifier.asked} == {"cat", "dog", "cow"}
        assert all(not q.pictures for q in verifier.asked)


def test_one_verifier_that_knows_the_answer_is_enough_and_a_failure_is_no_verdict() -> None:
    knows, down = Asker(Scripted(lambda q: "0", "a")), Asker(Scripted(lambda q: None, "b"))
    (outcome,) = shortcut([record(0)], [down, knows], ShortcutSettings())
    assert outcome.verdict == "dropped" and outcome.record.audit[-1].verifier == "a"
    unsure = Asker(Scripted(lambda q: "unknown"))
    (outcome,) = shortcut([record(0)], [unsure, down], ShortcutSettings())
    assert outcome.verdict is None and outcome.record == record(0)


def test_free_text_that_means_the_same_is_right() -> None:
    def say(query: Query) -> str:
        if "Given answer: <a red car>" in query.text:
            return "<answer>yes</answer>"
        return "<answer><a red car></answer>"

    answers = record(answer={"kind": "open", "value": "an automobile, red"})
    (outcome,) = shortcut([answers], [Asker(Scripted(say))], ShortcutSettings())
    assert outcome.reason == "text_answerable"


# --------------------------------------------------------------------------- audit


def sees(*, full: bool, evidence: bool, glance: bool):
    """Whether a verifier knows the answer from each kind of look."""

    def say(query: Query) -> str:
        (picture,) = query.pictures
        if picture.box is not None:
            known = evidence
        else:
            known = full if picture.max_pixels == LOOKS.image_pixels else glance
        return "0" if known else "unknown"

    return say


@pytest.mark.parametrize(
    ("full", "evidence", "glance", "verdict", "reason"),
    [
        (True, True, False, "kept", ""),
        (False, True, False, "kept", ""),
        (True, False, False, "dropped", "evidence_unsupported"),
        (False, False, False, "dropped", "answer_unsupported"),
        (True, True, True, "dropped", "too_easy"),
    ],
)
def test_audit_goes_by_what_shows_the_answer(full, evidence, glance, verdict, reason) -> None:
    verifier = Scripted(sees(full=full, evidence=evidence, glance=glance))
    (outcome,) = audit([record(0)], [Asker(verifier)], blank, LOOKS, AuditSettings())
    assert (outcome.verdict, outcome.reason) == (verdict, reason)
    shown = [query.pictures[0].box for query in verifier.asked]
    assert (5, 15, 35, 45) in shown  # The evidence as it will be in the end.


def test_that_one_of_several_verifiers_sees_it_at_a_glance_is_not_too_easy() -> None:
    both = [
        Asker(Scripted(sees(full=True, evidence=True, glance=g), str(g))) for g in (True, False)
    ]
    (outcome,) = audit([record(0)], both, blank, LOOKS, AuditSettings())
    assert (outcome.verdict, outcome.reason) == ("kept", "")


def test_verifiers_that_do_not_agree_are_noted_and_one_that_failed_leaves_it_open() -> None:
    one = Asker(Scripted(sees(full=True, evidence=True, glance=False), "one"))
    two = Asker(Scripted(sees(full=True, evidence=False, glance=False), "two"))
    (outcome,) = audit([record(0)], [one, two], blank, LOOKS, AuditSettings())
    assert (outcome.verdict, outcome.reason) == ("kept", "verifiers_disagree")
    assert outcome.record.audit[-1].verifier == "one, two"
    down = Asker(Scripted(lambda q: None))
    (outcome,) = audit([record(0)], [one, down], blank, LOOKS, AuditSettings())
    assert outcome.verdict is None


@pytest.mark.parametrize("shown", [True, False])
def test_a_question_for_the_place_is_audited_by_what_is_in_it(shown) -> None:
    def say(query: Query) -> str:
        if query.pictures[0].box is None:
            return "0"
        assert "fit this description" in query.text and query.text.endswith("the old man")
        return "yes" if shown else "no"

    where = record(0, question="In which part of the image is the middle of this: the old man")
    verifier = Asker(Scripted(lambda q: "1" if q.pictures[0].max_pixels < 5000 else say(q)))
    (outcome,) = audit([where], [verifier], blank, LOOKS, AuditSettings())
    assert outcome.reason == ("" if shown else "evidence_unsupported")


# --------------------------------------------------------------------------- diagnose


def doubted(reason: str, verdict: str, number: int = 0, **changes) -> Record:
    entry = AuditEntry(stage="audit", note="", verdict=verdict, reason=reason)
    return record(number, audit=[entry], **changes)


def knows_at(*boxes) -> Asker:
    def say(query: Query) -> str:
        return query.question.rstrip("?").split()[-1] if query.pictures[0].box in boxes else "?"

    return Asker(Scripted(say))


def diagnosed(records, asker: Asker, **settings):
    chosen = DiagnoseSettings(**settings)
    outcomes = diagnose(records, [asker], blank, LOOKS, chosen)
    settled = settle_readings(outcomes, chosen)
    return [settled.get(n, outcome) for n, outcome in enumerate(outcomes)]


def test_boxes_of_a_resized_frame_are_converted_if_that_helps_the_source() -> None:
    records = [doubted("evidence_unsupported", "dropped", n) for n in range(4)]
    outcomes = diagnosed(records, knows_at((20, 40, 60, 80)))
    assert codes(outcomes) == [("changed", "boxes_converted")] * 4
    assert outcomes[0].record.boxes[0].xyxy == (20, 40, 60, 80)
    assert "resized by 0.5" in outcomes[0].record.audit[-1].note
    assert "[10.0, 20.0, 30.0, 40.0]" in outcomes[0].record.audit[-1].note


def test_a_conversion_that_helps_one_record_alone_is_taken_back() -> None:
    lone = [doubted("evidence_unsupported", "dropped")]
    (outcome,) = diagnosed(lone, knows_at((20, 40, 60, 80)))
    assert (outcome.verdict, outcome.reason) == ("dropped", "recheck_failed")
    assert outcome.record.boxes == lone[0].boxes and len(outcome.record.audit) == 2


def test_of_several_readings_the_smallest_counts_and_without_one_it_stays_dropped() -> None:
    records = [doubted("evidence_unsupported", "dropped", n) for n in range(3)]
    both = diagnosed(records, knows_at((20, 40, 60, 80), (20, 10, 40, 30)))
    assert {o.record.boxes[0].xyxy for o in both} == {(20, 10, 40, 30)}
    none = diagnosed(records, knows_at())
    assert codes(none) == [("dropped", "recheck_failed")] * 3
    down = Asker(Scripted(lambda q: None))
    assert codes(diagnosed(records, down))[0][0] is None


def test_questions_without_one_right_answer_are_found_by_rules() -> None:
    twice = record(options=["dog", "cat", "Dog."], answer={"kind": "mcq", "value": "A"})
    nowhere = record(options=["dog", "cat"], answer={"kind": "open", "value": "cow"})
    outcomes = diagnosed([twice, nowhere, record(**MCQ)], knows_at())
    assert codes(outcomes) == [
        ("dropped", "ambiguous_options"),
        ("dropped", "answer_not_among_options"),
        ("kept", ""),
    ]


@pytest.mark.parametrize(("says", "verdict"), [("dog", "kept"), ("cat", "dropped")])
def test_what_verifiers_did_not_agree_on_is_asked_in_other_forms(says, verdict) -> None:
    verifier = Scripted(lambda q: chr(65 + q.options.index(says)))
    doubtful = doubted("verifiers_disagree", "kept", **MCQ)
    (outcome,) = diagnosed([doubtful], Asker(verifier))
    assert outcome.verdict == verdict
    assert {q.pictures[0].box for q in verifier.asked} == {(5, 15, 35, 45), (0, 7.5, 42.5, 52.5)}
    assert len({q.options for q in verifier.asked}) == 3


def test_readings_fit_the_media_and_are_distinct() -> None:
    readings = box_readings(record(), (0.5, 2.0, 1.0), (1000, 50))
    assert readings["resized by 0.5"] == ((20, 40, 60, 80),)
    assert "resized by 1" not in readings  # As annotated.
    assert "longer side 50" not in readings  # As resized by 0.5.
    assert readings["50x50"] == ((20, 32, 60, 64),)
    assert "longer side 1000" in readings and readings["y before x"] == ((20, 10, 40, 30),)
    outside = record(boxes=[{"xyxy": [60, 20, 90, 40]}])
    assert "resized by 0.5" not in box_readings(outside, (0.5,), ())


def test_readings_of_segments_are_plausible() -> None:
    video = record(**VIDEO | {"segments": [[50, 100]]})
    assert segment_readings(video) == {"frames": ((2.0, 4.0),)}
    assert segment_readings(record(**VIDEO)) == {}


# --------------------------------------------------------------------------- finalise


def test_evidence_is_expanded_once_and_its_calls_return_it() -> None:
    image, video = record(), record(1, **VIDEO)
    done = finalise([image, video], FinaliseSettings())
    assert codes(done) == [("kept", "")] * 2
    assert done[0].record.evidence.boxes == ((5, 15, 35, 45),)
    assert done[0].record.tool_calls[0].arguments == {"bbox_2d": [50, 188, 350, 563]}
    assert done[1].record.evidence.segments == ((1, 2, 3, 4),)
    assert done[1].record.tool_calls[0].arguments == {"frames": [1, 2, 3, 4]}
    assert (done[0].record.applicability, done[1].record.applicability) == ("beneficial", "neutral")
    for outcome in done:
        with pytest.raises(ValueError, match="expanded already"):
            finalise([outcome.record], FinaliseSettings())


def test_long_evidence_is_subsampled_once_and_coverage_is_of_the_whole() -> None:
    (outcome,) = finalise(
        [record(**VIDEO | {"segments": [[0, 9]]})], FinaliseSettings(max_frames=4)
    )
    assert outcome.record.evidence.segments == ((0, 3, 6, 9),)
    assert outcome.record.coverage == 1.0
    assert outcome.record.tool_calls[0].arguments == {"frames": [0, 3, 6, 9]}


def test_evidence_whose_call_is_inexact_after_rounding_is_dropped() -> None:
    media = {"path": "a.png", "width": 4000, "height": 4000}
    small = record(media=media, boxes=[{"xyxy": [1001, 1001, 1017, 1017]}])
    (outcome,) = finalise([small], FinaliseSettings())
    assert (outcome.verdict, outcome.reason) == ("dropped", "call_inexact")
    (outcome,) = finalise([small], FinaliseSettings(frame=CoordinateFrame.UNIT))
    assert outcome.verdict == "kept"


def test_records_without_evidence_or_without_a_size_stay_so() -> None:
    bare = record(boxes=[])
    unknown = record(media={"path": "a.png"})
    done = finalise([bare, unknown], FinaliseSettings())
    assert codes(done) == [("kept", "no_evidence")] * 2
    assert all(o.record.evidence is None and not o.record.tool_calls for o in done)


def test_settings_are_used() -> None:
    strict = partial(finalise, [record()])
    assert codes(strict(FinaliseSettings(min_iou=1.0))) == [("dropped", "call_inexact")]
