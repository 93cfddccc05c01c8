"""The Python tool for the mini experiments: the sandbox's interpreter, on code that is harmless.

A sandbox takes about a second of a core to start, and an experiment plays hundreds of thousands of
rollouts. What policies of this size write are variants of one line. So a call's code is compared
with a short list of what it may consist of, and what passes runs here, by the same code that runs
it in the sandbox; anything else fails. ``tests/benchmarks/test_mini_python.py`` holds the two
together.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from PIL import Image

from reframe_vl.tools.base import ToolImage, ToolRequest, ToolResult
from reframe_vl.tools.python_exec import PythonRequest, PythonTool
from reframe_vl.tools.sandbox_worker import Interpreter, Video, _Channel
from reframe_vl.types import RGB, ImageMedia, Media, Modality, VideoMedia

_NODES = (
    ast.Module,
    ast.Expr,
    ast.Call,
    ast.Name,
    ast.Load,
    ast.Store,
    ast.Constant,
    ast.Tuple,
    ast.List,
    ast.ListComp,
    ast.comprehension,
    ast.BinOp,
    ast.Mult,
    ast.UnaryOp,
    ast.USub,
    ast.Subscript,
    ast.Slice,
    ast.Attribute,
)
_METHODS = frozenset(("crop", "frames", "at"))
_LARGEST = 1000
"""Of a number, so that no crop takes more than some megabytes."""
_MAX_IMAGES, _MAX_CHARS = 4, 4000


class MiniPython(PythonTool):
    """The tool ``python`` without a sandbox, for code on a short list."""

    def __init__(self, modality: Modality | str) -> None:
        """Starts nothing: there is nothing to start."""
        self.modality = Modality(modality)

    @contextmanager
    def session(self, media: Media) -> Iterator[MiniPython]:
        """The tool itself: harmless code keeps no variables."""
        yield self

    def close(self) -> None:
        """Does nothing."""

    def run(self, request: ToolRequest, media: Media, max_pixels: int) -> ToolResult:
        """Runs code that is on the list; other code fails."""
        assert isinstance(request, PythonRequest)
        wanted = {
            "code": request.code,
            "max_images": _MAX_IMAGES,
            "max_pixels": max_pixels,
            "max_chars": _MAX_CHARS,
        }
        if problem := harm(request.code):
            return ToolResult((), text=problem, failed=True)
        interpreter = _interpreter(media)
        streams = sys.stdin, sys.stdout, sys.stderr
        try:
            result, blob = interpreter.run(wanted)
        finally:
            sys.stdin, sys.stdout, sys.stderr = streams
        images, start = [], 0
        for width, height in result["images"]:
            end = start + 3 * width * height
            images.append(ToolImage(_pixels(width, height, blob[start:end])))
            start = end
        text = result["text"].strip() or ("" if images else "(The code printed nothing.)")
        return ToolResult(tuple(images), text=text, failed=result["failed"])


def harm(code: str) -> str:
    """What stands in code that is not on the list; empty for harmless code, and for no code."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # The interpreter says what is wrong, and runs nothing.
        return ""
    for node in ast.walk(tree):
        if not isinstance(node, _NODES):
            return f"{type(node).__name__} is not available here."
        if isinstance(node, ast.Constant) and not _is_small(node.value):
            return f"{node.value!r} is not available here."
        if isinstance(node, ast.Attribute) and node.attr not in _METHODS:
            return f".{node.attr} is not available here."
        if isinstance(node, ast.Name) and node.id.startswith("_"):
            return f"{node.id} is not available here."
        if isinstance(node, ast.BinOp) and not any(map(_is_share, (node.left, node.right))):
            return "A product needs a factor of at most 1 here."
        if isinstance(node, ast.ListComp) and len(node.generators) > 1:
            return "A list takes one loop here."
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id != "show"
        ):
            return f"{node.func.id}() is not available here."
    return ""


def _is_small(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _LARGEST


def _is_share(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and _is_small(node.value) and abs(node.value) <= 1


class _Direct(_Channel):
    """Gives the interpreter the frames it asks for; there is nobody at the other end."""

    def __init__(self, media: Media) -> None:
        self._media = media
        self._wanted: list[int] = []

    def send(self, message: dict[str, Any], blob: bytes = b"") -> None:
        self._wanted = message["frames"]

    def receive(self) -> tuple[dict[str, Any], bytes]:
        assert isinstance(self._media, VideoMedia)
        width, height = self._media.size
        frames = self._media.look(self._wanted, width * height) if self._wanted else []
        sizes = [[frame.shape[1], frame.shape[0]] for frame in frames]
        return {"sizes": sizes}, b"".join(frame.tobytes() for frame in frames)


def _interpreter(media: Media) -> Interpreter:
    channel = _Direct(media)
    interpreter = Interpreter(channel)
    width, height = media.size
    if isinstance(media, ImageMedia):
        whole = Image.fromarray(media.look(None, width * height))
        interpreter.namespace["image_0"] = whole
    else:
        times = [float(time) for time in media.timestamps_s]
        interpreter.namespace["video"] = Video(channel, times, [width, height])
    # Nothing but what is on the list, whatever it is called.
    interpreter.namespace["__builtins__"] = {}
    return interpreter


def _pixels(width: int, height: int, blob: bytes) -> RGB:
    return np.frombuffer(blob, np.uint8).reshape(height, width, 3)
