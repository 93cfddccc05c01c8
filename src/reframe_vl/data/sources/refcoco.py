"""RefCOCO, RefCOCO+ and RefCOCOg: expressions for one region of a COCO image.

Two forms are read. JSON lines of one expression each have ``img_path``, ``expression``, ``bbox``
(two corners), ``width``, ``height``, ``split``. The published form is ``refs(….p``, a pickle, with
``instances.json`` beside it, whose ``bbox`` is [x, y, width, height].

A question is made by template: in which of nine parts of the image the region lies.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

from reframe_vl.data.formats.boxes import from_corner_and_size
from reframe_vl.data.formats.coco_files import ENCODING, is_id, read_coco
from reframe_vl.data.formats.json_files import json_rows
from reframe_vl.data.formats.media_folder import media_name
from reframe_vl.data.formats.regions import where_answer, where_question
from reframe_vl.data.formats.rows import Number, Refused, Row, RowFields, Text
from reframe_vl.data.record_parts import PositiveWhole
from reframe_vl.data.records import LabelledBox, MediaInfo, Record
from reframe_vl.data.report import Problem
from reframe_vl.data.sources.base import Source
from reframe_vl.types import Box, Modality

_PICKLE_SUFFIXES = (".p", ".pkl", ".pickle")
_BROKEN_PICKLE = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What reading a damaged pickle may raise."""


class _Line(RowFields):
    img_path: str
    expression: Text
    bbox: tuple[Number, Number, Number, Number]
    width: PositiveWhole
    height: PositiveWhole
    split: str


class _Sentence(RowFields):
    sent: Text


class _Ref(RowFields):
    split: str


class _Annotation(RowFields):
    bbox: tuple[Number, Number, Number, Number]


class _Image(RowFields):
    file_name: str
    width: PositiveWhole
    height: PositiveWhole


class _Pickled(RowFields):
    sentence: _Sentence
    ref: _Ref
    annotation: _Annotation
    image: _Image
    category: str | None


class _DataOnly(pickle.Unpickler):
    """Builds lists, dictionaries, texts and numbers; nothing that a pickle can run."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuses every class and function."""
        raise pickle.UnpicklingError(
            f"It wants to use {module}.{name}, and annotations need no code"
        )


class RefCoco(Source):
    """Both forms; of the published one, give the folder or both files."""

    licence = "Annotations: RefCOCO, Apache-2.0 (unverified). Images: COCO, CC BY 4.0 (unverified)."
    encoding = "bbox: [x0, y0, x1, y1], absolute pixels of the stored image"
    suffixes = (".jsonl", ".json", *_PICKLE_SUFFIXES)

    def rows(self) -> Iterator[Row | Problem]:
        """One row an expression."""
        files = list(self.files())
        pickles = [path for path in files if path.suffix in _PICKLE_SUFFIXES]
        instances = [path for path in files if path.name == "instances.json"]
        for path in files:
            if path not in pickles and path not in instances:
                yield from json_rows(path)
        if not pickles:
            return
        if not instances:
            yield Problem(
                str(pickles[0]),
                "no_instances",
                "its boxes are in instances.json. Give that file too, or the folder of both.",
            )
            return
        yield from _pickled_rows(pickles, instances)

    def native_id(self, raw: dict[str, Any]) -> Hashable:
        """The number of the sentence, within its data set."""
        sentence = raw.get("sentence", raw)
        name = sentence.get("sent_id")
        return None if name is None else (str(raw.get("dataset_name")), str(name))

    def record(self, row: Row) -> Record:
        """One record an expression."""
        box: Box
        if "ref" in row.raw:
            pickled = _Pickled.model_validate(row.raw)
            box = from_corner_and_size(*pickled.annotation.bbox)
            label, encoding, split = pickled.category, ENCODING, pickled.ref.split
            path, size = pickled.image.file_name, (pickled.image.width, pickled.image.height)
            expression = pickled.sentence.sent
        else:
            line = _Line.model_validate(row.raw)
            box, label, encoding, split = line.bbox, None, self.encoding, line.split
            path, size, expression = line.img_path, (line.width, line.height), line.expression
        choice = where_answer(box, size)
        return self.draft(
            row,
            modality=Modality.IMAGE,
            media=MediaInfo(path=media_name(path), width=size[0], height=size[1]),
            split=split,
            question=where_question(expression),
            options=choice.options,
            answer=choice.answer,
            boxes=[LabelledBox(xyxy=box, label=label)],
            encoding=encoding,
        )


def _pickled_rows(pickles: list[Path], instances: list[Path]) -> Iterator[Row | Problem]:
    images: dict[Any, dict[str, Any]] = {}
    annotations: dict[Any, dict[str, Any]] = {}
    names: dict[Any, Any] = {}
    for path in instances:
        file = read_coco(path)
        yield from file.problems
        images |= file.images
        annotations |= {
            entry["id"]: entry for _, entry in file.annotations if is_id(entry.get("id"))
        }
        names |= {name: category.get("name") for name, category in file.categories.items()}
    for path in pickles:
        try:
            refs = _unpickled(path)
        except Refused as refused:
            yield refused.at(str(path))
            continue
        for number, ref in enumerate(refs, 1):
            try:
                sentences = _checked_sentences(ref)
                annotation = _known(annotations, ref.get("ann_id"), "annotation")
                image = _known(images, ref.get("image_id"), "image")
            except Refused as refused:
                yield refused.at(f"{path}, ref {number}")
                continue
            category = annotation.get("category_id")
            for index, sentence in enumerate(sentences, 1):
                raw = {
                    "ref": ref,
                    "sentence": sentence,
                    "annotation": annotation,
                    "image": image,
                    "category": names.get(category) if is_id(category) else None,
                }
                yield Row(path, f"ref {number}, sentence {index}", raw)


def _unpickled(path: Path) -> list[Any]:
    with path.open("rb") as stream:
        try:
            # Python 2 wrote these files; their texts are ASCII.
            found = _DataOnly(stream, encoding="utf-8").load()
        except _BROKEN_PICKLE as error:
            raise Refused(
                "bad_pickle", f"it cannot be read: {error}. Fetch the file again."
            ) from error
    if not isinstance(found, list):
        raise Refused("bad_pickle", "it holds no list of refs. Give refs(….p of RefCOCO.")
    return found


def _checked_sentences(ref: Any) -> list[dict[str, Any]]:
    try:
        same = json.loads(json.dumps(ref)) == ref
    except (TypeError, ValueError, RecursionError):
        same = False
    sentences = ref.get("sentences") if same and isinstance(ref, dict) else None
    if not isinstance(sentences, list) or not all(isinstance(s, dict) for s in sentences):
        raise Refused("bad_row", "it is no ref with a list of sentences. Mend or remove it.")
    if not sentences:
        raise Refused("empty_question", "it has no sentence. Leave it out.")
    return sentences


def _known(entries: dict[Any, dict[str, Any]], name: Any, what: str) -> dict[str, Any]:
    if not is_id(name) or name not in entries:
        raise Refused("unknown_id", f"instances.json has no {what} {name!r}. Give its own one.")
    return entries[name]
