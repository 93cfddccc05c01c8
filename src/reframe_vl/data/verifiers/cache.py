"""Answers kept on disk: what was answered once is not asked again."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import asdict, replace
from pathlib import Path

from reframe_vl.data.verifiers.base import Reply


class AnswerCache:
    """A file of answers by the hash of verifier and query.

    Each answer is written at once, so that a run that is killed loses none. Failures are not kept.
    """

    def __init__(self, path: Path) -> None:
        """Opens or makes the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        # One thread at a time uses it, but not always the one that closes it.
        self._database = sqlite3.connect(
            path, isolation_level=None, timeout=60, check_same_thread=False
        )
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=NORMAL")
        self._database.execute(
            "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, reply TEXT) WITHOUT ROWID"
        )

    def get(self, key: str) -> Reply | None:
        """The kept answer; it costs nothing again."""
        found = self._database.execute("SELECT reply FROM answers WHERE key = ?", (key,)).fetchone()
        return None if found is None else replace(Reply(**json.loads(found[0])), tries=0, cost=0.0)

    def put(self, key: str, reply: Reply) -> None:
        """Keeps an answer."""
        assert reply.text is not None
        text = json.dumps(asdict(reply))
        self._database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, text))

    def close(self) -> None:
        """Closes the file."""
        self._database.close()
