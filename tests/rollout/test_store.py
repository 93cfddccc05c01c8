import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reframe_vl.data.media import ImageFile, MediaError
from reframe_vl.data.report import RecordError
from reframe_vl.mini.world import MiniWorld
from reframe_vl.rollout.store import RolloutStore, read_rollouts
from reframe_vl.types import (
    RGB,
    Answer,
    Applicability,
    CallRecord,
    CallStatus,
    Context,
    Evidence,
    ImageMedia,
    Modality,
    Provenance,
    Rollout,
    RolloutGroup,
    RolloutKey,
    Sample,
    Sampling,
    Span,
    Termination,
    VideoMedia,
    View,
)

# The run-time checker of annotations draws which items of a list it looks at, in strategies too.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")


@dataclass(frozen=True)
class Clip(VideoMedia):
    times: tuple[float, ...]

    @property
    def key(self) -> str:
        return f"clip-{self.times}"

    @property
    def size(self) -> tuple[int, int]:
        return (64, 48)

    @property
    def timestamps_s(self) -> tuple[float, ...]:
        return self.times

    def look(self, frames: Sequence[int], max_pixels: int) -> list[RGB]:
        raise AssertionError("a record never looks at the media")


def decode(token_ids: Sequence[int]) -> str:
    return " ".join(map(str, token_ids))


def same(a: object, b: object) -> bool:
    """Equality of every field, where NaN equals NaN and pixels count."""
    if isinstance(a, ImageMedia | VideoMedia):
        assert isinstance(b, ImageMedia | VideoMedia)
        times = [m.timestamps_s if isinstance(m, VideoMedia) else None for m in (a, b)]
        return (a.key, a.size) == (b.key, b.size) and same(*times)
    if type(a) is not type(b):
        return False
    if is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


# --------------------------------------------------------------------------- strategies

numbers = st.floats()
finite = st.floats(-10, 1e4)
texts = st.text(max_size=8) | st.sampled_from(["nan", "\ud800", "\u2028\n\r</script>", '"\\'])
ids = st.lists(st.integers(0, 12), max_size=8).map(tuple)
boxes = st.tuples(finite, finite, finite, finite)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


@st.composite
def views(draw):
    height, width = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    pixels = np.frombuffer(draw(st.binary(min_size=48, max_size=48)), np.uint8)
    pixels = pixels[: height * width * 3].reshape(height, width, 3).copy()
    tokens = draw(st.integers(1, 99))
    if draw(st.booleans()):
        frames = np.concatenate([pixels] * draw(st.integers(1, 3)))
        grid = (len(frames) // height, height, width)
        return View.of(frames, grid, tokens, Modality.VIDEO, draw(finite))
    return View.of(pixels, (1, height, width), tokens)


@st.composite
def spans(draw):
    token_ids = draw(ids)
    logprobs = draw(st.none() | st.tuples(*[st.none() | numbers for _ in token_ids]).map(tuple))
    teacher = draw(st.none() | st.tuples(*[st.none() | numbers for _ in token_ids]).map(tuple))
    shown = tuple(draw(st.lists(views(), max_size=2)))
    carried = draw(st.booleans())
    return Span(draw(st.sampled_from(Provenance)), token_ids, logprobs, shown, carried, teacher)


@st.composite
def samples(draw):
    video = draw(st.booleans())
    return Sample(
        id=draw(texts),
        modality=Modality.VIDEO if video else Modality.IMAGE,
        media=Clip(tuple(draw(st.lists(finite, max_size=3))))
        if video
        else MiniWorld().sample("train", draw(st.integers(0, 3))).media,
        question=draw(texts),
        answer=Answer(
            draw(st.sampled_from(["mcq", "open", "number", "span", "expression"])),
            draw(texts),
            tuple(draw(st.lists(texts, max_size=2))),
            draw(finite),
        ),
        options=tuple(draw(st.lists(texts, max_size=2))),
        evidence=draw(
            st.none()
            | st.builds(
                Evidence,
                st.lists(boxes, max_size=2).map(tuple),
                st.lists(ids, max_size=2).map(tuple),
            )
        ),
        applicability=draw(st.none() | st.sampled_from(Applicability)),
        domain=draw(texts),
        source=draw(texts),
        split=draw(texts),
    )


calls = st.builds(
    CallRecord,
    turn=st.integers(0, 5),
    name=texts,
    arguments=st.dictionaries(texts, json_values, max_size=3),
    status=st.sampled_from(CallStatus),
    boxes=st.lists(boxes, max_size=2).map(tuple),
    frames=ids,
    reason=texts,
    coercions=st.integers(0, 3),
    by_gate=st.booleans(),
)
rollouts = st.builds(
    Rollout,
    key=st.builds(RolloutKey, st.integers(0, 2**70), st.integers(0, 99), texts, st.integers(0, 9)),
    contexts=st.lists(st.builds(Context, st.lists(spans(), max_size=3)), max_size=2),
    sampling=st.builds(Sampling, finite, st.integers(1, 99), ids, ids),
    termination=st.sampled_from(Termination),
    drop_assigned=st.booleans(),
    calls=st.lists(calls, max_size=2),
    answers=st.lists(texts, max_size=2),
    num_turns=st.integers(0, 9),
    policy_version=st.integers(0, 9),
    rewards=st.dictionaries(texts, st.none() | numbers, max_size=3),
    reward=st.none() | numbers,
    advantage=st.none() | numbers,
    error=texts,
)
groups = st.lists(
    st.builds(RolloutGroup, samples(), st.lists(rollouts, min_size=1, max_size=2)), max_size=2
)


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def group(index: int = 0) -> RolloutGroup:
    sample = MiniWorld().sample("train", index)
    pixels = np.random.default_rng(index).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    prompt = Span(Provenance.PROMPT, (1, 2, 3), views=(View.of(pixels, (1, 2, 3), 6),))
    sampled = Span(Provenance.SAMPLED, (7, 8), logprobs=(-0.5, None))
    rollout = Rollout(
        RolloutKey(0, 3, sample.id, 0),
        [Context([prompt, sampled])],
        Sampling(banned_ids=(4, 5, 6, 9)),
        Termination.ANSWERED,
        calls=[CallRecord(0, "CropImage", {"bbox_2d": [0, 1, 2, 3]}, CallStatus.OK)],
    )
    return RolloutGroup(sample, [rollout, replace(rollout, key=replace(rollout.key, index=1))])


# --------------------------------------------------------------------------- what is kept


@settings(max_examples=25)
@given(groups)
def test_everything_but_the_media_survives_the_round_trip(written):
    with TemporaryDirectory() as folder:
        store = RolloutStore(Path(folder))
        path = store.write(12, written, decode)
        assert path.name == "step_000012.jsonl"
        read = store.read(12)
        assert same(read, written)
        for line in path.read_text("ascii").splitlines():
            json.loads(line, parse_constant=no_constant)
        # What was read back is worth as much as what was written.
        assert store.write(13, read, decode).read_bytes() == path.read_bytes()


@settings(max_examples=10)
@given(groups)
def test_the_same_rollouts_give_the_same_bytes_in_any_folder(written):
    with TemporaryDirectory() as one, TemporaryDirectory() as other:
        for folder in (one, other):
            RolloutStore(Path(folder)).write(0, written, decode)
        files = [
            {p.relative_to(f): p.read_bytes() for p in Path(f).rglob("*") if p.is_file()}
            for f in (one, other)
        ]
        assert files[0] == files[1]


def test_without_images_all_but_the_pixels_is_read(tmp_path):
    written = [group()]
    store = RolloutStore(tmp_path)
    store.write(0, written, decode)
    (read,) = store.read(0, images=False)
    assert read.rollouts == written[0].rollouts
    assert all(v.pixels is None for r in read.rollouts for c in r.contexts for v in c.views)


def test_two_groups_of_one_sample_stay_two(tmp_path):
    store = RolloutStore(tmp_path)
    store.write(0, [group(), group()], decode)
    assert [len(g.rollouts) for g in store.read(0)] == [2, 2]


def test_spans_carry_their_text_for_people(tmp_path):
    path = RolloutStore(tmp_path).write(0, [group()], decode)
    line = json.loads(path.read_text().splitlines()[0])
    assert [span["text"] for span in line["contexts"][0]] == ["1 2 3", "7 8"]
    assert line["sampling"]["banned_ids"] == [[4, 6], 9]


def test_the_media_of_a_read_sample_are_known_but_not_at_hand(tmp_path):
    clip = Sample("v", Modality.VIDEO, Clip((0.0, 0.5)), "When?", Answer("number", "1"))
    store = RolloutStore(tmp_path)
    store.write(0, [group(), replace(group(), sample=clip)], decode)
    image, video = (g.sample.media for g in store.read(0))
    assert isinstance(image, ImageMedia) and not isinstance(image, VideoMedia)
    assert isinstance(video, VideoMedia) and video.timestamps_s == (0.0, 0.5)
    with pytest.raises(MediaError, match=f"{image.key}.*take the sample"):
        image.look(None, 100)
    with pytest.raises(MediaError, match="take the sample"):
        video.look([0], 100)


def test_a_sample_whose_media_cannot_be_read_is_recorded_all_the_same(tmp_path):
    broken = group()
    broken.sample = replace(broken.sample, media=ImageFile(tmp_path / "missing.png"))
    store = RolloutStore(tmp_path / "rollouts")
    path = store.write(0, [broken], decode)
    (read,) = store.read(0)
    assert (read.sample.media.key, read.sample.media.size) == ("", (0, 0))
    assert str(tmp_path) not in path.read_text()


# --------------------------------------------------------------------------- the folder


def test_an_image_is_written_once(tmp_path):
    store = RolloutStore(tmp_path)
    store.write(0, [group()], decode)
    (image,) = (tmp_path / "images").rglob("*.png")
    assert image.parent.name == image.name[:2]
    os.utime(image, (0, 0))
    store.write(1, [group()], decode)
    assert image.stat().st_mtime == 0


def test_cut_removes_a_step_and_all_later_ones(tmp_path):
    store = RolloutStore(tmp_path / "rollouts")
    assert store.steps() == []
    store.cut(0)
    for step in (0, 2, 10, 1_000_000):
        store.write(step, [group(step)], decode)
    assert store.steps() == [0, 2, 10, 1_000_000]
    store.cut(3)
    assert store.steps() == [0, 2]
    assert len(list((tmp_path / "rollouts" / "images").rglob("*.png"))) == 4
    with pytest.raises(FileNotFoundError, match=r"step 10, but 2 steps from 0 to 2"):
        store.read(10)


def test_a_write_that_fails_leaves_the_earlier_file_and_nothing_else(tmp_path, monkeypatch):
    store = RolloutStore(tmp_path)
    path = store.write(0, [group()], decode)
    before, files = path.read_bytes(), sorted(tmp_path.rglob("*"))

    def full_disk(self: Path, content: bytes) -> int:
        self.touch()
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with pytest.raises(OSError, match="No space"):
        store.write(0, [group(), group()], decode)
    assert path.read_bytes() == before
    assert sorted(tmp_path.rglob("*")) == files


# --------------------------------------------------------------------------- damage


def damaged(path: Path, old: str, new: str) -> None:
    lines = path.read_text().splitlines(keepends=True)
    assert old in lines[1]
    path.write_text(lines[0] + lines[1].replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('"num_turns":0,', "", "the field num_turns is missing"),
        ('"num_turns":0', '"num_turns":true', "the field num_turns is True, but must be"),
        ('"reward":null', '"reward":NaN', "NaN is not JSON"),
        ('"reward":null', '"reward":"high"', "the field reward is 'high', but must be a number"),
        ('"status":"ok"', '"status":"fine"', r"calls\[0\].status is 'fine', but must be one of ok"),
        ('"arguments":{', '"arguments":[{', "not a line of strict JSON"),
        ("[7,8]", "[7,8.5]", r"the field contexts\[0\]\[1\].token_ids is"),
        ("[-0.5,null]", '[-0.5,"x"]', r"the field contexts\[0\]\[1\].logprobs\[1\] is 'x'"),
        ('"hash":"', '"hash":"../', r"contexts\[0\]\[0\].views\[0\].hash .* hexadecimal"),
        ('"grid_thw":[1,', '"grid_thw":[', r"grid_thw is \[2, 3\], but must be a list of 3"),
        ('"views":[{"hash"', '"views":[{"name"', r"views\[0\].hash is missing"),
        ('"patch_seconds":0.0', '"patch_seconds":null', "patch_seconds is None, but must be"),
        ('"kind":"number"', '"kind":"poem"', "the field sample is"),
        ("}\n", "", "not a line of strict JSON"),
    ],
)
def test_a_damaged_line_is_named_with_file_line_field_and_remedy(tmp_path, old, new, complaint):
    path = RolloutStore(tmp_path).write(0, [group()], decode)
    damaged(path, old, new)
    place = r"step_000000\.jsonl, line 2: "
    with pytest.raises(RecordError, match=f"{place}.*{complaint}.*Restore the file"):
        read_rollouts(path)


def test_a_missing_and_a_wrong_image_are_named_and_not_needed_without_images(tmp_path):
    path = RolloutStore(tmp_path).write(0, [group()], decode)
    RolloutStore(tmp_path / "other").write(0, [group(1)], decode)
    (image,) = (tmp_path / "images").rglob("*.png")
    (other,) = (tmp_path / "other" / "images").rglob("*.png")
    image.write_bytes(other.read_bytes())
    with pytest.raises(RecordError, match=f"{image.name} cannot be read .*its pixels"):
        read_rollouts(path)
    # The second is a PNG whose head is too short.
    for damaged in (b"no image", b"\x89PNG\r\n\x1a\n\0\0\0\x0cIHDR" + bytes(40)):
        image.write_bytes(damaged)
        with pytest.raises(RecordError, match=f"{image.name} cannot be read"):
            read_rollouts(path)
    image.unlink()
    with pytest.raises(RecordError, match=f"{image.name} is missing. Copy the folder"):
        read_rollouts(path)
    assert len(read_rollouts(path, images=False)) == 1
    path.write_bytes(path.read_bytes() + b"[" * 100_000 + b"\n")
    with pytest.raises(RecordError, match=r"line \d: not a line"):
        read_rollouts(path, images=False)
