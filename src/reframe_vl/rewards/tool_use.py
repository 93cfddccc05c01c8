"""``n_tc 1[R_acc = 1]`` of docs/method.md, 1.4: the calls behind a right answer."""

from __future__ import annotations

from reframe_vl.types import CallStatus, Rollout


def tool_use_reward(rollout: Rollout, answer: float | None) -> float | None:
    """How many of the policy's own calls were executed where the answer is right, else 0.

    A call whose code raised was executed. Refused and repeated calls, those that failed on the
    tool's side and the gate's count nowhere.

    Args:
        rollout: Read only.
        answer: R_acc; None where it cannot be scored, as then neither can this.
    """
    if answer is None:
        return None
    own = [call for call in rollout.calls if not call.by_gate]
    return float(sum(call.status is CallStatus.OK for call in own)) if answer == 1 else 0.0
