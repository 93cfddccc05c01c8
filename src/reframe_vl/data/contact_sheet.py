"""A page to look at: records with their annotation and evidence drawn into their media.

One HTML file without links to others. Of an image, annotated boxes are drawn as they are (red) and
as expanded evidence (green). Of a video, a strip of its grid is shown; frames of the evidence have
a green frame, and annotated boxes are in the frame nearest to their time.
"""

from __future__ import annotations

import base64
import html
import io
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

from PIL import Image, ImageDraw

from reframe_vl.data.media import MediaError
from reframe_vl.data.records import Record
from reframe_vl.types import Box, Media, VideoMedia

_IMAGE_PIXELS, _FRAME_PIXELS = 480 * 360, 160 * 120
_STRIP_FRAMES, _STRIP_COLUMNS = 16, 4
_ANNOTATED, _EVIDENCE, _GROUND = (220, 30, 30), (0, 160, 60), (255, 255, 255)

_MARK = '<span class="e">green: evidence, expanded</span>'
"""By this a page is known."""

_HEAD_BYTES = 16384
"""The mark stands in so many, whatever the title."""

_PAGE = """<!doctype html>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 14px/1.4 sans-serif; margin: 1em; }}
main {{ display: flex; flex-wrap: wrap; gap: 1em; align-items: flex-start; }}
figure {{ margin: 0; border: 1px solid #ccc; padding: .5em; width: min-content; }}
figcaption {{ overflow-wrap: anywhere; min-width: 18em; }}
.a {{ color: #dc1e1e; }} .e {{ color: #00a03c; }} .s {{ color: #666; }}
</style>
<h1>{title}</h1>
<p><span class="a">red: annotated</span>, {mark}</p>
<main>
{figures}
</main>
"""


def write_contact_sheet(
    path: Path,
    title: str,
    records: Iterable[Record],
    open_media: Callable[[Record], Media],
) -> None:
    """Writes the page; records whose media cannot be read say so in place of a picture."""
    figures = "\n".join(_figure(record, open_media) for record in records)
    path.write_text(
        _PAGE.format(title=html.escape(title), mark=_MARK, figures=figures), encoding="utf-8"
    )


def is_contact_sheet(path: Path) -> bool:
    """Whether a file is a page of ``write_contact_sheet``."""
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return _MARK.encode() in stream.read(_HEAD_BYTES)


def drawn(record: Record, media: Media) -> Image.Image:
    """The picture of a record.

    Raises:
        MediaError: The media cannot be read.
    """
    return _strip(record, media) if isinstance(media, VideoMedia) else _marked(record, media)


class SpreadChoice:
    """Picks a few records of each source and modality, spread over all that pass by.

    Args:
        number: Of each.
    """

    def __init__(self, number: int) -> None:
        """Nothing has passed yet."""
        self._number = number
        self._kept: defaultdict[tuple[str, str], list[Record]] = defaultdict(list)
        self._passed: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._steps: defaultdict[tuple[str, str], int] = defaultdict(lambda: 1)

    def add(self, record: Record) -> None:
        """Looks at a record."""
        name = (record.source, record.modality.value)
        kept, step = self._kept[name], self._steps[name]
        if self._number and self._passed[name] % step == 0:
            kept.append(record)
            if len(kept) == 2 * self._number:
                # Every second one is let go, and from now on only half as many are picked.
                del kept[1::2]
                self._steps[name] = 2 * step
        self._passed[name] += 1

    def chosen(self) -> list[Record]:
        """Those that were picked, by source."""
        chosen = []
        for _, kept in sorted(self._kept.items()):
            count = min(len(kept), self._number)
            chosen += [kept[at * len(kept) // count] for at in range(count)]
        return chosen


def _figure(record: Record, open_media: Callable[[Record], Media]) -> str:
    try:
        picture = drawn(record, open_media(record))
        stream = io.BytesIO()
        picture.save(stream, "JPEG", quality=85)
        data = base64.b64encode(stream.getvalue()).decode()
        shown = f'<img alt="" src="data:image/jpeg;base64,{data}">'
    except MediaError as error:
        shown = f"<p>{html.escape(str(error))}</p>"
    return f"<figure>{shown}<figcaption>{_caption(record)}</figcaption></figure>"


def _caption(record: Record) -> str:
    lines = [f"<b>{html.escape(record.question)}</b>"]
    for number, option in enumerate(record.options):
        lines.append(html.escape(f"{chr(ord('A') + number)}. {option}"))
    lines.append(f"→ {html.escape(record.answer.value)}")
    facts = [record.applicability or "no evidence"]
    if record.coverage is not None:
        facts.append(f"coverage {record.coverage:.3f}")
    if record.segments:
        windows = ", ".join(f"{start:g}–{end:g} s" for start, end in record.segments)
        facts.append(windows)
    labels = sorted({box.label for box in record.boxes if box.label})
    facts += [", ".join(labels)] if labels else []
    lines.append(f'<span class="s">{html.escape("; ".join(facts))}</span>')
    lines.append(f'<span class="s">{html.escape(record.id)}</span>')
    return "<br>".join(lines)


def _marked(record: Record, media: Media) -> Image.Image:
    assert not isinstance(media, VideoMedia)
    picture = Image.fromarray(media.look(None, _IMAGE_PIXELS))
    for box in record.evidence.boxes if record.evidence else ():
        _outline(picture, box, media.size, _EVIDENCE)
    for labelled in record.boxes:
        _outline(picture, labelled.xyxy, media.size, _ANNOTATED)
    return picture


def _strip(record: Record, media: VideoMedia) -> Image.Image:
    times = media.timestamps_s
    evidence = (
        {f for segment in record.evidence.segments for f in segment} if record.evidence else set()
    )
    boxes: defaultdict[int, list[Box]] = defaultdict(list)
    for labelled in record.boxes:
        at = labelled.time_s or 0.0
        boxes[min(range(len(times)), key=lambda f: abs(times[f] - at))].append(labelled.xyxy)
    frames = _shown(len(times), evidence)
    pictures = [Image.fromarray(pixels) for pixels in media.look(frames, _FRAME_PIXELS)]
    width, height = pictures[0].width + 8, pictures[0].height + 8
    rows = -(-len(frames) // _STRIP_COLUMNS)
    sheet = Image.new(
        "RGB", (width * min(len(frames), _STRIP_COLUMNS), (height + 14) * rows), _GROUND
    )
    pen = ImageDraw.Draw(sheet)
    for at, (frame, picture) in enumerate(zip(frames, pictures, strict=True)):
        for box in boxes[frame]:
            _outline(picture, box, media.size, _ANNOTATED)
        x, y = at % _STRIP_COLUMNS * width, at // _STRIP_COLUMNS * (height + 14)
        if frame in evidence:
            pen.rectangle((x, y, x + width - 1, y + height - 1), fill=_EVIDENCE)
        sheet.paste(picture, (x + 4, y + 4))
        pen.text((x + 4, y + height), f"{frame}: {times[frame]:.1f} s", fill=(80, 80, 80))
    return sheet


def _shown(count: int, evidence: set[int]) -> list[int]:
    """Frames of a grid to show: those of the evidence, as far as there is room, and others."""
    if count <= _STRIP_FRAMES:
        return list(range(count))
    evidence_first = sorted(range(count), key=lambda frame: frame not in evidence)
    chosen = set(evidence_first[: min(len(evidence), _STRIP_FRAMES // 2)])
    others = [frame for frame in range(count) if frame not in chosen]
    left = _STRIP_FRAMES - len(chosen)
    chosen.update(others[round(k * (len(others) - 1) / (left - 1))] for k in range(left))
    return sorted(chosen)


def _outline(
    picture: Image.Image, box: Box, size: tuple[int, int], colour: tuple[int, int, int]
) -> None:
    """Draws around a box: outside of it, as far as there is room, so that what it holds is seen."""
    x_scale, y_scale = picture.width / size[0], picture.height / size[1]
    x0, y0, x1, y1 = box[0] * x_scale, box[1] * y_scale, box[2] * x_scale, box[3] * y_scale
    pen = ImageDraw.Draw(picture)
    for grow in range(2):
        corners = (
            max(0, x0 - 1 - grow),
            max(0, y0 - 1 - grow),
            min(picture.width - 1, x1 + grow),
            min(picture.height - 1, y1 + grow),
        )
        pen.rectangle(corners, outline=colour)
