"""The mini video world: what a frame shows, and what may depend on what."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest

from reframe_vl.data.evidence import applicability
from reframe_vl.mini.glyphs import COLOR_NAMES, HUES, digit_tile
from reframe_vl.mini.video_world import COARSE_BUDGET, MiniVideo, MiniVideoWorld
from reframe_vl.tools.base import Refusal, Scene
from reframe_vl.tools.coordinates import CoordinateFrame
from reframe_vl.tools.select_frames import SelectFrames
from reframe_vl.types import Modality, VideoMedia

INDICES = range(60)
FULL = 1024
WORLDS = (
    MiniVideoWorld(),
    MiniVideoWorld(n_events=1, max_length=5),
    MiniVideoWorld(n_events=2, n_segments=2),
    MiniVideoWorld(n_events=1, n_segments=3, max_length=1, num_frames=16),
)


def clean(video: MiniVideo) -> MiniVideo:
    return dataclasses.replace(video, noise_std=0.0)


def test_a_sample_is_decided_by_world_split_index_and_seed():
    first, again = (MiniVideoWorld().sample("train", 7, seed=3) for _ in range(2))
    assert first == again
    assert first.media.key == again.media.key
    for one, other in zip(first.media.look(range(10)), again.media.look(range(10)), strict=True):
        np.testing.assert_array_equal(one, other)
    world = MiniVideoWorld()
    for other in (world.sample("train", 8, 3), world.sample("val", 7, 3), world.sample("train", 7)):
        assert other.id != first.id
        assert other.media.key != first.media.key


@pytest.mark.parametrize("world", WORLDS)
def test_a_sample_asks_for_the_digit_that_its_evidence_frames_show(world):
    for index in INDICES:
        sample = world.sample("train", index)
        video = sample.media
        target = video.events[0]
        assert isinstance(video, VideoMedia)
        assert sample.modality is Modality.VIDEO
        assert sample.question == f"What digit is on the {target.color} square?"
        assert sample.answer.value == str(target.digit)
        assert sample.evidence.segments == target.segments
        assert len(target.segments) == world.n_segments
        shown = [f for f in range(world.num_frames) if video.event_at(f) is target]
        assert sorted(sample.evidence.frames) == shown
        assert sample.applicability is applicability(len(shown) / world.num_frames)


@pytest.mark.parametrize("world", WORLDS)
def test_runs_fit_and_a_blank_frame_parts_any_two(world):
    lengths, starts = set(), set()
    for index in range(300):
        video = world.sample("train", index).media
        runs = sorted(run for event in video.events for run in event.segments)
        assert len({event.color for event in video.events}) == world.n_events
        for run in runs:
            assert run == tuple(range(run[0], run[-1] + 1))
            assert 0 <= run[0] <= run[-1] < world.num_frames
        assert all(before[-1] + 1 < after[0] for before, after in pairwise(runs))
        lengths |= {len(run) for run in runs}
        starts |= {run[0] for run in video.events[0].segments}
    assert lengths == set(range(1, world.max_length + 1))
    assert len(starts) > world.num_frames / 2


def test_the_cue_changes_nothing_but_the_cue():
    worlds = [MiniVideoWorld(cue_strength=s) for s in (0.0, 1.0)] + [MiniVideoWorld(conflict=True)]
    for index in INDICES:
        videos = [world.sample("train", index).media for world in worlds]
        assert len({dataclasses.replace(video, cue_digit=0) for video in videos}) == 1
        assert videos[1].cue_digit == videos[1].events[0].digit != videos[2].cue_digit


def test_coarse_frames_show_the_cue_and_selected_ones_do_not():
    for index in INDICES:
        video = clean(MiniVideoWorld().sample("train", index).media)
        other = dataclasses.replace(video, cue_digit=(video.cue_digit + 1) % 10)
        ring = np.ones((16, 16), bool)
        ring[1:-1, 1:-1] = False
        frames = range(video.num_frames)
        for coarse, recued in zip(video.look(frames), other.look(frames), strict=True):
            assert (coarse[ring] == np.round(HUES[video.cue_digit])).all()
            assert (coarse[~ring] == recued[~ring]).all()
        for one, two in zip(video.look(frames, FULL), other.look(frames, FULL), strict=True):
            np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(
    ("max_pixels", "side"), [(COARSE_BUDGET, 16), (1, 16), (600, 24), (FULL, 32), (10**6, 32)]
)
def test_a_frames_side_follows_the_budget_up_to_full_detail(max_pixels, side):
    video = MiniVideoWorld().sample("train", 0).media
    (frame,) = video.look([3], max_pixels)
    assert frame.shape == (side, side, 3)
    assert frame.dtype == np.uint8


def test_a_selected_frame_shows_the_tile_and_a_coarse_one_its_average():
    video = clean(MiniVideoWorld().sample("train", 1).media)
    event = video.events[0]
    frame = event.segments[0][0]
    tile = digit_tile(event.color, event.digit, 32)
    (full,), (coarse,) = video.look([frame], FULL), video.look([frame])
    np.testing.assert_array_equal(full, tile.astype(np.uint8))
    average = tile.reshape(16, 2, 16, 2, 3).mean((1, 3))[1:-1, 1:-1]
    assert np.abs(coarse[1:-1, 1:-1] - average).max() <= 0.51


def test_noise_is_the_same_at_every_look_and_differs_between_frames():
    video = MiniVideoWorld().sample("train", 0).media
    blank = dataclasses.replace(video, events=())
    first, again, beside = (blank.look([frame], FULL)[0] for frame in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != beside).mean() > 0.5


def test_canonical_calls_execute_and_return_the_evidence():
    tool = SelectFrames()
    for world in WORLDS:
        sample = world.sample("test", 0)
        scene = Scene.of(sample, CoordinateFrame.GRID_1000, (16, 16))
        calls = tool.canonical(sample.evidence, scene)
        assert len(calls) == world.n_segments
        returned = []
        for arguments in calls:
            request = tool.check(arguments, scene)
            assert not isinstance(request, Refusal)
            result = tool.run(request, sample.media, FULL)
            assert [i.caption for i in result.images] == [f"<{f}.0 seconds>" for f in result.frames]
            returned += result.frames
        assert frozenset(returned) == sample.evidence.frames


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_events": 9}, "n_events is 9"),
        ({"n_segments": 0}, "n_segments is 0"),
        ({"n_events": 4, "max_length": 2}, "4 runs of up to 2 frames"),
        ({"cue_strength": 1.5}, r"cue_strength is 1\.5"),
    ],
)
def test_impossible_worlds_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        MiniVideoWorld(**settings)


def test_a_frame_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="no frame 10"):
        MiniVideoWorld().sample("train", 0).media.look([10])


def test_an_ideal_reader_needs_the_selected_frame_but_sees_colours_coarsely():
    tiles = {c: np.stack([digit_tile(c, d, 32) for d in range(10)]) for c in COLOR_NAMES}
    right_coarse = right_full = right_color = 0
    samples = [MiniVideoWorld(cue_strength=0.0).sample("test", index) for index in range(150)]
    for sample in samples:
        event = sample.media.events[0]
        frame = event.segments[0][0]
        full = sample.media.look([frame], FULL)[0].astype(np.float32)
        coarse = sample.media.look([frame])[0].astype(np.float32)[1:-1, 1:-1]
        small = {
            color: pixels.reshape(10, 16, 2, 16, 2, 3).mean((2, 4))[:, 1:-1, 1:-1]
            for color, pixels in tiles.items()
        }
        right_full += _nearest(full, tiles[event.color], 0.8) == event.digit
        right_coarse += _nearest(coarse, small[event.color], 1.6) == event.digit
        means = np.stack([small[color].mean(0) for color in COLOR_NAMES])
        right_color += COLOR_NAMES[_nearest(coarse, means, 1.6)] == event.color
    assert right_full / len(samples) > 0.97
    assert right_coarse / len(samples) < 0.7
    assert right_color / len(samples) > 0.9


def _nearest(view: np.ndarray, templates: np.ndarray, noise_std: float) -> int:
    # Noise is clipped at black and white, so that expected values are nearer to the middle.
    levels = templates / 127.5 - 1.0
    noise = np.random.default_rng(0).standard_normal(2000)
    grid = np.linspace(-1, 1, 65)
    expected = np.clip(grid[:, None] + noise_std * noise, -1, 1).mean(1)
    ideal = np.interp(levels, grid, expected)
    return int(((view / 127.5 - 1.0 - ideal) ** 2).sum((1, 2, 3)).argmin())
