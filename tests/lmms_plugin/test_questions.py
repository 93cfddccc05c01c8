from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clips import make_clip
from reframe_vl.data.media import ImageFile
from reframe_vl.data.video import VideoFile
from reframe_vl.evaluation.releases.media import MediaStore
from reframe_vl.lmms_plugin.questions import question
from reframe_vl.types import Modality


@pytest.fixture
def store(tmp_path):
    return MediaStore(None, tmp_path / "unpacked")


def picture(width=20, height=10, mode="RGB"):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels).convert(mode)


def pixels_of(sample):
    assert isinstance(sample.media, ImageFile)
    return sample.media.look(None, 10**6)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK", "RGBA"])
def test_an_image_in_memory_is_seen_pixel_by_pixel(store, mode):
    image = picture(mode=mode)
    sample = question("task/test/0", " What?\nA. a\nB. b\n", [image], store)
    assert (sample.id, sample.modality) == ("task/test/0", Modality.IMAGE)
    assert sample.question == "What?\nA. a\nB. b" and not sample.options
    assert np.array_equal(pixels_of(sample), np.asarray(image.convert("RGB")))


def test_an_image_that_is_turned_by_its_exif_is_seen_upright(store):
    image = picture()
    image.getexif()[0x0112] = 6
    assert pixels_of(question("q", "What?", [image], store)).shape == (20, 10, 3)


def test_a_path_is_an_image_or_a_video(store, tmp_path):
    picture().save(tmp_path / "image.png")
    make_clip(tmp_path / "clip.mp4")
    image = question("q", "What?", [str(tmp_path / "image.png")], store)
    assert np.array_equal(pixels_of(image), np.asarray(picture()))
    video = question("q", "What?", [str(tmp_path / "clip.mp4")], store)
    assert video.modality is Modality.VIDEO and isinstance(video.media, VideoFile)
    assert video.media.timestamps_s


def test_several_images_are_seen_side_by_side(store):
    pixels = pixels_of(question("q", "Which?", [picture(), picture(30, 5)], store))
    assert pixels.shape[0] == 10 and pixels.shape[1] > 50


@pytest.mark.parametrize(
    ("visuals", "words"),
    [
        ([], "nothing"),
        (["a.mp4", "b.mp4"], "given str"),
        ([picture(), "a.mp4"], "given Image, str"),
        ([{"array": [0.0], "sampling_rate": 16000}], "given dict"),
        (["no/such/file.png"], r"file\.png"),
    ],
)
def test_what_the_agent_cannot_look_at_is_refused_by_name(store, visuals, words):
    with pytest.raises(ValueError, match=rf"task/test/7: .*{words}.* leave the task out"):
        question("task/test/7", "What?", visuals, store)


def test_a_damaged_image_is_refused_by_name(store, tmp_path):
    path = Path(tmp_path / "image.png")
    path.write_bytes(b"no image")
    with pytest.raises(ValueError, match="task/test/7: its image cannot be read"):
        question("task/test/7", "What?", [path], store)
