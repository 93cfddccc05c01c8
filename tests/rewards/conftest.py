from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from reframe_vl.types import (
    RGB,
    Answer,
    Box,
    CallRecord,
    CallStatus,
    ImageMedia,
    Modality,
    Rollout,
    RolloutKey,
    Sample,
    Sampling,
    Termination,
)


@dataclass(frozen=True)
class BlankImage(ImageMedia):
    size: tuple[int, int] = (640, 597)
    key: str = "blank"

    def look(self, box: Box | None, max_pixels: int) -> RGB:
        pixels: npt.NDArray[np.uint8] = np.zeros((4, 4, 3), dtype=np.uint8)
        return pixels


@pytest.fixture
def make_rollout() -> Callable[..., Rollout]:
    def make(*answers: str, **changes: Any) -> Rollout:
        return Rollout(
            **{
                "key": RolloutKey(0, 0, "s", 0),
                "contexts": [],
                "sampling": Sampling(),
                "termination": Termination.ANSWERED if answers else Termination.NO_ANSWER,
                "answers": list(answers),
                "num_turns": 1,
                **changes,
            }
        )

    return make


@pytest.fixture
def make_sample() -> Callable[..., Sample]:
    def make(**changes: Any) -> Sample:
        return Sample(
            **{
                "id": "s",
                "modality": Modality.IMAGE,
                "media": BlankImage(),
                "question": "What is it?",
                "answer": Answer("open", "red car"),
                **changes,
            }
        )

    return make


@pytest.fixture
def make_call() -> Callable[..., CallRecord]:
    def make(status: CallStatus = CallStatus.OK, **changes: Any) -> CallRecord:
        return CallRecord(
            **{"turn": 0, "name": "CropImage", "arguments": {}, "status": status, **changes}
        )

    return make
