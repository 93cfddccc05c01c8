"""CropImage: looks at a region of the original image."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from reframe_vl.tools.arguments import number_list, only_argument
from reframe_vl.tools.base import Reason, Refusal, Scene, ToolImage, ToolRequest, ToolResult
from reframe_vl.tools.coordinates import CoordinateFrame, from_pixels, to_pixels
from reframe_vl.types import Box, Evidence, Media, Modality, VideoMedia

logger = logging.getLogger(__name__)

_MEANING = {
    CoordinateFrame.GRID_1000: "whole numbers from 0 to 1000: thousandths of the image's width and "
    "height",
    CoordinateFrame.UNIT: "numbers from 0 to 1: fractions of the image's width and height",
    CoordinateFrame.PIXEL_FED: "whole pixels of the image as you see it",
}


def region(
    box: Box, size: tuple[int, int], *, min_side: float, reorder_reversed: bool = False
) -> Box | Refusal:
    """Decides what part of an image a box stands for, in pixels.

    A box that leaves the image in part is clipped. One that is reversed, empty, outside, or too
    small once clipped, is refused; so whatever comes back can be cropped.

    Args:
        box: ``(x0, y0, x1, y1)`` in pixels, half-open.
        size: (width, height) of the image.
        min_side: The shortest side that can be cropped.
        reorder_reversed: Put reversed corners in order instead of refusing.
    """
    x0, y0, x1, y1 = box
    if reorder_reversed:
        x0, x1, y0, y1 = min(x0, x1), max(x0, x1), min(y0, y1), max(y0, y1)
    if x0 > x1 or y0 > y1:
        return Refusal(Reason.REVERSED_BOX, "The box is reversed.")
    if x0 == x1 or y0 == y1:
        return Refusal(Reason.EMPTY_BOX, "The box has no area.")
    width, height = size
    # 0.0 stands first so that -0.0, which media may tell from it, becomes it.
    x0, y0, x1, y1 = max(0.0, x0), max(0.0, y0), min(x1, float(width)), min(y1, float(height))
    if x0 >= x1 or y0 >= y1:
        return Refusal(Reason.OUTSIDE_IMAGE, "The box lies wholly outside the image.")
    if min(x1 - x0, y1 - y0) < min_side:
        return Refusal(
            Reason.TOO_SMALL,
            f"The box covers {x1 - x0:.3g} x {y1 - y0:.3g} pixels of the original image; "
            f"both sides must be at least {min_side:g}.",
        )
    return x0, y0, x1, y1


class CropImage:
    """The spatial tool: one box in, that region of the original image out."""

    name = "CropImage"
    modality = Modality.IMAGE

    def __init__(self) -> None:
        """Makes the tool."""
        self._warned = False

    def schema(self, frame: CoordinateFrame) -> dict[str, Any]:
        """The function's JSON schema."""
        number = {"type": "integer" if frame.integral else "number"}
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": "Crops a region of the image and shows it in more detail.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "bbox_2d": {
                            "type": "array",
                            "description": f"The region as [x0, y0, x1, y1], {_MEANING[frame]}.",
                            "items": number,
                            "minItems": 4,
                            "maxItems": 4,
                        }
                    },
                    "required": ["bbox_2d"],
                },
            },
        }

    def check(self, arguments: Mapping[str, Any], scene: Scene) -> ToolRequest | Refusal:
        """Turns ``bbox_2d`` into a region of the original image."""
        value = only_argument(arguments, self.name, "bbox_2d")
        if isinstance(value, Refusal):
            return _with_form(value, scene)
        read = number_list(value, "bbox_2d", integral=scene.frame.integral)
        if isinstance(read, Refusal):
            return _with_form(read, scene)
        numbers, coercions = read
        if len(numbers) != 4:
            return _with_form(
                Refusal(Reason.WRONG_LENGTH, f"bbox_2d has {len(numbers)} numbers, not 4."), scene
            )
        self._warn_if_grid(numbers, scene)
        box = to_pixels(numbers, scene.frame, scene.size, scene.fed_size)
        clipped = region(
            box, scene.size, min_side=scene.min_side, reorder_reversed=scene.reorder_reversed
        )
        if isinstance(clipped, Refusal):
            return _with_form(clipped, scene)
        reordered = box[0] > box[2] or box[1] > box[3]
        return ToolRequest(self.name, boxes=(clipped,), coercions=coercions + reordered)

    def run(self, request: ToolRequest, media: Media, max_pixels: int) -> ToolResult:
        """Looks at the region in the original image."""
        if isinstance(media, VideoMedia):
            raise TypeError(f"{self.name} works on an image, but {media.key} is a video.")
        images = tuple(ToolImage(media.look(box, max_pixels)) for box in request.boxes)
        return ToolResult(images, boxes=request.boxes)

    def canonical(self, evidence: Evidence, scene: Scene) -> list[dict[str, Any]]:
        """The arguments that ask for each evidence box."""
        calls: list[dict[str, Any]] = []
        for box in evidence.boxes:
            call = {"bbox_2d": from_pixels(box, scene.frame, scene.size, scene.fed_size)}
            refused = self.check(call, scene)
            if isinstance(refused, Refusal):
                raise ValueError(
                    f"The evidence box {box} cannot be asked for in an image of {scene.size}: "
                    f"{refused.message} Correct the record, or change the limit."
                )
            calls.append(call)
        return calls

    def _warn_if_grid(self, numbers: Sequence[float], scene: Scene) -> None:
        """Warns once where a model seems to answer on the 0-1000 grid but is read in pixels."""
        if self._warned or scene.frame is not CoordinateFrame.PIXEL_FED:
            return
        if min(scene.fed_size) > 1000 and max(numbers) <= 1000:
            self._warned = True
            logger.warning(
                "A box with no number above 1000 was read as pixels of an image fed at %d x %d. "
                "If the model answers on a 0-1000 grid, set its coordinate frame to grid_1000.",
                *scene.fed_size,
            )


def _with_form(refusal: Refusal, scene: Scene) -> Refusal:
    """Adds what a valid box looks like."""
    right, bottom = scene.frame.extent(scene.fed_size)
    return Refusal(
        refusal.reason,
        f"{refusal.message} bbox_2d is [x0, y0, x1, y1] with 0 <= x0 < x1 <= {right} and "
        f"0 <= y0 < y1 <= {bottom}.",
    )
