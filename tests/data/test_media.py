import hashlib
import io
import pickle
import struct
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import ExifTags, Image, ImageChops

from reframe_vl.data.decoded_images import DECODED, DecodedImages
from reframe_vl.data.media import ImageFile, MediaError, pixel_region, reduced_size, to_rgb
from reframe_vl.types import ImageMedia

BIG = 10**9


@pytest.fixture(autouse=True)
def empty_store() -> None:
    DECODED.clear()


def photo(width: int, height: int) -> Image.Image:
    """A smooth picture in which every quarter has its own colour."""
    y, x = np.mgrid[0:height, 0:width]
    red, green = 255 * x / width, 255 * y / height
    return Image.fromarray(np.stack([red, green, 128 + 0 * x], -1).astype(np.uint8))


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[ExifTags.Base.Orientation] = orientation
    return tags


def saved(image: Image.Image, path: Path, **options) -> ImageFile:
    image.save(path, **options)
    return ImageFile(path)


def colours_near(image: np.ndarray, expected: Image.Image, tolerance: float = 6) -> bool:
    return bool(np.abs(image.astype(int) - np.asarray(expected).astype(int)).max() <= tolerance)


# --------------------------------------------------------------------------- looking


def test_an_image_file_is_image_media_and_opens_nothing_until_it_is_looked_at(tmp_path) -> None:
    file = ImageFile(tmp_path / "not_there.png")
    assert file == pickle.loads(pickle.dumps(file))
    with pytest.raises(MediaError, match=r"not_there\.png.*no such file"):
        file.look(None, BIG)
    with pytest.raises(MediaError, match=r"not_there\.png"):
        file.key  # noqa: B018
    assert isinstance(saved(photo(8, 6), tmp_path / "a.png"), ImageMedia)


def test_whole_image_and_region_are_the_stored_pixels(tmp_path) -> None:
    picture = photo(50, 30)
    file = saved(picture, tmp_path / "a.png")
    assert file.size == (50, 30)
    assert np.array_equal(file.look(None, BIG), np.asarray(picture))
    assert np.array_equal(file.look((10, 5, 30, 25), BIG), np.asarray(picture)[5:25, 10:30])


def test_edges_move_outwards_to_whole_pixels_and_are_clipped(tmp_path) -> None:
    assert pixel_region((1.2, 2.0000000001, 3.7, 4.0000000001), (10, 10)) == (1, 2, 4, 4)
    assert pixel_region((-5, -5, 100, 3), (10, 10)) == (0, 0, 10, 3)


@pytest.mark.parametrize(
    "box", [(3, 3, 3, 5), (5, 3, 2, 8), (0, 0, float("nan"), 1), (0, 0, float("inf"), 1)]
)
def test_a14_empty_or_reversed_boxes_are_refused_with_a_sentence(box) -> None:
    with pytest.raises(ValueError, match="holds no pixels"):
        pixel_region(box, (10, 10))


def test_a16_box_outside_the_image_is_refused_with_both_named() -> None:
    with pytest.raises(ValueError, match=r"801.*768x768"):
        pixel_region((801, 497, 1017, 838), (768, 768))


@given(st.integers(1, 20000), st.integers(1, 20000), st.integers(1, 10**6))
def test_reduced_size_keeps_the_budget_the_shape_and_at_least_one_pixel(w, h, budget) -> None:
    new_w, new_h = reduced_size((w, h), budget)
    assert 1 <= new_w <= w and 1 <= new_h <= h
    assert new_w * new_h <= budget
    if min(new_w, new_h) > 20:
        assert new_w / new_h == pytest.approx(w / h, rel=0.06)
    if w * h <= budget:
        assert (new_w, new_h) == (w, h)


def test_a_reduced_region_equals_cropping_first_and_draws_in_nothing_from_outside(tmp_path) -> None:
    picture = Image.new("RGB", (64, 64), "black")
    picture.paste("white", (16, 16, 48, 48))
    view = saved(picture, tmp_path / "a.png").look((16, 16, 48, 48), 64)
    assert view.shape == (8, 8, 3)
    assert view.min() == 255


def test_views_are_writable_and_do_not_change_the_stored_image(tmp_path) -> None:
    file = saved(photo(8, 8), tmp_path / "a.png")
    before = file.look(None, BIG)
    file.look(None, BIG)[:] = 0
    assert np.array_equal(file.look(None, BIG), before)


def test_e16_a_reduced_jpeg_is_the_same_whatever_was_looked_at_before(tmp_path) -> None:
    path = tmp_path / "a.jpg"
    photo(403, 301).save(path, exif=exif(6))
    small = ImageFile(path).look(None, 900)
    part = ImageFile(path).look((3, 5, 200, 400), 900)
    ImageFile(path).look(None, BIG)
    assert np.array_equal(ImageFile(path).look(None, 900), small)
    DECODED.clear()
    assert np.array_equal(ImageFile(path).look((3, 5, 200, 400), 900), part)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_jpeg_reduced_on_load_shows_the_same_as_one_reduced_afterwards(
    tmp_path, orientation
) -> None:
    path = tmp_path / "a.jpg"
    photo(405, 303).save(path, exif=exif(orientation), quality=95)
    file = ImageFile(path)
    full = Image.fromarray(file.look(None, BIG))
    for box in (None, (50, 30, 250, 290)):
        view = file.look(box, 400)
        expected = full.crop(box).resize(view.shape[1::-1], Image.Resampling.BICUBIC)
        assert colours_near(view, expected, 8)


def test_key_names_the_content_and_not_the_path(tmp_path) -> None:
    first = saved(photo(8, 8), tmp_path / "a.png")
    second = ImageFile(tmp_path / "b.png")
    second.path.write_bytes(first.path.read_bytes())
    other = saved(photo(9, 8), tmp_path / "c.png")
    assert first.key == second.key == hashlib.sha256(first.path.read_bytes()).hexdigest()[:32]
    assert first.key != other.key


def test_a_file_that_was_replaced_is_not_served_from_the_store(tmp_path) -> None:
    path = tmp_path / "a.png"
    saved(Image.new("RGB", (4, 4), "red"), path).look(None, BIG)
    saved(Image.new("RGB", (5, 4), "blue"), path)
    assert ImageFile(path).look(None, BIG)[0, 0].tolist() == [0, 0, 255]


@pytest.mark.parametrize("size", [(31, 639), (690, 15420), (332, 27), (1, 5000)])
def test_a17_a18_thin_images_are_read_with_their_size_and_never_lose_a_side(tmp_path, size) -> None:
    file = saved(Image.new("RGB", size, "red"), tmp_path / "a.png")
    assert file.size == size
    for budget in (1, 28 * 28, 20 * 28 * 28):
        height, width, _ = file.look(None, budget).shape
        assert height >= 1 and width >= 1 and height * width <= budget


# --------------------------------------------------------------------------- orientation

TAGGED = ["jpg", "png", "webp", "tif"]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", TAGGED)
def test_e15_orientation_is_applied_once_and_size_is_the_upright_one(
    tmp_path, suffix, orientation
) -> None:
    stored = Image.new("RGB", (60, 40), "black")
    stored.paste("red", (0, 0, 20, 40))
    stored.paste("lime", (0, 0, 60, 10))
    path = tmp_path / f"a.{suffix}"
    stored.save(path, exif=exif(orientation))
    back = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}  # Pillow's transposition for each value.
    upright = stored.transpose(back[orientation]) if orientation > 1 else stored
    file = ImageFile(path)
    assert file.size == upright.size
    assert file.look(None, BIG).shape[1::-1] == upright.size
    # Away from edges, where lossy formats smear.
    for x, y in [(5, 5), (5, 35), (45, 5), (45, 35)]:
        x, y = x % upright.width, y % upright.height
        assert colours_near(file.look(None, BIG)[y, x], upright.getpixel((x, y)), 90)


def test_e15_a_box_drawn_on_the_upright_photo_finds_its_region(tmp_path) -> None:
    upright = Image.new("RGB", (40, 60), "white")
    upright.paste("blue", (8, 32, 24, 56))
    stored = upright.transpose(Image.Transpose.ROTATE_90)  # Orientation 6 turns it back.
    file = saved(stored, tmp_path / "phone.jpg", exif=exif(6), quality=100, subsampling=0)
    region = file.look((9, 33, 23, 55), BIG)
    assert colours_near(region, Image.new("RGB", (14, 22), "blue"), 12)


def test_e15_png_orientation_behind_the_pixels_counts_for_size_and_pixels_alike(tmp_path) -> None:
    stream = io.BytesIO()
    photo(30, 20).save(stream, "png")
    tags = exif(6).tobytes()
    tags = tags.removeprefix(b"Exif\0\0")
    chunk = struct.pack(">I", len(tags)) + b"eXIf" + tags
    chunk += struct.pack(">I", zlib.crc32(b"eXIf" + tags))
    end = stream.getvalue().rindex(b"IEND") - 4
    path = tmp_path / "late.png"
    path.write_bytes(stream.getvalue()[:end] + chunk + stream.getvalue()[end:])
    assert ImageFile(path).size == (20, 30)
    assert ImageFile(path).look(None, BIG).shape == (30, 20, 3)


@pytest.mark.parametrize("value", [0, 9, 65535])
def test_impossible_orientations_mean_upright(tmp_path, value) -> None:
    file = saved(photo(30, 20), tmp_path / "a.jpg", exif=exif(value))
    assert file.size == (30, 20)


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
def test_damaged_exif_means_upright(tmp_path, suffix) -> None:
    file = saved(photo(30, 20), tmp_path / f"a.{suffix}", exif=b"Exif\0\0XX*\0broken")
    assert file.size == (30, 20)
    assert file.look(None, BIG).shape == (20, 30, 3)


# --------------------------------------------------------------------------- modes


def test_e19_one_channel_images_become_rgb_with_their_range(tmp_path) -> None:
    ramp = np.linspace(0, 255, 64).round().astype(np.uint8)[None].repeat(4, 0)
    grey = saved(Image.fromarray(ramp), tmp_path / "l.png").look(None, BIG)
    assert np.array_equal(grey, ramp[..., None].repeat(3, -1))
    bits = saved(Image.fromarray(ramp).convert("1"), tmp_path / "1.png").look(None, BIG)
    assert set(np.unique(bits)) == {0, 255}


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_e19_16_bit_images_are_scaled_not_clipped(tmp_path, suffix) -> None:
    ramp = np.linspace(0, 65535, 256).round().astype(np.uint16)[None].repeat(4, 0)
    view = saved(Image.fromarray(ramp), tmp_path / f"a.{suffix}").look(None, BIG)
    assert view.shape == (4, 256, 3)
    assert np.array_equal(view[0, :, 0], np.arange(256))


def test_e19_16_bit_brightness_does_not_depend_on_the_contents(tmp_path) -> None:
    dark = np.full((4, 4), 257 * 10, np.uint16)
    assert (saved(Image.fromarray(dark), tmp_path / "a.png").look(None, BIG) == 10).all()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([[0, 65535]], np.int32), [0, 255]),
        (np.array([[-100, 100, 300]], np.int32), [0, 128, 255]),
        (np.array([[0, 0.5, 1]], np.float32), [0, 128, 255]),
        (np.array([[0, 7, 255]], np.float32), [0, 7, 255]),
        (np.array([[-1, 0, 1]], np.float32), [0, 128, 255]),
        (np.array([[np.nan, np.inf, 1]], np.float32), [0, 0, 255]),
        (np.array([[-5, -5]], np.float32), [0, 0]),
    ],
)
def test_e19_wide_integers_and_floats_follow_the_documented_rule(values, expected) -> None:
    assert np.asarray(to_rgb(Image.fromarray(values)))[0, :, 0].tolist() == expected


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "RGB"])
def test_transparent_pixels_become_white(tmp_path, mode) -> None:
    path = tmp_path / "a.png"
    if mode in ("RGBA", "LA"):
        image = Image.new("RGBA", (4, 4), (0, 0, 0, 0)).convert(mode)
        image.save(path)
    else:
        black = (0, 0, 0) if mode == "RGB" else 0
        Image.new(mode, (4, 4), black).save(path, transparency=black)
    assert (ImageFile(path).look(None, BIG) == 255).all()


def test_half_transparency_is_blended(tmp_path) -> None:
    file = saved(Image.new("RGBA", (2, 2), (255, 0, 0, 128)), tmp_path / "a.png")
    assert file.look(None, BIG)[0, 0].tolist() == [255, 127, 127]


@pytest.mark.parametrize("suffix", ["jpg", "tif"])
def test_e20_cmyk_files_have_three_channels_and_their_colours(tmp_path, suffix) -> None:
    colours = photo(32, 32)
    options = {"quality": 100, "subsampling": 0} if suffix == "jpg" else {}
    file = saved(colours.convert("CMYK"), tmp_path / f"a.{suffix}", **options)
    view = file.look(None, BIG)
    assert view.shape == (32, 32, 3)
    assert colours_near(view, colours, 12)


def test_e20_adobe_inverted_samples_are_turned_back(tmp_path) -> None:
    ink = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    file = saved(ink, tmp_path / "a.jpg", quality=100)
    raw = file.path.read_bytes()
    assert b"Adobe" in raw
    assert colours_near(file.look(None, BIG), Image.new("RGB", (16, 16), "red"))
    other = saved(ImageChops.invert(ink), tmp_path / "b.jpg", quality=100)
    assert colours_near(other.look(None, BIG), Image.new("RGB", (16, 16), "black"))


@pytest.mark.parametrize("suffix", ["gif", "webp", "png"])
def test_e24_animated_files_give_their_first_frame(tmp_path, suffix) -> None:
    frames = [Image.new("RGB", (20, 20), colour) for colour in ("red", "blue", "lime")]
    path = tmp_path / f"a.{suffix}"
    options = {"lossless": True} if suffix == "webp" else {}
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=50, **options)
    assert Image.open(path).n_frames == 3
    assert (ImageFile(path).look(None, BIG) == [255, 0, 0]).all()


def test_e25_a_palette_gif_crops_and_saves_as_jpeg(tmp_path) -> None:
    picture = photo(20, 20).quantize(16)
    assert picture.mode == "P"
    region = saved(picture, tmp_path / "a.gif").look((2, 2, 12, 12), BIG)
    Image.fromarray(region).save(tmp_path / "crop.jpg")
    assert colours_near(region, picture.convert("RGB").crop((2, 2, 12, 12)), 0)


# --------------------------------------------------------------------------- bad files


def png_header(width: int, height: int) -> bytes:
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + struct.pack(">I", 13)
        + body
        + struct.pack(">I", zlib.crc32(body))
        + struct.pack(">I", 0)
        + b"IDAT"
        + struct.pack(">I", zlib.crc32(b"IDAT"))
    )


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("size", [(20000, 20000), (10000, 10000)])
def test_e21_images_over_the_limit_are_refused_and_the_limit_stays(tmp_path, size) -> None:
    limit = Image.MAX_IMAGE_PIXELS
    path = tmp_path / "bomb.png"
    path.write_bytes(png_header(*size))
    for use in (lambda file: file.size, lambda file: file.look(None, 1000)):
        with pytest.raises(MediaError, match=r"bomb\.png.*limit of \d+ pixels.*Reduce"):
            use(ImageFile(path))
    assert limit == Image.MAX_IMAGE_PIXELS == 89478485


@pytest.mark.parametrize("suffix", ["jpg", "png", "gif", "webp", "tif"])
@pytest.mark.parametrize("budget", [BIG, 100])
def test_e22_truncated_files_raise_one_error_that_names_them(tmp_path, suffix, budget) -> None:
    path = tmp_path / f"cut.{suffix}"
    noise = np.random.default_rng(0).integers(0, 255, (200, 200, 3), np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(MediaError, match=rf"cut\.{suffix}.*fetch it again"):
        ImageFile(path).look(None, budget)


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"\xff\xd8\xff"]
)
def test_files_that_are_no_images_raise_media_error(tmp_path, content) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(content)
    with pytest.raises(MediaError, match=r"a\.jpg"):
        ImageFile(path).size  # noqa: B018


def test_e22_a_bad_file_can_be_skipped_between_good_ones(tmp_path) -> None:
    files = [saved(photo(20, 20), tmp_path / f"{index}.jpg") for index in range(5)]
    files[3].path.write_bytes(files[3].path.read_bytes()[:300])
    read = []
    for index, file in enumerate(files):
        try:
            file.look(None, BIG)
        except MediaError:
            continue
        read.append(index)
    assert read == [0, 1, 2, 4]


# --------------------------------------------------------------------------- the store


def test_the_store_keeps_within_its_bytes_and_forgets_the_least_recently_used() -> None:
    store = DecodedImages(max_bytes=2 * 10 * 10 * 4)
    decoded: list[str] = []

    def get(name: str, side: int = 10) -> None:
        store.get(name, lambda: decoded.append(name) or Image.new("RGB", (side, side)))

    for name in "abacab":
        get(name)
        assert store.num_bytes <= 800
    assert decoded == ["a", "b", "c", "b"]
    get("large", 100)
    assert store.num_bytes == 800
    store.resize(0)
    assert store.num_bytes == 0


def test_threads_that_want_one_image_decode_it_once() -> None:
    store = DecodedImages(max_bytes=10**6)
    decoded = []
    together = threading.Barrier(8)

    def work(_: int) -> Image.Image:
        together.wait()
        return store.get("a", lambda: decoded.append(1) or Image.new("RGB", (10, 10)))

    with ThreadPoolExecutor(8) as pool:
        images = list(pool.map(work, range(8)))
    assert len(decoded) == 1
    assert all(image is images[0] for image in images)


def test_a_failed_decoding_is_tried_again() -> None:
    store = DecodedImages(max_bytes=10**6)

    def fail() -> Image.Image:
        raise MediaError("no")

    with pytest.raises(MediaError):
        store.get("a", fail)
    assert store.get("a", lambda: Image.new("RGB", (1, 1))).size == (1, 1)


def test_threads_see_the_same_pixels_as_one_thread(tmp_path) -> None:
    files = [saved(photo(60 + 10 * i, 50), tmp_path / f"{i}.jpg") for i in range(4)]
    wanted = [(file, box) for file in files for box in (None, (5, 5, 40, 40))] * 4
    expected = [file.look(box, 500) for file, box in wanted]
    DECODED.clear()
    with ThreadPoolExecutor(8) as pool:
        seen = list(pool.map(lambda item: item[0].look(item[1], 500), wanted))
    assert all(np.array_equal(a, b) for a, b in zip(seen, expected, strict=True))
