"""R_pen of docs/method.md, 1.1: what an output that breaks the rules of the game costs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise

from reframe_vl.types import CallStatus, Provenance, Rollout, Termination

_CUT = frozenset(
    {
        Termination.TRUNCATED,
        Termination.MAX_TURNS,
        Termination.MAX_TOKENS,
        Termination.MAX_VISUAL_TOKENS,
    }
)


@dataclass(frozen=True)
class ValidityWeights:
    """The cost of each entry, all 0 or more; the numbers are our default.

    Attributes:
        refused_call: Each malformed or invalid call.
        repeated_call: Each call that repeats an earlier successful one.
        no_answer: A last turn without an answer, or with an empty one.
        several_answers: More than one answer block in the last turn.
        truncated: Cut by a limit of tokens or turns before an answer.
        unended_turn: Each turn before the last one that went on to the limit of its length: a
            policy that need not end its turns forgets how to, and teaches its students the same.
        refusal_streak: Ended after too many refused calls in a row.
        max_counted: Calls and turns beyond this number cost nothing more.
        max_total: The most that a rollout can lose.
    """

    refused_call: float = 0.1
    repeated_call: float = 0.1
    no_answer: float = 0.5
    several_answers: float = 0.5
    truncated: float = 0.5
    refusal_streak: float = 0.5
    unended_turn: float = 0.1
    max_counted: int = 3
    max_total: float = 1.0

    def __post_init__(self) -> None:
        for entry in fields(self):
            if not getattr(self, entry.name) >= 0:
                raise ValueError(
                    f"ValidityWeights.{entry.name} is {getattr(self, entry.name)}: a cost is 0 or "
                    "more (it is subtracted)."
                )


def validity_counts(rollout: Rollout) -> dict[str, int]:
    """How often each entry of ``ValidityWeights`` occurred, for logging too.

    Each ending counts under one entry only. Failures of a tool or of the infrastructure and the
    gate's own calls count nowhere.
    """
    own = [call.status for call in rollout.calls if not call.by_gate]
    ending = rollout.termination
    empty = not (rollout.answers and rollout.answers[-1].strip())
    return {
        "refused_call": own.count(CallStatus.REFUSED),
        "repeated_call": own.count(CallStatus.REPEATED),
        "no_answer": int(
            ending is Termination.NO_ANSWER or (ending is Termination.ANSWERED and empty)
        ),
        "several_answers": int(len(rollout.answers) > 1),
        "truncated": int(ending in _CUT),
        "refusal_streak": int(ending is Termination.REFUSAL_STREAK),
        "unended_turn": _unended_turns(rollout),
    }


def _unended_turns(rollout: Rollout) -> int:
    """Turns before the last one that the limit of a turn's length ended, their call read or not."""
    if not rollout.contexts:
        return 0
    # The last context shows all turns, those before a drop too; the gate's calls end by themselves.
    return sum(
        span.provenance in (Provenance.SAMPLED, Provenance.EXTERNAL)
        and after.provenance is Provenance.OBSERVED
        and span.token_ids[-1] not in rollout.sampling.stop_ids
        for span, after in pairwise(rollout.contexts[-1].spans)
    )


def validity_penalty(rollout: Rollout, weights: ValidityWeights) -> float:
    """The sum of counts times costs, capped: 0 or more, to be subtracted."""
    total = sum(
        getattr(weights, entry) * min(count, weights.max_counted)
        for entry, count in validity_counts(rollout).items()
    )
    return min(float(total), weights.max_total)


def form_reward(rollout: Rollout) -> float:
    """Vision-EKIPL's format reward (docs/method.md, 1.5): 1 without a single fault, else 0."""
    return float(not any(validity_counts(rollout).values()))
