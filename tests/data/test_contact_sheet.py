import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from clips import make_clip
from data.record_rows import row
from reframe_vl.data.contact_sheet import SpreadChoice, drawn, write_contact_sheet
from reframe_vl.data.media import ImageFile
from reframe_vl.data.records import Record
from reframe_vl.data.stages.base import open_file
from reframe_vl.data.video import GridRule
from reframe_vl.data.video_records import video_record

RED, GREEN = (220, 30, 30), (0, 160, 60)


def record(name="one", **changes):
    return Record.model_validate_json(json.dumps(row(name, **changes)))


def where(pixels, colour):
    """The smallest region that holds all pixels of a colour: x0, y0, x1, y1."""
    ys, xs = np.nonzero((pixels == colour).all(-1))
    return xs.min(), ys.min(), xs.max() + 1, ys.max() + 1


def test_annotation_and_evidence_are_drawn_around_what_they_hold(tmp_path):
    white = np.full((80, 100, 3), 255, np.uint8)
    white[20:40, 10:30] = 0
    Image.fromarray(white).save(tmp_path / "a.png")
    picture = np.array(drawn(record(), ImageFile(tmp_path / "a.png")))
    assert picture.shape == white.shape
    assert where(picture, RED) == (8, 18, 32, 42)
    assert where(picture, GREEN) == (3, 13, 37, 47)
    # What is in the box stays to be seen, and every pixel of it is the black square's.
    assert (picture[20:40, 10:30] == 0).all() and (picture == 0).all(-1).sum() == 400


def test_boxes_of_large_images_are_drawn_in_the_pictures_scale(tmp_path):
    pixels = np.full((1600, 2000, 3), 255, np.uint8)
    pixels[400:800, 200:600] = 0
    Image.fromarray(pixels).save(tmp_path / "a.png")
    changes = {"media": {"path": "a.png", "width": 2000, "height": 1600}}
    boxes = {"boxes": [{"xyxy": [200, 400, 600, 800]}], "evidence": None}
    picture = np.array(drawn(record(**changes, **boxes), ImageFile(tmp_path / "a.png")))
    x0, y0, x1, y1 = where(picture, RED)
    scale = picture.shape[1] / 2000
    assert np.allclose([x0, y0, x1, y1], np.array([200, 400, 600, 800]) * scale, atol=3)


def test_frames_of_the_evidence_have_a_frame(tmp_path):
    make_clip(tmp_path / "a.mp4", n=60)
    clip = video_record(
        tmp_path / "a.mp4",
        [(0.5, 1.0)],
        GridRule(4, 8),
        id="v",
        source="s",
        split="train",
        licence="MIT",
        raw={},
        question="When?",
        answer={"kind": "open", "value": "now"},
    )
    picture = np.array(drawn(clip, open_file(clip)))
    framed = len(clip.evidence.segments[0])
    width = open_file(clip).size[0] + 8
    assert 0 < framed < len(clip.media.timestamps_s)
    green = (picture == GREEN).all(-1).sum()
    assert green >= framed * width


class Balanced(HTMLParser):
    def __init__(self):
        super().__init__()
        self.figures = self.images = 0

    def handle_starttag(self, tag, attrs):
        self.figures += tag == "figure"
        self.images += tag == "img" and dict(attrs)["src"].startswith("data:image/jpeg;base64,")


def test_the_page_is_whole_and_shows_text_as_text(tmp_path):
    Image.new("RGB", (100, 80)).save(tmp_path / "a.png")
    records = [
        record(
            "one",
            question="Is <b>this</b> é 漢?",
            options=["<i>", "&"],
            answer={"kind": "mcq", "value": "A"},
        ),
        record("gone", media={"path": "gone.png", "width": 100, "height": 80}),
    ]
    write_contact_sheet(tmp_path / "s.html", "x<y", records, lambda r: open_file(r, tmp_path))
    page = (tmp_path / "s.html").read_text(encoding="utf-8")
    parser = Balanced()
    parser.feed(page)
    assert (parser.figures, parser.images) == (2, 1)
    assert "Is &lt;b&gt;this&lt;/b&gt; é 漢?" in page and "gone.png: there is no such file" in page
    assert not re.search(r'(src|href)="(?!data:)', page)


@pytest.mark.parametrize("total", [0, 1, 3, 4, 5, 100, 1001])
def test_a_few_of_each_source_are_picked_all_along(total):
    choice = SpreadChoice(4)
    for number in range(total):
        choice.add(record(f"{number:04}", source="ab"[number % 2]))
    picked = {name: [int(r.id) for r in choice.chosen() if r.source == name] for name in "ab"}
    for name, parity in (("a", 0), ("b", 1)):
        mine = range(parity, total, 2)
        assert len(picked[name]) == min(4, len(mine)) and set(picked[name]) <= set(mine)
        if len(mine) >= 50:
            assert max(picked[name]) > total / 2 and min(picked[name]) < total / 4
    assert not SpreadChoice(0).chosen()


def test_nothing_is_picked_where_nothing_is_asked_for():
    choice = SpreadChoice(0)
    choice.add(record())
    assert choice.chosen() == []
