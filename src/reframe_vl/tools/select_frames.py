"""SelectFrames: looks at frames of the original video."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reframe_vl.tools.arguments import number_list, only_argument
from reframe_vl.tools.base import Reason, Refusal, Scene, ToolImage, ToolRequest, ToolResult
from reframe_vl.tools.coordinates import CoordinateFrame
from reframe_vl.types import Evidence, Media, Modality, VideoMedia


def frame_range(scene: Scene) -> str:
    """Says which frames can be asked for; for refusals and for the prompt."""
    return (
        f"The video has {scene.num_frames} frame{'s' * (scene.num_frames != 1)}, numbered from 0 "
        f"to {scene.num_frames - 1}; select at most {scene.max_frames} at once."
    )


class SelectFrames:
    """The temporal tool: frame indices in, those frames of the original video out."""

    name = "SelectFrames"
    modality = Modality.VIDEO

    def schema(self, frame: CoordinateFrame) -> dict[str, Any]:
        """The function's JSON schema; frames are counted alike in every coordinate frame."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": "Selects frames of the video and shows them in more detail.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "frames": {
                            "type": "array",
                            "description": "Indices of the frames; the first frame is 0.",
                            "items": {"type": "integer", "minimum": 0},
                            "minItems": 1,
                        }
                    },
                    "required": ["frames"],
                },
            },
        }

    def check(self, arguments: Mapping[str, Any], scene: Scene) -> ToolRequest | Refusal:
        """Turns ``frames`` into ascending indices of the video's grid."""
        value = only_argument(arguments, self.name, "frames")
        if isinstance(value, Refusal):
            return _with_range(value, scene)
        read = number_list(value, "frames", integral=True, allow_single=True)
        if isinstance(read, Refusal):
            return _with_range(read, scene)
        numbers, coercions = read
        frames = sorted({int(number) for number in numbers})
        if not frames:
            return _with_range(Refusal(Reason.NO_FRAMES, "frames is empty."), scene)
        outside = [index for index in frames if not 0 <= index < scene.num_frames]
        if outside:
            return _with_range(
                Refusal(Reason.OUT_OF_RANGE_FRAME, f"There is no frame {outside[0]}."), scene
            )
        if len(frames) > scene.max_frames:
            return _with_range(
                Refusal(Reason.TOO_MANY_FRAMES, f"{len(frames)} frames are too many."), scene
            )
        return ToolRequest(self.name, frames=tuple(frames), coercions=coercions)

    def run(self, request: ToolRequest, media: Media, max_pixels: int) -> ToolResult:
        """Looks at the frames in the original video; each is captioned with its time."""
        if not isinstance(media, VideoMedia):
            raise TypeError(f"{self.name} works on a video, but {media.key} is an image.")
        images = media.look(request.frames, max_pixels)
        times = [media.timestamps_s[index] for index in request.frames]
        return ToolResult(
            tuple(
                ToolImage(pixels, f"<{time:.1f} seconds>")
                for pixels, time in zip(images, times, strict=True)
            ),
            frames=request.frames,
        )

    def canonical(self, evidence: Evidence, scene: Scene) -> list[dict[str, Any]]:
        """The arguments that ask for each evidence segment."""
        calls: list[dict[str, Any]] = []
        for segment in evidence.segments:
            call = {"frames": list(segment)}
            refused = self.check(call, scene)
            if isinstance(refused, Refusal):
                raise ValueError(
                    f"The evidence segment {segment} cannot be asked for: {refused.message} "
                    "Correct the record, or change the limit."
                )
            calls.append(call)
        return calls


def _with_range(refusal: Refusal, scene: Scene) -> Refusal:
    """Adds which frames are valid."""
    return Refusal(refusal.reason, f"{refusal.message} {frame_range(scene)}")
