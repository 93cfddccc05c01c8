"""Small files that others may read at any time."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is whole or as it was before, whatever ends the process.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp()) / "results.json"
    >>> write_whole(place, "{}")
    >>> place.read_text(), [file.name for file in place.parent.iterdir()]
    ('{}', ['results.json'])
    """
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
