"""R_obs of docs/method.md, 1.1: whether the policy looked at the evidence."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
from jaxtyping import Float
from scipy.optimize import linear_sum_assignment

from reframe_vl.types import CallStatus, Modality, Rollout, Sample


def pairwise_iou(
    asked_N4: Float[np.ndarray, "N 4"], evidence_E4: Float[np.ndarray, "E 4"]
) -> Float[np.ndarray, "N E"]:
    """IoU of every asked box with every evidence box, ``(x0, y0, x1, y1)``.

    A degenerate box (no area, reversed, not finite) has IoU 0 with everything, never NaN.

    >>> boxes = np.array([[0.0, 0.0, 2.0, 2.0], [1.0, 0.0, 3.0, 2.0], [1.0, 1.0, 1.0, 1.0]])
    >>> pairwise_iou(boxes, boxes[:2]).round(2).tolist()
    [[1.0, 0.33], [0.33, 1.0], [0.0, 0.0]]
    """
    a_4N1 = np.asarray(asked_N4, dtype=np.float64).T[:, :, None]
    b_41E = np.asarray(evidence_E4, dtype=np.float64).T[:, None, :]
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        width_NE = np.minimum(a_4N1[2], b_41E[2]) - np.maximum(a_4N1[0], b_41E[0])
        height_NE = np.minimum(a_4N1[3], b_41E[3]) - np.maximum(a_4N1[1], b_41E[1])
        overlap_NE = np.maximum(width_NE, 0.0) * np.maximum(height_NE, 0.0)
        area_N1, area_1E = _area(a_4N1), _area(b_41E)
        union_NE = area_N1 + area_1E - overlap_NE
    valid_NE = (area_N1 > 0) & (area_1E > 0) & np.isfinite(union_NE) & (overlap_NE > 0)
    return np.divide(overlap_NE, union_NE, out=np.zeros_like(union_NE), where=valid_NE)


def _area(boxes: Float[np.ndarray, "4 *any"]) -> Float[np.ndarray, "*any"]:
    width, height = boxes[2] - boxes[0], boxes[3] - boxes[1]
    return np.where((width > 0) & (height > 0), width * height, 0.0)


def _iou(asked: Sequence[float], evidence: Sequence[float]) -> float:
    """``pairwise_iou`` of one pair."""
    (ax0, ay0, ax1, ay1), (bx0, by0, bx1, by1) = asked, evidence
    width, height = min(ax1, bx1) - max(ax0, bx0), min(ay1, by1) - max(ay0, by0)
    if not (width > 0 and height > 0 and ax1 > ax0 and ay1 > ay0 and bx1 > bx0 and by1 > by0):
        return 0.0
    overlap = width * height
    union = (ax1 - ax0) * (ay1 - ay0) + (bx1 - bx0) * (by1 - by0) - overlap
    return overlap / union if overlap > 0 and math.isfinite(union) else 0.0


def box_reward(asked_N4: Float[np.ndarray, "N 4"], evidence_E4: Float[np.ndarray, "E 4"]) -> float:
    """``sum of IoU over the best one-to-one matching / max(#asked, #evidence)``.

    Missing and surplus boxes both cost; 0 where nothing was asked.

    >>> box = np.array([[0.0, 0.0, 2.0, 2.0]])
    >>> box_reward(box, box), box_reward(np.concatenate([box, box]), box), box_reward(box[:0], box)
    (1.0, 0.5, 0.0)
    """
    if len(asked_N4) == 0 or len(evidence_E4) == 0:
        return 0.0
    if len(asked_N4) == 1 and len(evidence_E4) == 1:
        # Nearly all rollouts; arrays take ten times as long on so little.
        return _iou(asked_N4[0].tolist(), evidence_E4[0].tolist())
    iou_NE = pairwise_iou(asked_N4, evidence_E4)
    matched = linear_sum_assignment(iou_NE, maximize=True)
    return float(iou_NE[matched].sum() / max(iou_NE.shape))


def frame_reward(frames: Collection[int], evidence_frames: Collection[int]) -> float:
    """IoU of two sets of frames; 0 where nothing was asked.

    >>> frame_reward([3, 4, 4], {4, 5}), frame_reward([], {4})
    (0.3333333333333333, 0.0)
    """
    asked, evidence = set(frames), set(evidence_frames)
    return len(asked & evidence) / len(asked | evidence) if asked | evidence else 0.0


def grounding_reward(rollout: Rollout, sample: Sample) -> float | None:
    """``box_reward`` of an image's, ``frame_reward`` of a video's successful calls.

    Calls that the gate wrote are not the policy's. None, the term is then omitted, where the
    sample has no evidence of its modality, or where no call succeeded and the tool itself failed.
    """
    if sample.evidence is None or not rollout.played:
        return None
    own = [call for call in rollout.calls if not call.by_gate]
    calls = [call for call in own if call.succeeded]
    if not calls and any(call.status is CallStatus.FAILED for call in own):
        return None
    match sample.modality:
        case Modality.IMAGE:
            if not sample.evidence.boxes:
                return None
            boxes = [box for call in calls for box in call.boxes]
            return box_reward(_array(boxes), _array(sample.evidence.boxes))
        case Modality.VIDEO:
            if not sample.evidence.frames:
                return None
            frames = {frame for call in calls for frame in call.frames}
            return frame_reward(frames, sample.evidence.frames)


def _array(boxes: Collection[tuple[float, float, float, float]]) -> Float[np.ndarray, "N 4"]:
    return np.array(list(boxes), dtype=np.float64).reshape(-1, 4)
