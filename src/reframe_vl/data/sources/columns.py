"""Any table of questions with boxes or windows: a file says which column holds what.

Rows are Parquet, JSON lines or a JSON array. ``columns.yaml``, given beside them, names the column
of each thing that a record needs (``Columns``); without one, columns have the names of the record's
fields. Use it for a published copy of the finished set, or for tables of your own.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, TypeAlias

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, PositiveFloat
from pydantic import ValidationError as FieldsError

from reframe_vl.data.formats.boxes import from_corner_and_size
from reframe_vl.data.formats.choices import choose, number_of_letter, number_of_text
from reframe_vl.data.formats.media_folder import media_name
from reframe_vl.data.formats.media_search import VIDEO_SUFFIXES
from reframe_vl.data.formats.rows import Number, Refused, Row, RowFields, Text, kept, split_of
from reframe_vl.data.formats.table_files import table_rows
from reframe_vl.data.formats.windows import Window, segments_of
from reframe_vl.data.record_parts import PositiveWhole
from reframe_vl.data.records import AnswerInfo, LabelledBox, MediaInfo, Record, describe
from reframe_vl.data.report import Problem
from reframe_vl.data.sources.base import Source
from reframe_vl.data.text_files import text_encoding
from reframe_vl.types import Box, Modality

_MAPPING_SUFFIXES = (".yaml", ".yml")


class Columns(BaseModel):
    """Which column holds what; ``a.b`` is the field ``b`` of column ``a``.

    Attributes:
        media: The file name; a list has one.
        modality: Without the column it is told by the file's suffix.
        options: Without letters in front.
        source: Of the row, where the table is made of several sets.
        box_form: ``corners`` are x0, y0, x1, y1; ``corner_and_size`` x0, y0, width, height.
        box_unit: ``pixels`` of the upright image, ``shares`` of its sides, or ``thousandths``.
        second: Units of a segment's numbers in a second: 1, or 1000 for milliseconds.
        answer_form: Of multiple choice: the option's letter, its text, or its number from 0.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    id: str = "id"
    modality: str = "modality"
    media: str = "media"
    width: str = "width"
    height: str = "height"
    duration: str = "duration"
    question: str = "question"
    options: str = "options"
    answer: str = "answer"
    aliases: str = "aliases"
    boxes: str = "boxes"
    segments: str = "segments"
    source: str = "source"
    split: str = "split"
    licence: str = "licence"
    box_form: Literal["corners", "corner_and_size"] = "corners"
    box_unit: Literal["pixels", "shares", "thousandths"] = "pixels"
    second: PositiveFloat = 1.0
    answer_form: Literal["letter", "text", "number"] = "letter"


_FORMS = frozenset(("box_form", "box_unit", "second", "answer_form"))


def _parsed(value: Any) -> Any:
    """Lists are often kept as JSON text."""
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _one(value: Any) -> Any:
    """A media column may be a list, or a structure with a path."""
    value = _parsed(value)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value.get("path") if isinstance(value, dict) else value


def _several(value: Any) -> Any:
    """One box or window may stand without a list around it."""
    value = _parsed(value)
    return [value] if isinstance(value, list) and value and not _is_nested(value) else value


def _is_nested(value: list[Any]) -> bool:
    return isinstance(value[0], list | tuple)


_Corners: TypeAlias = tuple[Number, Number, Number, Number]


class _Fields(RowFields):
    media: Annotated[str, BeforeValidator(_one)]
    question: str
    answer: Text
    options: Annotated[tuple[Text, ...], BeforeValidator(_parsed)] = ()
    aliases: Annotated[tuple[Text, ...], BeforeValidator(_parsed)] = ()
    boxes: Annotated[tuple[_Corners, ...], BeforeValidator(_several)] = ()
    segments: Annotated[tuple[Window, ...], BeforeValidator(_several)] = ()
    modality: Modality | None = None
    width: PositiveWhole | None = None
    height: PositiveWhole | None = None
    duration: PositiveFloat | None = None
    source: Text | None = None
    split: Text | None = None
    licence: Text | None = None


class ColumnsTable(Source):
    """Tables, and the file that says what is in them."""

    licence = "As of the table; unverified."
    encoding = "boxes: box_unit and box_form of columns.yaml; segments: [start, end]"
    suffixes = (".parquet", ".json", ".jsonl", *_MAPPING_SUFFIXES)

    def rows(self) -> Iterator[Row | Problem]:
        """One row a row; what the mapping is wrong about comes first."""
        files = list(self.files())
        self._columns = Columns()
        # A file may be given twice.
        named = dict.fromkeys(files)
        mappings = [path for path in named if path.suffix.lower() in _MAPPING_SUFFIXES]
        if len(mappings) > 1:
            message = (
                f"{mappings[0].name} maps the columns already, and one mapping counts for all "
                "tables. Build each table with its own mapping, by itself."
            )
            yield Problem(str(mappings[1]), "bad_columns", message)
            return
        for path in mappings:
            read = _mapping(path)
            if isinstance(read, Problem):
                yield read
                return
            self._columns = read
        for path in files:
            if path.suffix.lower() not in _MAPPING_SUFFIXES:
                yield from table_rows(path)

    def native_id(self, raw: dict[str, Any]) -> Hashable:
        """What the mapping names as the id."""
        name = _value(raw, self._columns.id)
        return None if name is None else str(name)

    def record(self, row: Row) -> Record:
        """One record a row."""
        columns = self._columns
        names = columns.model_dump(exclude={"id", *_FORMS})
        found = {field: _value(row.raw, column) for field, column in names.items()}
        fields = _Fields.model_validate({k: v for k, v in found.items() if v is not None})
        modality = fields.modality or _modality_of(fields.media)
        is_video = modality is Modality.VIDEO
        size = self._size(fields, modality)
        media = MediaInfo(
            path=media_name(fields.media),
            width=size and size[0],
            height=size and size[1],
            duration_s=fields.duration if is_video else None,
        )
        answer, options, notes = _answer(fields, columns)
        if is_video and fields.boxes:
            notes.append(kept("box_without_time", "boxes of a video without a time are left out"))
        if not is_video and fields.segments:
            notes.append(kept("segment_of_image", "windows of an image are left out"))
        windows = [[edge / columns.second for edge in window] for window in fields.segments]
        segments, odd = segments_of(windows if is_video else [], media.duration_s)
        record = self.draft(
            row,
            modality=modality,
            media=media,
            split=fields.split or split_of(row.path),
            question=fields.question,
            answer=answer,
            options=options,
            boxes=[] if is_video else [LabelledBox(xyxy=b) for b in _boxes(fields, columns, size)],
            segments=segments,
            notes=[*notes, *odd],
            encoding=f"boxes: {columns.box_unit}, {columns.box_form}; segments: {columns.second:g} "
            "units a second",
        )
        stated = {"source": fields.source, "licence": fields.licence}
        return record.model_copy(update={k: v for k, v in stated.items() if v})

    def _size(self, fields: _Fields, modality: Modality) -> tuple[int, int] | None:
        if fields.width and fields.height:
            return (fields.width, fields.height)
        if self.media is not None and modality is Modality.IMAGE and fields.media.strip():
            return self.media.image_size(fields.media)
        return None


def _mapping(path: Path) -> Columns | Problem:
    try:
        given = yaml.safe_load(path.read_text(encoding=text_encoding(path)))
        return Columns.model_validate({} if given is None else given)
    except FieldsError as error:
        message = describe(error)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        message = " ".join(str(error).split())
    fields = ", ".join(Columns.model_fields)
    return Problem(str(path), "bad_columns", f"{message}. It maps {fields} to columns. Mend it.")


def _value(raw: dict[str, Any], column: str) -> Any:
    value: Any = raw
    for name in [column] if column in raw else column.split("."):
        if not isinstance(value, dict) or name not in value:
            return None
        value = value[name]
    return value


def _modality_of(name: str) -> Modality:
    suffix = PurePosixPath(name).suffix.lower()
    return Modality.VIDEO if suffix in VIDEO_SUFFIXES else Modality.IMAGE


def _answer(fields: _Fields, columns: Columns) -> tuple[AnswerInfo, tuple[str, ...], list[Any]]:
    if not fields.options:
        aliases = tuple(alias.strip() for alias in fields.aliases if alias.strip())
        value = fields.answer.strip() or " "
        return AnswerInfo(kind="open", value=value, aliases=aliases), (), []
    match columns.answer_form:
        case "letter":
            number = number_of_letter(fields.answer.strip().strip("().:"))
        case "text":
            number = number_of_text(fields.answer, fields.options)
        case _:
            number = int(fields.answer) if fields.answer.strip().isdecimal() else -1
    choice = choose(fields.options, number)
    return choice.answer, choice.options, list(choice.notes)


def _boxes(fields: _Fields, columns: Columns, size: tuple[int, int] | None) -> Sequence[Box]:
    boxes: list[Box] = list(fields.boxes)
    if columns.box_form == "corner_and_size":
        boxes = [from_corner_and_size(*box) for box in boxes]
    if columns.box_unit == "pixels" or not boxes:
        return boxes
    if size is None:
        raise Refused(
            "size_unknown",
            "its boxes are in shares of an image whose size is not known. Give the columns of "
            "width and height, or the folder of the images.",
        )
    whole = 1 if columns.box_unit == "shares" else 1000
    width, height = size[0] / whole, size[1] / whole
    return [(x0 * width, y0 * height, x1 * width, y1 * height) for x0, y0, x1, y1 in boxes]
