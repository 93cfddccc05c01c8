"""The mini image world: what a view shows, and what may depend on what."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reframe_vl.mini.glyphs import COLOR_NAMES, HUES, digit_tile
from reframe_vl.mini.world import (
    CANVAS_PX,
    UNIT_PX,
    MiniImage,
    MiniWorld,
    area_weights,
    view_side,
)
from reframe_vl.types import Applicability, ImageMedia, Modality

INDICES = range(60)


def clean(image: MiniImage) -> MiniImage:
    return dataclasses.replace(image, noise_std=0.0)


def test_a_sample_is_decided_by_world_split_index_and_seed():
    world = MiniWorld(n_objects=2)
    first, again = world.sample("train", 7, seed=3), MiniWorld(n_objects=2).sample("train", 7, 3)
    assert first == again
    assert first.media.key == again.media.key
    np.testing.assert_array_equal(first.media.look(None), again.media.look(None))
    for other in (world.sample("train", 8, 3), world.sample("val", 7, 3), world.sample("train", 7)):
        assert other.id != first.id
        assert other.media.key != first.media.key


def test_splits_and_seeds_are_disjoint():
    world = MiniWorld()
    streams = [("train", 0), ("val", 0), ("test", 0), ("train", 1)]
    keys = [world.sample(split, i, seed).media.key for split, seed in streams for i in range(200)]
    assert len(set(keys)) == len(keys)


def test_a_sample_asks_for_the_digit_on_its_evidence():
    for index in INDICES:
        sample = MiniWorld(n_objects=3).sample("train", index)
        target = sample.media.squares[0]
        assert sample.question == f"What digit is on the {target.color} square?"
        assert sample.answer.value == str(target.digit)
        assert sample.evidence.boxes == (target.box,)
        x0, y0, x1, y1 = target.box
        assert x0 % 32 == y0 % 32 == 0
        assert x1 - x0 == y1 - y0 == 32
        assert x1 <= CANVAS_PX
        assert y1 <= CANVAS_PX
        assert sample.applicability is Applicability.BENEFICIAL
        assert sample.modality is Modality.IMAGE
        assert (sample.domain, sample.source, sample.split) == ("image", "mini_image", "train")


def test_squares_of_a_scene_differ_in_colour_and_do_not_overlap():
    for index in INDICES:
        squares = MiniWorld(n_objects=8).sample("train", index).media.squares
        assert len({s.color for s in squares}) == len({(s.column, s.row) for s in squares}) == 8


def test_the_cue_changes_nothing_but_the_cue():
    worlds = MiniWorld(cue_strength=0.0), MiniWorld(cue_strength=1.0), MiniWorld(conflict=True)
    for index in INDICES:
        images = [world.sample("train", index).media for world in worlds]
        scenes = {dataclasses.replace(image, cue_digit=0) for image in images}
        assert len(scenes) == 1


@pytest.mark.parametrize(
    ("world", "low", "high"),
    [
        (MiniWorld(cue_strength=0.0), 0.05, 0.15),
        (MiniWorld(cue_strength=0.5), 0.48, 0.62),
        (MiniWorld(cue_strength=1.0), 1.0, 1.0),
        (MiniWorld(cue_strength=1.0, conflict=True), 0.0, 0.0),
    ],
)
def test_the_cue_is_right_as_often_as_its_strength_says(world, low, high):
    images = [world.sample("train", index).media for index in range(600)]
    right = np.mean([image.cue_digit == image.squares[0].digit for image in images])
    assert low <= right <= high


def test_the_ring_of_the_whole_view_has_the_cues_hue_and_no_crop_shows_it():
    for index in INDICES:
        image = clean(MiniWorld().sample("train", index).media)
        view = image.look(None)
        ring = np.ones((32, 32), bool)
        ring[2:-2, 2:-2] = False
        assert (view[ring] == np.round(HUES[image.cue_digit])).all()
        other = dataclasses.replace(image, cue_digit=(image.cue_digit + 1) % 10)
        assert (view[~ring] == other.look(None)[~ring]).all()
        for box in (image.squares[0].box, (0.0, 0.0, 64.0, 64.0), (0.0, 0.0, 128.0, 128.0)):
            np.testing.assert_array_equal(image.look(box), other.look(box))


def test_noise_is_the_same_at_every_look_and_differs_between_regions():
    image = MiniWorld().sample("train", 0).media
    blank = dataclasses.replace(image, squares=())
    box, beside = (0.0, 0.0, 32.0, 32.0), (32.0, 0.0, 64.0, 32.0)
    np.testing.assert_array_equal(blank.look(box), blank.look(box))
    assert (blank.look(box) != blank.look(beside)).mean() > 0.5
    assert (blank.look(box) != dataclasses.replace(blank, noise_seed=1).look(box)).mean() > 0.5


@given(st.tuples(*[st.integers(0, 7)] * 4))
def test_a_view_of_whole_units_is_the_area_average_of_the_canvas(units):
    x, y, w, h = units
    box = (x, y, min(8, x + 1 + w), min(8, y + 1 + h))
    x0, y0, x1, y1 = (v * UNIT_PX for v in box)
    image = clean(MiniWorld(n_objects=4).sample("train", 1).media)
    region = image.canvas[y0:y1, x0:x1].astype(np.float64)
    # Enlarge by 32 and average blocks: exact for any whole number of pixels.
    rows = region.repeat(32, 0).reshape(32, -1, *region.shape[1:]).mean(1)
    expected = rows.repeat(32, 1).reshape(32, 32, -1, 3).mean(2)
    view = image.look((float(x0), float(y0), float(x1), float(y1)))
    assert np.abs(view - expected).max() <= 0.51


@given(st.floats(0.0, 120.0), st.floats(0.5, 8.0), st.integers(1, 40))
def test_area_weights_average_and_keep_the_centre(start, length, num_out):
    weights = area_weights(start, start + length, num_out)
    np.testing.assert_allclose(weights.sum(1), 1.0, atol=1e-5)
    assert (weights >= 0).all()
    mean = (weights.mean(0) * np.arange(CANVAS_PX)).sum() + 0.5
    assert abs(mean - (start + length / 2)) <= 0.5 + 1e-3


@pytest.mark.parametrize(
    ("max_pixels", "side"), [(1024, 32), (1023, 24), (4096, 64), (256, 16), (1, 16), (2048, 40)]
)
def test_a_views_side_follows_the_budget(max_pixels, side):
    assert view_side(max_pixels) == side
    image = MiniWorld().sample("train", 0).media
    for box in (None, (0.0, 0.0, 100.0, 17.5)):
        assert image.look(box, max_pixels).shape == (side, side, 3)
        assert image.look(box, max_pixels).dtype == np.uint8


@pytest.mark.parametrize(
    "box",
    [(0, 0, 0, 5), (5, 5, 4, 6), (-1, 0, 5, 5), (0, 0, 129, 5), (0, 0, float("nan"), 5)],
)
def test_a_region_that_cannot_be_shown_is_refused(box):
    with pytest.raises(ValueError, match="clip it first"):
        MiniWorld().sample("train", 0).media.look(box)


def test_an_image_is_an_image_media():
    assert isinstance(MiniWorld().sample("train", 0).media, ImageMedia)


def test_impossible_worlds_are_refused():
    with pytest.raises(ValueError, match="n_objects is 9"):
        MiniWorld(n_objects=9)
    with pytest.raises(ValueError, match=r"cue_strength is 1\.5"):
        MiniWorld(cue_strength=1.5)


def test_an_ideal_reader_needs_the_crop():
    templates = {
        color: np.stack([digit_tile(color, digit, 32) for digit in range(10)])
        for color in COLOR_NAMES
    }
    right_whole = right_crop = 0
    samples = [MiniWorld(cue_strength=0.0).sample("test", index) for index in range(150)]
    for sample in samples:
        square = sample.media.squares[0]
        tiles = templates[square.color]
        crop = sample.media.look(square.box).astype(np.float32)
        right_crop += int(_nearest(crop, tiles) == square.digit)
        x, y = square.column * 4, square.row * 4
        seen = sample.media.look(None)[y : y + 8, x : x + 8].astype(np.float32)
        small = tiles.reshape(10, 8, 4, 8, 4, 3).mean((2, 4))
        # The ring may cover two of the eight pixels at an edge, but never the digit.
        right_whole += int(_nearest(seen[2:-2, 2:-2], small[:, 2:-2, 2:-2]) == square.digit)
    assert right_crop / len(samples) > 0.97
    assert 0.2 < right_whole / len(samples) < 0.7


def _nearest(view: np.ndarray, templates: np.ndarray) -> int:
    # Noise is clipped at black and white, so that expected values are nearer to the middle.
    levels = templates / 127.5 - 1.0
    noise = np.random.default_rng(0).standard_normal(2000)
    grid = np.linspace(-1, 1, 65)
    expected = np.clip(grid[:, None] + 0.8 * noise, -1, 1).mean(1)
    ideal = np.interp(levels, grid, expected)
    return int(((view / 127.5 - 1.0 - ideal) ** 2).sum((1, 2, 3)).argmin())
