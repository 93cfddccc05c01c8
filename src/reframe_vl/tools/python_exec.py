"""python: runs the policy's own code on the original image or video (docs/method.md, 1.4)."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from reframe_vl.tools.arguments import only_argument
from reframe_vl.tools.base import (
    Reason,
    Refusal,
    Scene,
    StatefulTool,
    ToolImage,
    ToolRequest,
    ToolResult,
    kind,
)
from reframe_vl.tools.coordinates import CoordinateFrame
from reframe_vl.tools.sandbox import Execution, Interpreter, InterpreterLostError
from reframe_vl.tools.sandbox_pool import SandboxPool
from reframe_vl.tools.sandbox_process import Limits, SandboxError, Wall
from reframe_vl.types import RGB, Evidence, ImageMedia, Media, Modality

_MAX_CODE_CHARS = 20_000
_FRESH = "(This is a fresh interpreter: the variables of earlier calls are gone.)\n"

_MEDIA = {
    Modality.IMAGE: "image_0 is the original image (a PIL image).",
    Modality.VIDEO: (
        "video is the original video: len(video), video.fps, video.duration, video[i] and "
        "video[a:b:step] (frames as PIL images, the first is 0), video.at(seconds)."
    ),
}
_DESCRIPTION = (
    "Runs Python code and returns what it prints, the value of its last line, and the images that "
    "it shows with show(image) or plt.show(). Variables are kept from call to call. {media} np, "
    "Image (PIL) and plt are imported. There is no network, and no processes or threads."
)


@dataclass(frozen=True, slots=True)
class PythonRequest(ToolRequest):
    """Code to run.

    Attributes:
        once: What makes the same code, run again, another request: variables may have changed.
    """

    code: str = ""
    once: object = field(default_factory=object, compare=False, repr=False)

    @property
    def identity(self) -> object:
        """Equal to that of no other request."""
        return self.once


class PythonSession:
    """The interpreter of one rollout, started when the first code comes."""

    def __init__(self, pool: SandboxPool, media: Media) -> None:
        """Starts nothing."""
        self._pool = pool
        self._media = media
        self._interpreter: Interpreter | None = None
        self._fetched = 0
        self._lost = self._over = False

    def run(self, code: str, max_pixels: int) -> Execution:
        """Runs code where the code before it left off; after a loss, in a fresh interpreter.

        Raises:
            SandboxError: No interpreter can be started, or the session is over.
            MediaError: The media cannot be read.
        """
        note = _FRESH if self._lost else ""
        self._fetched = 0
        finished = False
        try:
            # Its own name for it: close() may take it away at any time.
            interpreter = self._interpreter
            if interpreter is None:
                self._interpreter = interpreter = self._pool.take()
                if self._over:
                    # While this thread waited; nobody else would end the interpreter.
                    raise SandboxError("The rollout ended before its code could run.")
                self._give_media(interpreter)
            execution = interpreter.run(code, max_pixels, self._fetch)
            finished, self._lost = True, False
        except InterpreterLostError as error:
            text = f"{note}The code {error}. Its variables are lost."
            return Execution(text, failed=True)
        finally:
            # Also after a failure of ours, which may leave half a message in the pipe.
            if not finished:
                self._lost = True
                self._end()
        return Execution(note + execution.text, execution.images, execution.failed)

    def close(self) -> None:
        """Ends the session, also while a call runs in another thread."""
        self._over = True
        self._end()

    def _end(self) -> None:
        interpreter, self._interpreter = self._interpreter, None
        if interpreter is not None:
            self._pool.end(interpreter)

    def _give_media(self, interpreter: Interpreter) -> None:
        limits = self._pool.limits
        if isinstance(self._media, ImageMedia):
            pixels = self._media.look(None, self._at_most(limits.image_pixels))
            interpreter.give({"images": _sizes([pixels])}, pixels.tobytes())
        else:
            times_s = [float(time) for time in self._media.timestamps_s]
            interpreter.give({"times_s": times_s, "size": list(self._media.size)})

    def _at_most(self, max_pixels: int) -> int:
        """Media that are drawn as they are looked at would be enlarged to any budget."""
        width, height = self._media.size
        return min(max_pixels, width * height)

    def _fetch(self, wanted: Any) -> tuple[dict[str, Any], bytes]:
        """Frames of the video for the code, which may ask for anything."""
        if isinstance(self._media, ImageMedia):
            return {"error": "There is no video."}, b""
        last = len(self._media.timestamps_s) - 1
        limits = self._pool.limits
        too_many = f"A call may look at {limits.max_frames} frames at most."
        # Before each is looked at: the code may ask for ever, and its clock stands still meanwhile.
        if isinstance(wanted, list) and len(wanted) > limits.max_frames:
            return {"error": too_many}, b""
        if not isinstance(wanted, list) or not all(
            type(index) is int and 0 <= index <= last for index in wanted
        ):
            return {"error": f"Frames are whole numbers from 0 to {last}."}, b""
        self._fetched += len(wanted)
        if self._fetched > limits.max_frames:
            return {"error": too_many}, b""
        # Media need not take an index twice.
        distinct = sorted(set(wanted))
        budget = self._at_most(limits.frame_pixels)
        looked = self._media.look(distinct, budget) if distinct else []
        frames = dict(zip(distinct, looked, strict=True))
        found = [frames[index] for index in wanted]
        return {"sizes": _sizes(found)}, b"".join(frame.tobytes() for frame in found)


class PythonTool(StatefulTool):
    """The tool ``python``: code in, its output and images out.

    A rollout's calls share an interpreter inside :meth:`session`; without one, each call has its
    own.
    """

    name = "python"

    def __init__(
        self,
        modality: Modality | str,
        sandbox: Wall = "bubblewrap",
        warm: int = 2,
        limits: Limits | None = None,
    ) -> None:
        """Starts nothing.

        Args:
            modality: ``image`` or ``video``.
            sandbox: ``unsafe`` is for code that is trusted, outside of Slurm jobs.
            warm: Interpreters kept ready.
            limits: Of an interpreter.

        Raises:
            SandboxError: There is no such sandbox here; the message says what to do.
        """
        self.modality = Modality(modality)
        self._pool = SandboxPool(warm, limits, sandbox)
        self._session: PythonSession | None = None

    def schema(self, frame: CoordinateFrame) -> dict[str, Any]:
        """The function's JSON schema; code is the same in every coordinate frame."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": _DESCRIPTION.format(media=_MEDIA[self.modality]),
                "parameters": {
                    "type": "object",
                    "properties": {
                        "code": {"type": "string", "description": "The Python code to run."}
                    },
                    "required": ["code"],
                },
            },
        }

    def check(self, arguments: Mapping[str, Any], scene: Scene) -> ToolRequest | Refusal:
        """Takes ``code`` as it is, less the fence of a Markdown block."""
        code = only_argument(arguments, self.name, "code")
        if isinstance(code, Refusal):
            return code
        if not isinstance(code, str):
            return Refusal(Reason.WRONG_TYPE, f"code must be text, not {kind(code)}.")
        bare = _without_fence(code)
        if not bare.strip():
            return Refusal(Reason.EMPTY_CALL, "code is empty.")
        if len(bare) > _MAX_CODE_CHARS:
            return Refusal(
                Reason.WRONG_LENGTH,
                f"code has {len(bare)} characters: write at most {_MAX_CODE_CHARS} a call.",
            )
        return PythonRequest(self.name, code=bare, coercions=int(bare != code))

    def run(self, request: ToolRequest, media: Media, max_pixels: int) -> ToolResult:
        """Runs the code in the session's interpreter, or in one of its own."""
        if not isinstance(request, PythonRequest):
            raise TypeError(f"{self.name} runs its own requests, not {request}.")
        if self._session is None:
            with self.session(media) as tool:
                return tool.run(request, media, max_pixels)
        execution = self._session.run(request.code, max_pixels)
        images = tuple(ToolImage(pixels) for pixels in execution.images)
        text = execution.text.strip() or ("" if images else "(The code printed nothing.)")
        return ToolResult(images, text=text, failed=execution.failed)

    @contextmanager
    def session(self, media: Media) -> Iterator[PythonTool]:
        """The tool for one rollout on these media, whose calls share an interpreter."""
        tool = copy.copy(self)
        tool._session = PythonSession(self._pool, media)
        try:
            yield tool
        finally:
            tool._session.close()

    def close(self) -> None:
        """Ends all interpreters."""
        self._pool.close()

    def canonical(self, evidence: Evidence, scene: Scene) -> list[dict[str, Any]]:
        """Code that shows each evidence item."""
        boxes = [{"code": f"image_0.crop({box})"} for box in evidence.boxes]
        segments = [{"code": f"show(video.frames({list(s)}))"} for s in evidence.segments]
        return boxes + segments


def _sizes(images: list[RGB]) -> list[list[int]]:
    """(width, height) of each image."""
    return [[image.shape[1], image.shape[0]] for image in images]


def _without_fence(code: str) -> str:
    """The inside of a Markdown code block, where the code is one."""
    lines = code.strip().splitlines()
    if len(lines) > 1 and lines[0].startswith("```") and lines[-1].strip() == "```":
        return "\n".join(lines[1:-1])
    return code
