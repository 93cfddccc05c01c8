import pytest

from clips import frame_numbers, make_clip
from reframe_vl.data.evidence import EVIDENCE_VERSION
from reframe_vl.data.media import MediaError
from reframe_vl.data.records import AnswerInfo, read_records, write_records
from reframe_vl.data.video import GridRule
from reframe_vl.data.video_records import expand_segment_evidence, video_record
from reframe_vl.tools.base import Scene
from reframe_vl.tools.coordinates import CoordinateFrame
from reframe_vl.tools.select_frames import SelectFrames
from reframe_vl.types import Applicability

FIELDS = {"id": "s/1", "source": "s", "split": "train", "licence": "MIT", "raw": {"w": [1, 2]}}
FIELDS |= {"question": "What?", "answer": AnswerInfo(kind="span", value="that")}


def made(path, segments, rule=GridRule(fps=10, max_frames=40), **changes):  # noqa: B008
    return video_record(path, segments, rule, **FIELDS | changes)


@pytest.fixture
def path(tmp_path):
    return make_clip(tmp_path / "a.mp4", n=40)


def test_a_record_says_all_of_its_video_and_survives_the_file(tmp_path, path):
    record = made(path, [(1.0, 1.5)], GridRule(fps=2, max_frames=8))
    write_records(tmp_path / "r.jsonl", [record])
    (back,) = read_records(tmp_path / "r.jsonl")
    assert back.media.path == "a.mp4"
    assert back.media.size == (96, 64) and back.media.grid == GridRule(2, 8)
    assert (back.media.n_frames, back.media.duration_s, back.media.fps) == (40, 4.0, 10.0)
    assert back.evidence == record.evidence and back.evidence.version == EVIDENCE_VERSION
    sample = back.to_sample(tmp_path)
    assert sample.media.timestamps_s == record.media.timestamps_s
    assert frame_numbers(sample.media.look(range(8), 10**6)) == pytest.approx(
        [10 * time for time in sample.media.timestamps_s], abs=0.6
    )


def test_coverage_and_label_are_those_of_the_whole_segment(path):
    record = made(path, [(0.5, 3.5)], max_frames=4)
    assert record.evidence.segments == ((4, 14, 25, 35),)
    assert record.coverage == 32 / 40
    assert record.applicability is Applicability.NON_BENEFICIAL
    with pytest.raises(ValueError, match="expanded already"):
        expand_segment_evidence(record, max_frames=4)


@pytest.mark.parametrize("max_frames", [1, 3, 8])
def test_canonical_calls_execute_and_return_the_evidence(tmp_path, path, max_frames):
    record = made(path, [(0.5, 3.5), (3.8, 9.0)], max_frames=max_frames)
    sample = record.to_sample(tmp_path)
    scene = Scene.of(sample, CoordinateFrame.GRID_1000, (96, 64), max_frames=max_frames)
    calls = SelectFrames().canonical(sample.evidence, scene)
    requests = [SelectFrames().check(call, scene) for call in calls]
    assert tuple(request.frames for request in requests) == sample.evidence.segments
    result = SelectFrames().run(requests[0], sample.media, 10**6)
    assert frame_numbers(image.pixels for image in result.images) == pytest.approx(
        requests[0].frames, abs=0.6
    )


def test_a_record_without_windows_has_no_evidence(path):
    record = made(path, [])
    assert (record.evidence, record.coverage, record.applicability) == (None, None, None)


def test_windows_and_files_that_do_not_do_are_refused(tmp_path, path):
    with pytest.raises(ValueError, match="ends at 4 s"):
        made(path, [(4.0, 5.0)])
    with pytest.raises(ValueError, match="start_s < end_s"):
        made(path, [(2.0, 1.0)])
    with pytest.raises(ValueError, match="question"):
        made(path, [], question="")
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(MediaError, match=r"a\.mp4"):
        made(path, [])
