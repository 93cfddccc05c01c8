"""What an evaluation yields: the outcome of every item in every arm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from reframe_vl.rewards.answer import answer_reward
from reframe_vl.rewards.grounding import grounding_reward
from reframe_vl.types import CallStatus, Rollout, Sample, Termination


class Arm(StrEnum):
    """One way to play an item; the names are those of results.json."""

    TOOLS = "tools"
    NO_TOOLS = "no_tools"
    NO_TOOLS_MATCHED = "no_tools_matched"
    """Without tools, but with as many visual tokens as the tools arm takes on average."""
    DROPPED = "dropped"
    """With tools; the original view leaves after the first successful call."""
    CONFLICT = "conflict"
    """With tools, on a second set whose shortcut misleads."""
    TRUE = "true"
    """Forced calls return the evidence; the original view is kept."""
    RANDOM = "random"
    BLANK = "blank"
    TRUE_DROPPED = "true_dropped"
    RANDOM_DROPPED = "random_dropped"
    BLANK_DROPPED = "blank_dropped"


FORCED_ARMS = frozenset(
    {
        Arm.TRUE,
        Arm.RANDOM,
        Arm.BLANK,
        Arm.TRUE_DROPPED,
        Arm.RANDOM_DROPPED,
        Arm.BLANK_DROPPED,
    }
)


def named_arms(names: Sequence[str | bool] | None) -> tuple[Arm, ...]:
    """The arms of these names, each once; None stands for all.

    Args:
        names: YAML reads the name ``true`` as a boolean: it means the arm all the same.

    Raises:
        ValueError: A name is unknown, there are none, or one arm needs another.
    """
    if names is None:
        return tuple(Arm)
    by_name: dict[str | bool, Arm] = {arm.value: arm for arm in Arm} | {True: Arm.TRUE}
    valid = ", ".join(Arm)
    if isinstance(names, str):
        raise ValueError(
            f"The arms are {names!r}: give a list such as [tools,no_tools], of {valid}; or null "
            "for all of them."
        )
    if not names:
        raise ValueError(f"The list of arms is empty: name some of {valid}, or give null for all.")
    for name in names:
        if name not in by_name:
            raise ValueError(f"There is no arm {name!r}: choose among {valid}.")
    arms = tuple(dict.fromkeys(by_name[name] for name in names))
    if Arm.NO_TOOLS_MATCHED in arms and Arm.TOOLS not in arms:
        raise ValueError("The arm no_tools_matched needs the arm tools: ask for both.")
    return arms


class LeftOut(StrEnum):
    """Why an item has no outcome: never the policy's fault."""

    FAILED = "failed"
    """The engine, a tool or the media failed."""
    UNREADABLE_REFERENCE = "unreadable_reference"
    OVER_BUDGET = "over_budget"
    """What is shown before the policy's first turn does not fit the context."""
    NO_EVIDENCE = "no_evidence"
    """There is no canonical call to force."""
    NO_CANONICAL_CALL = "no_canonical_call"
    """An evidence item cannot be asked for: a box below the shortest side of a crop."""
    NO_CONTROL = "no_control"
    """No region or frames of the evidence's size are disjoint from it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one item went in one arm.

    Attributes:
        calls: Successful calls of the policy itself; forced ones do not count.
        visual_tokens: Of the whole rollout.
        iou: Of the policy's calls with the evidence; None where the sample has none.
    """

    correct: bool
    calls: int
    visual_tokens: int
    iou: float | None


def judge(rollout: Rollout, sample: Sample) -> Outcome | LeftOut:
    """Scores a rollout, unless what went wrong was not the policy's doing."""
    tool_failed = any(call.status is CallStatus.FAILED for call in rollout.calls)
    if rollout.termination is Termination.ERROR or tool_failed:
        return LeftOut.FAILED
    if rollout.num_turns == 0:
        return LeftOut.OVER_BUDGET
    correct = answer_reward(rollout, sample)
    if correct is None:
        return LeftOut.UNREADABLE_REFERENCE
    return Outcome(
        correct=correct == 1.0,
        calls=sum(call.succeeded and not call.by_gate for call in rollout.calls),
        visual_tokens=rollout.num_visual_tokens,
        iou=grounding_reward(rollout, sample),
    )


@dataclass(frozen=True)
class EvaluationResult:
    """All outcomes of one checkpoint on one set of items.

    Attributes:
        outcomes: By arm and sample id. All arms that were played hold the same items, but for the
            forced-call arms, which may hold fewer, and the conflict arm, which has its own.
        media: The key of each item's media: items of one key are no independent evidence.
        num_items: Items of the arms without forced calls.
        left_out: Items without outcomes by reason, of ``all`` arms, of the ``forced`` arms beyond
            these, and of the ``conflict`` arm.
    """

    outcomes: Mapping[Arm, Mapping[str, Outcome]]
    media: Mapping[str, str]
    num_items: int
    left_out: Mapping[str, Mapping[str, int]]


def gather(
    judged: Mapping[Arm, Mapping[str, Outcome | LeftOut]],
    samples: Mapping[str, Sample],
    without_control: Mapping[str, LeftOut],
) -> EvaluationResult:
    """Keeps the items that every arm could score, and counts the others.

    Args:
        judged: By arm and sample id.
        samples: Of the main and of the conflict set by id.
        without_control: Items that have no place in the forced-call arms.
    """
    everywhere: dict[str, LeftOut] = {}
    forced: dict[str, LeftOut] = dict(without_control)
    conflict: dict[str, LeftOut] = {}
    for arm, items in judged.items():
        for name, item in items.items():
            if isinstance(item, Outcome):
                continue
            if arm is Arm.CONFLICT:
                conflict.setdefault(name, item)
            elif arm in FORCED_ARMS and item is LeftOut.OVER_BUDGET:
                forced.setdefault(name, item)
            else:
                everywhere.setdefault(name, item)
    main = {n for arm, items in judged.items() if arm is not Arm.CONFLICT for n in items}
    forced = {name: why for name, why in forced.items() if name not in everywhere}
    outcomes: dict[Arm, dict[str, Outcome]] = {}
    for arm, items in judged.items():
        gone = conflict if arm is Arm.CONFLICT else everywhere
        gone = gone | forced if arm in FORCED_ARMS else gone
        outcomes[arm] = {
            name: item
            for name, item in items.items()
            if isinstance(item, Outcome) and name not in gone
        }
    kept = {name for items in outcomes.values() for name in items}
    return EvaluationResult(
        outcomes=outcomes,
        media={name: samples[name].media.key for name in sorted(kept)},
        num_items=len(main - everywhere.keys()),
        left_out={
            scope: dict(sorted(Counter(str(why) for why in gone.values()).items()))
            for scope, gone in (("all", everywhere), ("forced", forced), ("conflict", conflict))
        },
    )
