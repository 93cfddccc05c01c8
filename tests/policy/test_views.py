import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from reframe_vl.policy.views import MAX_ASPECT_RATIO, ViewError, ViewMaker
from tiny import view_maker

MEAN, STD = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)


def noise(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize("patch, merge, temporal", [(14, 2, 2), (16, 2, 2), (8, 1, 1)])
@pytest.mark.parametrize("height, width", [(100, 170), (33, 500), (64, 64)])
def test_patches_and_grids_equal_those_of_transformers_processor(
    patch, merge, temporal, height, width
):
    maker = ViewMaker(patch, merge, temporal, 56 * 56, 200 * 200, MEAN, STD)
    processor = Qwen2VLImageProcessorPil(
        patch_size=patch,
        merge_size=merge,
        temporal_patch_size=temporal,
        size={"shortest_edge": 56 * 56, "longest_edge": 200 * 200},
        image_mean=list(MEAN),
        image_std=list(STD),
    )
    image = noise(height, width)
    expected = processor(images=[Image.fromarray(image)], return_tensors="np")
    view = maker.view(image)
    assert view.grid_thw == tuple(expected["image_grid_thw"][0])
    np.testing.assert_allclose(maker.patches([view]), expected["pixel_values"], atol=2e-6)
    # A processor that sees the view itself leaves it as it is.
    again = processor(images=[Image.fromarray(view.pixels)], return_tensors="np")
    np.testing.assert_allclose(maker.patches([view]), again["pixel_values"], atol=2e-6)


def test_b03_patches_of_unequal_images_follow_each_other_by_their_grids():
    maker = view_maker()
    views = [maker.view(noise(32, 48)), maker.view(noise(16, 32, 1)), maker.view(noise(32, 48, 2))]
    together = maker.patches(views)
    apart = np.concatenate([maker.patches([view]) for view in views])
    np.testing.assert_array_equal(together, apart)


def test_images_and_videos_are_cut_together_as_they_are_apart():
    maker = view_maker()
    frames = [noise(32, 48, seed) for seed in range(5)]
    times = [0.0, 1.0, 2.0, 3.0, 4.0]
    views = [maker.video(frames, times), maker.view(frames[0]), maker.video(frames[:1], [0.0])]
    together = maker.patches(views)
    apart = np.concatenate([maker.patches([view]) for view in views])
    np.testing.assert_array_equal(together, apart)
    assert [view.grid_thw[0] for view in views] == [3, 1, 1]
    assert len(together) == sum(np.prod(view.grid_thw) for view in views)


def test_frames_of_a_video_are_fed_at_one_size_and_read_back_from_its_view():
    maker = view_maker()
    view = maker.video([noise(60, 100), noise(30, 50, 1)], [0.0, 0.5], 1024)
    assert len(view.frames) == 2
    np.testing.assert_array_equal(view.frames[0], maker.view(noise(60, 100), 1024).pixels)
    assert {frame.shape for frame in view.frames} == {view.frames[0].shape}


@pytest.mark.parametrize("height, width", [(639, 31), (15420, 690), (27, 332), (3, 9000), (1, 1)])
def test_a17_a18_a19_thin_and_tiny_images_keep_at_least_one_token_a_side(height, width):
    maker = ViewMaker(14, 2, 2, 28 * 28 * 4, 28 * 28 * 20, MEAN, STD)
    view = maker.view(noise(height, width))
    _, grid_h, grid_w = view.grid_thw
    assert min(grid_h, grid_w) >= 2
    assert grid_h % 2 == grid_w % 2 == 0
    assert view.num_tokens == grid_h * grid_w // 4


@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 64))
def test_every_image_gets_a_view_within_the_budget(height, width, tokens):
    maker = ViewMaker(8, 2, 1, 256, 256 * 256, MEAN, STD)
    view = maker.view(np.zeros((height, width, 3), np.uint8), tokens * 256)
    # One token a side is the least, which a very long image may need more than its budget for.
    least = max(height, width) / min(height, width)
    assert view.num_tokens <= max(tokens, min(least, MAX_ASPECT_RATIO) * 2 + 2)


def test_equal_pixels_have_equal_hashes_and_others_do_not():
    maker = view_maker()
    one, same, other = (maker.view(noise(32, 32, s)) for s in (0, 0, 1))
    assert one.hash == same.hash != other.hash
    # The same bytes in another shape are another image.
    assert maker.view(np.zeros((16, 64, 3), np.uint8)).hash != (
        maker.view(np.zeros((64, 16, 3), np.uint8)).hash
    )


def test_videos_that_the_model_sees_otherwise_have_other_hashes():
    maker = view_maker()
    frames = [noise(32, 32, seed) for seed in range(4)]
    tall = np.concatenate(frames[:2])
    views = [
        maker.view(tall),
        maker.video([tall], [0.0]),
        maker.video(frames[:2], [0.0, 1.0]),
        maker.video(frames, [0.0, 1.0, 2.0, 3.0]),
        maker.video(frames, [0.0, 2.0, 4.0, 6.0]),
    ]
    assert len({view.hash for view in views}) == len(views)
    # One temporal patch has no time of its own.
    assert maker.video(frames[:2], [5.0, 9.0]).hash == views[2].hash


def test_an_empty_image_and_a_folder_without_settings_are_errors_with_the_remedy(tmp_path):
    with pytest.raises(ViewError, match="0x5"):
        view_maker().view(np.zeros((5, 0, 3), np.uint8))
    with pytest.raises(FileNotFoundError, match="processor_config"):
        ViewMaker.from_pretrained(tmp_path)
