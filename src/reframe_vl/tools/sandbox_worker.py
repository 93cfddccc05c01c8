"""The interpreter in which a policy's code runs; ``sandbox`` starts, bounds and ends it.

It is run as a file, with the standard library alone, and takes its settings as JSON from the
command line. A message, in both directions, is a header (``HEADER``: two lengths), a JSON object
and raw bytes. It says ``{"ready"}``; then it serves ``{"do": "media"}``, without a reply, and
``{"do": "run"}``, which it answers by any number of requests for frames of the video and then one
result: ``{"text", "failed", "images": [[width, height], ...]}`` and the images as raw 8-bit RGB.

User code shares this process, so it can get at everything here. That is allowed for: whoever reads
the messages takes them for plain data of an unknown source, and a forged one is no more than a lie
about what the code itself returned.
"""

from __future__ import annotations

import ast
import importlib.util
import io
import json
import linecache
import os
import random
import resource
import struct
import sys
import traceback
import types
import warnings
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

HEADER = struct.Struct("<II")
_BACKEND = "sandbox_backend"
_MAX_TRACEBACK_LINES = 6
_FRAMES_AT_ONCE = 8


class _Channel:
    """The way to the trainer; the usual descriptors no longer lead there."""

    def __init__(self) -> None:
        self._requests = os.fdopen(os.dup(0), "rb")
        self._replies = os.fdopen(os.dup(1), "wb")
        self._null = os.open(os.devnull, os.O_RDWR)
        os.dup2(self._null, 0)
        os.dup2(self._null, 1)

    def silence(self) -> None:
        """Lets go of stderr, which until now told of a failed start."""
        os.dup2(self._null, 2)

    def send(self, message: dict[str, Any], blob: bytes = b"") -> None:
        text = json.dumps(message).encode()
        self._replies.write(HEADER.pack(len(text), len(blob)) + text + blob)
        self._replies.flush()

    def receive(self) -> tuple[dict[str, Any], bytes]:
        header = self._requests.read(HEADER.size)
        if len(header) < HEADER.size:
            os._exit(0)
        text_bytes, blob_bytes = HEADER.unpack(header)
        message: dict[str, Any] = json.loads(self._requests.read(text_bytes))
        return message, self._requests.read(blob_bytes)


class _Output(io.TextIOBase):
    """Keeps the start and the end of what is written to it."""

    def __init__(self, max_chars: int) -> None:
        self._half = max(max_chars // 2, 1)
        self._head = self._tail = ""
        self._left_out = 0

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        room = self._half - len(self._head)
        self._head += text[:room]
        self._tail += text[room:]
        if len(self._tail) > 2 * self._half:
            self._cut()
        return len(text)

    def _cut(self) -> None:
        surplus = max(len(self._tail) - self._half, 0)
        self._left_out += surplus
        self._tail = self._tail[surplus:]

    def text(self) -> str:
        self._cut()
        gap = f"\n[... {self._left_out} characters left out ...]\n" if self._left_out else ""
        return self._head + gap + self._tail


class _Lazy(types.ModuleType):
    """Stands for a module that takes long to load, until something in it is used."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module(self.__name__), name)
        # pyplot reads a backend's names from its ``vars``.
        setattr(self, name, value)
        return value


class Video:
    """The video: ``len(video)``, ``video[i]``, ``video[a:b]``, ``video.at(seconds)``.

    Frames are PIL images and are fetched when they are asked for.

    Attributes:
        timestamps: The time of each frame in seconds.
        fps: Frames a second, on average.
        duration: In seconds.
        size: (width, height) of a frame of the original video.
    """

    def __init__(self, channel: _Channel, timestamps: list[float], size: list[int]) -> None:
        self._channel = channel
        self.timestamps = tuple(timestamps)
        self.size = tuple(size)
        span = timestamps[-1] - timestamps[0]
        self.fps = (len(timestamps) - 1) / span if span > 0 else 1.0
        self.duration = span + 1 / self.fps

    def __repr__(self) -> str:
        return (
            f"<video: {len(self)} frames, {self.fps:.3g} fps, {self.duration:.1f} s, "
            f"{self.size[0]}x{self.size[1]}>"
        )

    def __len__(self) -> int:
        return len(self.timestamps)

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self), _FRAMES_AT_ONCE):
            yield from self[start : start + _FRAMES_AT_ONCE]

    def __getitem__(self, index: Any) -> Any:
        numbers = range(len(self))
        if isinstance(index, slice):
            return self.frames(numbers[index])
        return self.frames([numbers[index]])[0]

    def frames(self, indices: Any) -> list[Any]:
        """Fetches several frames."""
        numbers = range(len(self))
        wanted = [numbers[int(index)] for index in indices]
        found: list[Any] = []
        for start in range(0, len(wanted), _FRAMES_AT_ONCE):
            found += self._fetch(wanted[start : start + _FRAMES_AT_ONCE])
        return found

    def at(self, seconds: float) -> Any:
        """The frame that is shown at a time."""
        return self[max(bisect_right(self.timestamps, seconds) - 1, 0)]

    def _fetch(self, wanted: list[int]) -> list[Any]:
        self._channel.send({"frames": wanted})
        reply, blob = self._channel.receive()
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return _images(reply["sizes"], blob)


class Interpreter:
    """Runs one call after the other in one namespace."""

    def __init__(self, channel: _Channel) -> None:
        self._channel = channel
        self._number = 0
        self._shown: list[Any] = []
        self._surplus = 0
        self._max_images = self._max_pixels = 0
        self.namespace: dict[str, Any] = {
            "__name__": "__main__",
            "__builtins__": __builtins__,
            "show": self.show,
        }

    def preload(self) -> None:
        """Loads what is there as a matter of course; matplotlib, which is slow, when it is used."""
        import numpy as np
        from PIL import Image

        # The same code gives the same result.
        random.seed(0)
        np.random.seed(0)
        self.namespace |= {"np": np, "numpy": np, "Image": Image}
        if importlib.util.find_spec("matplotlib"):
            backend = _Lazy("matplotlib.backends.backend_agg")
            vars(backend)["show"] = self.show_figures
            sys.modules[_BACKEND] = backend
            os.environ["MPLBACKEND"] = f"module://{_BACKEND}"
            self.namespace["plt"] = _Lazy("matplotlib.pyplot")

    def take_media(self, message: dict[str, Any], blob: bytes) -> None:
        """Puts the rollout's image or video into the namespace."""
        if "times_s" in message:
            video = Video(self._channel, message["times_s"], message["size"])
            self.namespace["video"] = video
            return
        for number, image in enumerate(_images(message["images"], blob)):
            self.namespace[f"image_{number}"] = image

    def run(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Runs a call's code and gathers what it printed and showed."""
        self._number += 1
        self._shown, self._surplus = [], 0
        self._max_images, self._max_pixels = request["max_images"], request["max_pixels"]
        output = _Output(request["max_chars"])
        sys.stdin = io.StringIO()
        sys.stdout = sys.stderr = output
        failed = False
        try:
            self._execute(request["code"], f"<call {self._number}>")
        # Whatever the code raises is its result: SystemExit does not end the interpreter.
        except BaseException as error:
            failed = True
            output.write(_report(error))
        if self._surplus:
            output.write(
                f"\n[{self._surplus} more images were left out: a call shows at most "
                f"{self._max_images}.]"
            )
        sizes = [image.size for image in self._shown]
        blob = b"".join(image.tobytes() for image in self._shown)
        self._shown = []
        text = output.text().encode(errors="replace").decode()
        return {"text": text, "failed": failed, "images": sizes}, blob

    def _execute(self, code: str, name: str) -> None:
        # For tracebacks, which quote lines of the code.
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), self.namespace)
        if isinstance(last, ast.Expr):
            self._echo(eval(compile(ast.Expression(last.value), name, "eval"), self.namespace))
        self.show_figures()

    def _echo(self, value: Any) -> None:
        """Shows the value of the last expression, as a notebook does."""
        if value is None:
            return
        if _is_image(value) or (_is_figure(value) and not _is_open(value)):
            self.show(value)
        elif not _is_figure(value):
            print(repr(value))

    def show(self, *values: Any) -> None:
        """Returns images (PIL images, arrays, figures, or lists of them) with the result."""
        for value in values:
            if isinstance(value, list | tuple):
                self.show(*value)
            elif len(self._shown) < self._max_images:
                self._shown.append(_reduced(_rgb(value), self._max_pixels))
            else:
                self._surplus += 1

    def show_figures(self, *_: Any, **__: Any) -> None:
        """Shows and closes all open figures; it is what ``plt.show`` does here."""
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is None:
            return
        for number in pyplot.get_fignums():
            self.show(pyplot.figure(number))
            pyplot.close(number)


def _images(sizes: list[list[int]], blob: bytes) -> list[Any]:
    from PIL import Image

    images, start = [], 0
    for width, height in sizes:
        end = start + 3 * width * height
        images.append(Image.frombytes("RGB", (width, height), blob[start:end]))
        start = end
    return images


def _is_image(value: Any) -> bool:
    from PIL import Image

    return isinstance(value, Image.Image)


def _is_figure(value: Any) -> bool:
    module = sys.modules.get("matplotlib.figure")
    return module is not None and isinstance(value, module.Figure)


def _is_open(figure: Any) -> bool:
    """Whether the figure is pyplot's, and so is shown at the end of the call."""
    return getattr(figure, "number", None) in sys.modules["matplotlib.pyplot"].get_fignums()


def _rgb(value: Any) -> Any:
    """Any kind of picture as a PIL image in 8-bit RGB."""
    import numpy as np
    from PIL import Image

    if _is_figure(value):
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        canvas = FigureCanvasAgg(value)
        canvas.draw()
        value = np.asarray(canvas.buffer_rgba())
    if isinstance(value, np.ndarray):
        if value.ndim == 3 and value.shape[2] == 1:
            value = value[:, :, 0]
        if value.dtype == bool or (value.dtype.kind == "f" and not (value > 1).any()):
            value = value * 255.0
        value = Image.fromarray(np.nan_to_num(value).clip(0, 255).astype(np.uint8))
    if not isinstance(value, Image.Image):
        raise TypeError(f"show() takes PIL images, arrays and figures, not {type(value).__name__}")
    if not value.width or not value.height:
        raise ValueError("the image to show has no pixels")
    if value.mode.startswith("I;16"):
        value = Image.fromarray((np.asarray(value) / 257).astype(np.uint8))
    if value.has_transparency_data:
        value = value.convert("RGBA")
        value = Image.alpha_composite(Image.new("RGBA", value.size, "white"), value)
    return value.convert("RGB")


def _reduced(image: Any, max_pixels: int) -> Any:
    scale = (max_pixels / (image.width * image.height)) ** 0.5
    if scale >= 1:
        return image
    width = min(max(int(image.width * scale), 1), max_pixels)
    return image.resize((width, max(min(int(image.height * scale), max_pixels // width), 1)))


def _report(error: BaseException) -> str:
    """The traceback, as far as it is the user's code, and what was raised."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename[:6] == "<call "]
    lines = traceback.format_list(frames[-_MAX_TRACEBACK_LINES:])
    head = "Traceback (most recent call last):\n" if lines else ""
    return head + "".join([*lines, *traceback.format_exception_only(error)])


def _limit(settings: dict[str, int]) -> None:
    """Sets the limits of this process for good: without privileges no code can raise them."""
    for name, value in settings.items():
        resource.setrlimit(getattr(resource, name), (value, value))


def main() -> None:
    """Serves requests until the input closes."""
    settings = json.loads(sys.argv[1])
    sys.argv = [""]
    sys.path += settings["packages"]
    channel = _Channel()
    interpreter = Interpreter(channel)
    interpreter.preload()
    warnings.simplefilter("ignore")
    _limit(settings["limits"])
    channel.send({"ready": True})
    channel.silence()
    while True:
        message, blob = channel.receive()
        if message["do"] == "media":
            interpreter.take_media(message, blob)
        else:
            channel.send(*interpreter.run(message))


if __name__ == "__main__":
    main()
