"""Answers kept on disk: what was answered once is not asked again."""

from __future__ import annotations

import json
import logging
import sqlite3
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from reframe_vl.data.report import RecordError
from reframe_vl.data.verifiers.base import Reply

logger = logging.getLogger(__name__)


class AnswerCache:
    """A file of answers by the hash of verifier and query.

    Each answer is written at once, so that a run that is killed loses none. Failures are not kept.
    """

    def __init__(self, path: Path) -> None:
        """Opens or makes the file.

        Raises:
            RecordError: It is damaged, or another kind of file.
        """
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        # One thread at a time uses it, but not always the one that closes it.
        self._database = sqlite3.connect(
            path, isolation_level=None, timeout=60, check_same_thread=False
        )
        self._do("PRAGMA journal_mode=WAL")
        self._do("PRAGMA synchronous=NORMAL")
        self._do(
            "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, reply TEXT) WITHOUT ROWID"
        )

    def get(self, key: str) -> Reply | None:
        """The kept answer; it costs nothing again.

        Raises:
            RecordError: The file is damaged.
        """
        found = self._do("SELECT reply FROM answers WHERE key = ?", key)
        try:
            return None if found is None else replace(Reply(**json.loads(found)), tries=0, cost=0.0)
        except (TypeError, ValueError):
            logger.warning("%s: an answer cannot be read: it is asked for again.", self._path)
            return None

    def put(self, key: str, reply: Reply) -> None:
        """Keeps an answer.

        Raises:
            RecordError: The file is damaged.
        """
        assert reply.text is not None
        self._do("INSERT OR REPLACE INTO answers VALUES (?, ?)", key, json.dumps(asdict(reply)))

    def _do(self, command: str, *values: str) -> Any:
        """The first thing that a command finds; None where it finds nothing."""
        try:
            found = self._database.execute(command, values).fetchone()
        except sqlite3.DatabaseError as error:
            raise RecordError(
                f"{self._path} cannot be used ({error}). If it is damaged, remove it: what was "
                "asked is then asked again."
            ) from error
        return found and found[0]

    def close(self) -> None:
        """Closes the file."""
        self._database.close()
