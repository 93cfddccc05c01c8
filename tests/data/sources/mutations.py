"""Seeded damage to annotation files: of their values, and of their bytes."""

import codecs
import copy
import gzip
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ODD = (
    *(None, True, False, 0, -1, 0.5, -0.0, 5e-324, 1e308, -1e308, 10**30, 10**400, 2**31, 2**63),
    *(math.nan, math.inf, -math.inf, "NaN", "Infinity", "-7", "1e5", "0x10", "1_000", " 12 ", "½"),
    *("", " ", "x", "a\0b", "\u202e\U0001f600e\u0301", "\ud800", "\u2028", "a" * 5000),
    *("../../etc/passwd", "C:\\a", [], [1], [1, 2, 3, 4], [4, 3, 2, 1], [[5, 2]], {}, {"a": [1]}),
)
TOKENS = (b"NaN", b"-1", b"1e999", b'"', b"{", b"}", b"[", b"]", b",", b"<", b"&#0;", b"\\ud800")


def damaged(path: Path, rng: random.Random) -> bytes:
    """The bytes of a file with something wrong in them."""
    if path.suffix in (".json", ".jsonl") and rng.random() < 0.7:
        return _written(_with_odd_values(_few(_loaded(path), rng), rng), path)
    return _with_odd_bytes(path.read_bytes(), rng)


def _loaded(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    return json.loads(text)


def _few(rows: Any, rng: random.Random) -> Any:
    """Most of the damage would be in rows that nobody looks at."""
    return rng.sample(rows, min(len(rows), 6)) if isinstance(rows, list) else rows


def _written(value: Any, path: Path) -> bytes:
    by_line = path.suffix == ".jsonl" and isinstance(value, list)
    return ("\n".join(map(json.dumps, value)) if by_line else json.dumps(value)).encode()


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _places(item, (*path, key))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _with_odd_values(value: Any, rng: random.Random) -> Any:
    for _ in range(rng.choice((1, 1, 2, 5))):
        places = list(_places(value))
        if not places:
            break
        *way, key = rng.choice(places)
        parent = _at(value, tuple(way))
        old = parent[key]
        match rng.randrange(7):
            case 0:
                del parent[key]
            case 1 if isinstance(parent, list):
                parent.insert(key, copy.deepcopy(old))
            case 1:
                parent[rng.choice(("id", "extra", "ä", ""))] = parent.pop(key)
            case 2:
                parent[key] = copy.deepcopy(_at(value, rng.choice(places)))
            case 3:
                parent[key] = [old] if isinstance(old, str) else str(old)
            case 4 if isinstance(old, int | float) and abs(old) < 1e300:
                parent[key] = rng.choice((-old, old * 1000, old / 1000, old + 0.5, float(old)))
            case _:
                parent[key] = copy.deepcopy(rng.choice(ODD))
    return value


def _with_odd_bytes(content: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(content))
    end = start + rng.choice((1, 2, 10, 200))
    match rng.randrange(9):
        case 0 | 1:
            flipped = bytearray(content)
            for _ in range(rng.choice((1, 3, 20))):
                flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
            return bytes(flipped)
        case 2:
            return content[:start] + content[end:]
        case 3:
            return content[:start] + rng.randbytes(rng.choice((1, 2, 50))) + content[start:]
        case 4:
            return content[:start]
        case 5:
            return rng.choice((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, b"\0")) + content
        case 6:
            encoding = rng.choice(("utf-16", "utf-16-le", "utf-32", "latin-1"))
            text = content.decode().encode(encoding, errors="replace")
            return rng.choice((text, gzip.compress(content)))
        case 7:
            return content.replace(b"\n", rng.choice((b"\r\n", b"\r", b"\n\n", b"\0\n")))
        case _:
            return content[:start] + rng.choice(TOKENS) + content[end:]
