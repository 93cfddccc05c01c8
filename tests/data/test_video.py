import hashlib
from dataclasses import replace

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clips import copy_packets, frame_numbers, make_clip, red_corner, with_matrix
from reframe_vl.data.media import MediaError
from reframe_vl.data.video import GridRule, VideoFile, read_facts

ALL = GridRule(fps=1000, max_frames=1000)
BIG = 10**9


def looked_at(path, rule=ALL):
    """The numbers of all frames of a video's grid, read together and one by one in turn."""
    video = VideoFile(path, rule)
    count = len(video.timestamps_s)
    together = frame_numbers(video.look(range(count), BIG))
    one_by_one = [frame_numbers(video.look([i], BIG))[0] for i in range(0, count, 3)]
    np.testing.assert_allclose(one_by_one, together[::3], atol=0.6)
    return together


# --------------------------------------------------------------------------- the grid


@st.composite
def shown_times(draw):
    gaps = draw(st.lists(st.floats(0.001, 3), min_size=1, max_size=40))
    start = draw(st.sampled_from([0.0, 0.5]))
    times = (start + np.concatenate([[0], np.cumsum(gaps)])).tolist()
    return times[:-1], times[-1]


@given(shown_times(), st.floats(0.1, 60), st.integers(1, 50))
def test_the_grid_has_the_frame_shown_in_the_middle_of_each_equal_part(shown, fps, max_frames):
    times, end = shown
    duration = end - times[0]
    parts = min(max_frames, max(1, round(duration * fps)))
    want = set()
    for part in range(parts):
        middle = times[0] + duration * (part + 0.5) / parts
        want.add(max(i for i, time in enumerate(times) if time <= middle))
    assert GridRule(fps, max_frames).choose(times, end) == tuple(sorted(want))


@pytest.mark.parametrize(("fps", "max_frames"), [(0, 8), (-1, 8), (float("nan"), 8), (1, 0)])
def test_rules_that_choose_nothing_are_refused(fps, max_frames):
    with pytest.raises(ValueError, match=r"fps is|max_frames is"):
        GridRule(fps, max_frames)


@pytest.mark.parametrize("n", [1, 2, 31])
def test_e10_a_clip_shorter_than_the_grid_gives_each_of_its_frames_once(tmp_path, n):
    path = make_clip(tmp_path / "a.mp4", n=n)
    video = VideoFile(path, GridRule(fps=1000, max_frames=32))
    assert len(video.timestamps_s) == n
    assert frame_numbers(video.look(range(n), BIG)) == pytest.approx(range(n), abs=0.6)


@pytest.mark.parametrize("rule", [GridRule(1, 8), GridRule(30, 32)])
def test_e11_a_clip_of_a_fifth_of_a_second_works(tmp_path, rule):
    video = VideoFile(make_clip(tmp_path / "a.mp4", n=6, fps=30), rule)
    assert 1 <= len(video.timestamps_s) <= 6
    assert len(video.look(range(len(video.timestamps_s)), BIG)) == len(video.timestamps_s)


@pytest.mark.parametrize("fps", [1, 2, 4])
def test_e13_times_follow_the_real_sampling_at_every_rate(tmp_path, fps):
    video = VideoFile(make_clip(tmp_path / "a.mp4", n=40), GridRule(fps, 32))
    assert len(video.timestamps_s) == 4 * fps
    assert np.diff(video.timestamps_s) == pytest.approx([1 / fps] * (4 * fps - 1), abs=0.11)
    numbers = frame_numbers(video.look(range(4 * fps), BIG))
    assert np.array(numbers) / 10 == pytest.approx(np.array(video.timestamps_s), abs=0.06)


def test_e13_a_variable_frame_rate_is_honoured(tmp_path):
    times = [0, 0.1, 0.2, 0.3, 1, 2, 3, 3.1, 3.2, 5, 6, 6.05, 6.1, 9]
    path = make_clip(tmp_path / "a.mp4", n=len(times), times_s=times)
    assert VideoFile(path, ALL).timestamps_s == pytest.approx(times, abs=1e-4)
    assert looked_at(path) == pytest.approx(range(len(times)), abs=0.6)
    # Evenly spaced in time, not by number: what is shown at about 0.9, 2.7, 4.5, 6.3 and 8.1 s.
    even = VideoFile(path, GridRule(fps=0.5, max_frames=5))
    assert even.timestamps_s == pytest.approx([0.3, 2, 3.2, 6.1], abs=1e-4)


# --------------------------------------------------------------------------- the frames

FORMATS = {
    "plain.mp4": {},
    "one_key_frame.mp4": {"gop": 600},
    "pyramid.mp4": {"b_frames": 4, "options": {"x264-params": "open-gop=1:b-pyramid=normal"}},
    "open.mkv": {"options": {"x264-params": "open-gop=1:bframes=3:b-adapt=0:scenecut=0"}},
    "no_seek_to_the_start.ts": {},
    "vp9.webm": {"codec": "libvpx-vp9"},
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_frame_is_the_one_shown_at_its_time(tmp_path, name):
    path = make_clip(tmp_path / name, n=45, **FORMATS[name])
    with av.open(str(path)) as container:
        start = container.start_time / av.time_base
        shown = [float(frame.time) - start for frame in container.decode(video=0)]
    assert VideoFile(path, ALL).timestamps_s == pytest.approx(shown, abs=1e-4)
    assert looked_at(path) == pytest.approx(range(45), abs=0.6)


def test_frames_within_a_millisecond_are_each_their_own(tmp_path):
    def faster(number, packet):
        packet.pts = packet.dts = round(number * 0.0004 / packet.time_base)
        return True

    slow = make_clip(tmp_path / "a.mp4", n=40, b_frames=0)
    path = copy_packets([slow], tmp_path / "fast.mp4", faster)
    rule = GridRule(10**6, 10**6)
    times = VideoFile(path, rule).timestamps_s
    assert np.diff(times).max() < 1e-3 and len(times) == 40
    assert frame_numbers(VideoFile(path, rule).look(range(40), BIG)) == pytest.approx(
        range(40), abs=0.6
    )
    # Times that another version of FFmpeg rounded.
    moved = replace(read_facts(path, rule), timestamps_s=tuple(t + 1e-4 for t in times[5:9]))
    found = VideoFile(path, rule, moved).look(range(4), BIG)
    assert frame_numbers(found) == pytest.approx([5, 6, 7, 8], abs=0.6)


def test_times_of_one_frame_that_should_be_two_are_another_files(tmp_path):
    path = make_clip(tmp_path / "a.mp4", n=5)
    facts = replace(read_facts(path, ALL), timestamps_s=(0.1, 0.2, 0.2004))
    with pytest.raises(
        MediaError,
        match=r"one frame .* from 0\.2\d* s and from 0\.2004\d* s.*make the record again",
    ):
        VideoFile(path, ALL, facts).look([0, 1, 2], BIG)


def test_frames_that_an_edit_list_hides_do_not_shift_the_others(tmp_path):
    def earlier(number, packet):
        packet.pts -= round(0.5 / packet.time_base)
        packet.dts -= round(0.5 / packet.time_base)
        return True

    path = copy_packets([make_clip(tmp_path / "a.mp4", n=30)], tmp_path / "cut.mp4", earlier)
    video = VideoFile(path, ALL)
    assert video.timestamps_s == pytest.approx(np.arange(25) / 10, abs=1e-4)
    assert looked_at(path) == pytest.approx(range(5, 30), abs=0.6)


def test_e12_the_frames_there_are_count_not_those_of_the_header(tmp_path):
    whole = make_clip(tmp_path / "a.mp4", n=30, gop=5)
    copy = copy_packets([whole], tmp_path / "b.mp4")
    with av.open(str(copy)) as container:
        last = list(container.demux(video=0))[-3]
    # The header still tells of 30 frames; the bytes of the last ones are gone.
    (tmp_path / "cut.mp4").write_bytes(copy.read_bytes()[: last.pos + last.size])
    with av.open(str(tmp_path / "cut.mp4")) as container:
        assert container.streams.video[0].frames == 30
    facts = read_facts(tmp_path / "cut.mp4", ALL)
    assert facts.n_frames < 30 and len(facts.timestamps_s) == facts.n_frames


@pytest.mark.parametrize(
    ("matrix", "size", "corner"),
    [
        ((1, 0, 0, 1), (96, 64), ("top", "left")),
        ((0, 1, -1, 0), (64, 96), ("top", "right")),
        ((-1, 0, 0, -1), (96, 64), ("bottom", "right")),
        ((0, -1, 1, 0), (64, 96), ("bottom", "left")),
        ((-1, 0, 0, 1), (96, 64), ("top", "right")),
        ((1, 0, 0, -1), (96, 64), ("bottom", "left")),
        ((0, 1, 1, 0), (64, 96), ("top", "left")),
        ((0, -1, -1, 0), (64, 96), ("bottom", "right")),
    ],
)
def test_e05_frames_are_upright(tmp_path, matrix, size, corner):
    path = with_matrix(make_clip(tmp_path / "a.mp4", n=3), tmp_path / "b.mp4", matrix)
    video = VideoFile(path, ALL)
    assert video.size == size
    (whole,), (small,) = video.look([1], BIG), video.look([1], 16 * 24)
    assert whole.shape == (size[1], size[0], 3)
    assert small.shape[:2] == ((24, 16) if size[1] > size[0] else (16, 24))
    assert red_corner(whole) == red_corner(small) == corner


def test_of_several_streams_the_first_is_read(tmp_path):
    first = make_clip(tmp_path / "a.mp4", n=10, size=(96, 64))
    second = make_clip(tmp_path / "b.mp4", n=20, size=(320, 240))
    video = VideoFile(copy_packets([first, second], tmp_path / "c.mp4"), ALL)
    assert (video.size, len(video.timestamps_s)) == ((96, 64), 10)
    assert looked_at(video.path) == pytest.approx(range(10), abs=0.6)


@pytest.mark.parametrize("width", [16, 24, 32, 48, 64, 96, 144, 130])
def test_narrow_videos_are_read_as_any(tmp_path, width):
    path = make_clip(tmp_path / "a.mp4", n=3, size=(width, 64))
    assert [f.shape for f in VideoFile(path, ALL).look(range(3), BIG)] == [(64, width, 3)] * 3


def test_a_look_keeps_order_and_repeats_and_never_enlarges(tmp_path):
    video = VideoFile(make_clip(tmp_path / "a.mp4"), ALL)
    frames = video.look([7, 2, 7], 24 * 16)
    assert {f.shape for f in frames} == {(16, 24, 3)} and frames[0].dtype == np.uint8
    assert frame_numbers(frames) == pytest.approx([7, 2, 7], abs=0.6)
    assert video.look([0], BIG)[0].shape == (64, 96, 3)
    assert video.look([], BIG) == []
    with pytest.raises(IndexError, match="no frame 20 on a grid of 20"):
        video.look([20], BIG)


def test_equal_keys_mean_equal_frames(tmp_path):
    path = make_clip(tmp_path / "a.mp4")
    (tmp_path / "b.mp4").write_bytes(path.read_bytes())
    key = VideoFile(path, GridRule(2, 8)).key
    assert key == VideoFile(tmp_path / "b.mp4", GridRule(2, 8)).key
    assert key != VideoFile(path, GridRule(3, 8)).key
    assert key.startswith(hashlib.sha256(path.read_bytes()).hexdigest()[:32])


# --------------------------------------------------------------------------- odd files


def test_what_is_known_is_not_read_again_and_another_file_is_noticed(tmp_path):
    path = make_clip(tmp_path / "a.mp4")
    facts = read_facts(path, ALL)
    path.unlink()
    video = VideoFile(path, ALL, facts)
    assert (video.size, video.timestamps_s) == (facts.size, facts.timestamps_s)
    with pytest.raises(MediaError, match="no such file"):
        video.look([0], BIG)
    make_clip(path, fps=7)
    with pytest.raises(MediaError, match=r"a\.mp4: no frame of the video is shown from 0\.1"):
        video.look([1], BIG)


def damaged(path, out):
    data = bytearray(copy_packets([path], out).read_bytes())
    with av.open(str(out)) as container:
        packets = [p for p in container.demux(video=0) if p.size and not p.is_keyframe]
    middle = packets[len(packets) // 2]
    data[middle.pos : middle.pos + middle.size] = b"\xff" * middle.size
    out.write_bytes(data)
    return out


def test_a_frame_that_cannot_be_decoded_is_an_error_and_never_another_frame(tmp_path):
    path = damaged(make_clip(tmp_path / "a.mp4", n=30, gop=10, b_frames=0), tmp_path / "b.mp4")
    video = VideoFile(path, ALL)
    failed = 0
    for number in range(30):
        try:
            (frame,) = video.look([number], BIG)
        except MediaError as error:
            assert "cannot be decoded" in str(error) and "leave its rows out" in str(error)
            failed += 1
        else:
            assert frame_numbers([frame]) == pytest.approx([number], abs=0.6)
    assert 1 <= failed <= 10


@pytest.mark.parametrize("content", [b"", b"no video at all" * 100])
def test_files_that_are_no_video_are_an_error_with_a_remedy(tmp_path, content):
    (tmp_path / "a.mp4").write_bytes(content)
    video = VideoFile(tmp_path / "a.mp4", ALL)
    for ask in (lambda: video.size, lambda: video.timestamps_s, lambda: video.look([0], BIG)):
        with pytest.raises(MediaError, match=r"a\.mp4: the video cannot be read.*Fetch it again"):
            ask()


def test_a_file_without_times_or_without_video_says_so(tmp_path):
    with pytest.raises(MediaError, match=r"times of its frames.*ffmpeg"):
        _ = VideoFile(make_clip(tmp_path / "a.h264"), ALL).timestamps_s
    with av.open(str(tmp_path / "b.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=16000)
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        sound.sample_rate = 16000
        container.mux(stream.encode(sound))
        container.mux(stream.encode())
    with pytest.raises(MediaError, match="no video stream"):
        _ = VideoFile(tmp_path / "b.mp4", ALL).size


@pytest.mark.parametrize("name", ["gone.mp4", ".", "x" * 300 + ".mp4", "a\0.mp4"])
def test_paths_that_are_no_file_are_an_error(tmp_path, name):
    with pytest.raises(MediaError):
        _ = VideoFile(tmp_path / name, ALL).size


def test_a_name_like_an_address_is_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_clip(tmp_path / "concat:a|b 1%.mp4", n=3)
    assert looked_at(tmp_path / "concat:a|b 1%.mp4") == pytest.approx(range(3), abs=0.6)
