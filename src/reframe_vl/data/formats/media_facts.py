"""What was read of media files, kept on disk: a build that was stopped does not read them again."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from reframe_vl.data.media import file_version
from reframe_vl.data.record_parts import MediaInfo
from reframe_vl.data.video import GridRule
from reframe_vl.types import Modality


class MediaFacts:
    """A file of JSON lines, one a media file that was read; a file that has changed is read anew.

    Args:
        path: Is made when something is first kept.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, str] = {}
        if path.is_file():
            for line in path.read_bytes().splitlines():
                try:
                    entry = json.loads(line)
                    self._known[entry["key"]] = json.dumps(entry["info"])
                except (ValueError, KeyError, TypeError):
                    continue  # The last line of a run that was killed.

    def get(self, file: Path, modality: Modality, rule: GridRule) -> MediaInfo | None:
        """What is known of a file."""
        text = self._known.get(_key(file, modality, rule))
        try:
            return None if text is None else MediaInfo.model_validate_json(text)
        except ValidationError:
            return None

    def put(self, file: Path, modality: Modality, rule: GridRule, info: MediaInfo) -> None:
        """Keeps what was read of a file."""
        key = _key(file, modality, rule)
        self._known[key] = info.model_dump_json()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # A line that was cut off must not swallow the next.
        line = json.dumps({"key": key, "info": json.loads(self._known[key])})
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(f"\n{line}\n")


def _key(file: Path, modality: Modality, rule: GridRule) -> str:
    grid: dict[str, Any] = asdict(rule) if modality is Modality.VIDEO else {}
    return json.dumps([str(file), file_version(file), grid], sort_keys=True)
