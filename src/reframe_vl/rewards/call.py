"""R_call of docs/method.md, 1.1: whether calling a tool was the right thing to do."""

from __future__ import annotations

from dataclasses import dataclass

from reframe_vl.types import Applicability, CallStatus, Rollout, Sample


@dataclass(frozen=True)
class CallValue:
    """What calling and not calling are worth for one label."""

    if_called: float = 0.0
    if_not_called: float = 0.0


@dataclass(frozen=True)
class CallTable:
    """The value of calling by applicability label; the numbers are our default."""

    beneficial: CallValue = CallValue(if_called=1.0)
    neutral: CallValue = CallValue()
    non_beneficial: CallValue = CallValue(if_called=-1.0)

    def __getitem__(self, label: Applicability) -> CallValue:
        """The row of a label.

        >>> CallTable()[Applicability.NON_BENEFICIAL].if_called
        -1.0
        """
        match label:
            case Applicability.BENEFICIAL:
                return self.beneficial
            case Applicability.NEUTRAL:
                return self.neutral
            case Applicability.NON_BENEFICIAL:
                return self.non_beneficial


def call_reward(rollout: Rollout, sample: Sample, table: CallTable | None = None) -> float | None:
    """The table's value for what the policy itself did; several calls are worth one.

    A successful call counts as called. Where all calls were refused, they earn nothing that is
    better than not calling, but a cost of calling is due. Where all that was not refused failed
    on the tool's side, nothing can be said: None, as without a label. Calls that the gate wrote
    are not the policy's.
    """
    if sample.applicability is None or not rollout.played:
        return None
    value = (table or CallTable())[sample.applicability]
    statuses = {call.status for call in rollout.calls if not call.by_gate}
    if CallStatus.OK in statuses or CallStatus.REPEATED in statuses:
        return value.if_called
    if CallStatus.FAILED in statuses:
        return None
    if CallStatus.REFUSED in statuses:
        return min(value.if_called, value.if_not_called)
    return value.if_not_called
