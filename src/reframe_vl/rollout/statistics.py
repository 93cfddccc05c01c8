"""What a step's rollouts look like, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from reframe_vl.rollout.gate import BELOW_THRESHOLD
from reframe_vl.types import (
    CallRecord,
    CallStatus,
    Provenance,
    Rollout,
    RolloutGroup,
    Termination,
    View,
)

_BY_DOMAIN = (
    "reward",
    "reward/answer",
    "call_rate",
    "gated",
    "interventions",
    "injected_tokens",
    "sampled_tokens",
    "ended_turns",
)


def statistics(groups: Sequence[RolloutGroup], gate: bool = False) -> dict[str, float]:
    """Means over rollouts, shares over groups; only what occurred is present.

    Args:
        groups: Of a step.
        gate: Whether there was one.

    Keys: ``reward``, ``reward/…`` (each component over the rollouts it applies to), ``calls``
    (executed calls a rollout), ``call_rate`` (rollouts with a call that succeeded, or that only the
    gate replaced), ``parse_rate`` (proposed calls that were valid; 1 without any), ``dead_groups``
    (groups whose advantages are all 0, where there are advantages),
    ``not_scorable`` (rollouts without a reward), ``blank_views`` (first views of one colour),
    ``dropped`` (rollouts that lost their original input), ``sampled_tokens``, ``visual_tokens``,
    ``turns``, ``coercions`` (calls whose arguments were converted), ``ended_turns`` (turns that
    ended by themselves, of those that the gate did not cut short), ``termination/…`` and
    ``refused/…`` (shares of rollouts, and calls a rollout). With a gate: ``gated``
    (rollouts it stepped into), ``interventions`` and ``injected_tokens``. Where there are several
    domains, the most telling of these once more for each, as ``<domain>/…``. All of this is about
    the policy's own rollouts; of each auxiliary model's there are ``reward``, ``reward/answer``
    and ``not_scorable``, as ``auxiliary/<author>/…``.
    """
    result = _numbers(groups, gate)
    result |= _by_author(groups)
    domains = sorted({group.sample.domain for group in groups})
    for domain in domains if len(domains) > 1 else ():
        own = _numbers([group for group in groups if group.sample.domain == domain], gate)
        result |= {f"{domain}/{name}": own[name] for name in _BY_DOMAIN if name in own}
    return result


def _by_author(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """How well the rollouts of each auxiliary model did."""
    by_author: dict[str, list[Rollout]] = {}
    for rollout in (r for group in groups for r in group.rollouts if r.key.author):
        by_author.setdefault(rollout.key.author, []).append(rollout)
    result: dict[str, float] = {}
    for author, rollouts in by_author.items():
        numbers = {"reward": [r.reward for r in rollouts]}
        numbers["reward/answer"] = [r.rewards.get("answer") for r in rollouts]
        for name, values in numbers.items():
            known = [value for value in values if value is not None]
            if known:
                result[f"auxiliary/{author}/{name}"] = sum(known) / len(known)
        missing = sum(r.reward is None for r in rollouts)
        result[f"auxiliary/{author}/not_scorable"] = missing / len(rollouts)
    return result


def _numbers(groups: Sequence[RolloutGroup], gate: bool) -> dict[str, float]:
    everyone = [r for group in groups for r in group.rollouts]
    # Recorded rollouts to learn from may be of others alone.
    rollouts = [r for r in everyone if not r.key.author] or everyone
    if not rollouts:
        return {}
    count = len(rollouts)
    result: dict[str, float] = {}
    components: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in {"": rollout.reward, **rollout.rewards}.items():
            if value is not None:
                components.setdefault(f"reward/{name}".rstrip("/"), []).append(value)
    result |= {name: sum(values) / len(values) for name, values in components.items()}
    own_calls = [c for r in rollouts for c in r.calls if not c.by_gate]
    refused = [c for c in own_calls if c.status is CallStatus.REFUSED]
    result["calls"] = sum(c.status is CallStatus.OK for c in own_calls) / count
    result["call_rate"] = sum(any(map(_looks, r.calls)) for r in rollouts) / count
    invalid = len(refused) + sum(
        c.status is CallStatus.REPLACED and c.reason != BELOW_THRESHOLD for c in own_calls
    )
    result["parse_rate"] = 1 - invalid / len(own_calls) if own_calls else 1.0
    if any(rollout.advantage is not None for rollout in rollouts):
        dead = [not any(rollout.advantage for rollout in group.rollouts) for group in groups]
        result["dead_groups"] = sum(dead) / len(groups)
    result["not_scorable"] = sum(r.reward is None for r in rollouts) / count
    prompts = [r.contexts[0].spans[0] for r in rollouts if r.contexts and r.contexts[0].spans]
    views = [prompt.views[0] for prompt in prompts if prompt.views]
    # The rollouts of a group have the same first view.
    blank = {view.hash: _is_blank(view) for view in {v.hash: v for v in views}.values()}
    result["blank_views"] = sum(blank[v.hash] for v in views) / len(views) if views else 0.0
    result["dropped"] = sum(r.dropped for r in rollouts) / count
    result["sampled_tokens"] = sum(r.num_sampled for r in rollouts) / count
    result["visual_tokens"] = sum(r.num_visual_tokens for r in rollouts) / count
    result["turns"] = sum(r.num_turns for r in rollouts) / count
    spans = [s for r in rollouts for c in r.contexts for s in c.spans if s.trained]
    injected = [s for s in spans if s.provenance is Provenance.INJECTED]
    interventions = [sum(c.status is CallStatus.REPLACED for c in r.calls) for r in rollouts]
    if gate:
        steps = [n + len(r.branches) for n, r in zip(interventions, rollouts, strict=True)]
        result["gated"] = sum(n > 0 for n in steps) / count
        result["interventions"] = sum(steps) / count
        tokens = [len(s.token_ids) for s in injected]
        tokens += [len(c.spans[-1].token_ids) for r in rollouts for c in r.branches]
        result["injected_tokens"] = sum(tokens) / count
    turns = [
        s.token_ids[-1] in r.sampling.stop_ids
        for r in rollouts
        for c in r.contexts
        for s, after in zip(c.spans, [*c.spans[1:], None], strict=True)
        # A turn that the gate cut short says nothing about how it would have ended.
        if s.provenance is Provenance.SAMPLED
        and s.trained
        and (after is None or after.provenance is not Provenance.INJECTED)
        # Nor does one whose canonical call had no room left.
        and not (after is None and c is r.contexts[-1] and _ends_replaced(r))
    ]
    result["ended_turns"] = sum(turns) / len(turns) if turns else 1.0
    result["coercions"] = sum(c.coercions > 0 for c in own_calls) / count
    endings = Counter(r.termination for r in rollouts)
    result |= {f"termination/{end.value}": endings[end] / count for end in Termination}
    reasons = Counter(c.reason for c in refused)
    result |= {f"refused/{reason}": number / count for reason, number in sorted(reasons.items())}
    return result


def _looks(call: CallRecord) -> bool:
    """Whether it is a call of the policy's own that succeeded, or would have without a gate."""
    stood = call.succeeded or (
        call.status is CallStatus.REPLACED and call.reason == BELOW_THRESHOLD
    )
    return stood and not call.by_gate


def _ends_replaced(rollout: Rollout) -> bool:
    return bool(rollout.calls) and rollout.calls[-1].status is CallStatus.REPLACED


def _is_blank(view: View) -> bool:
    pixels = view.pixels
    if pixels is None:
        return False
    # A few of its pixels tell nearly every image that is not.
    return all(bool((part == pixels[0, 0]).all()) for part in (pixels[::16, ::16], pixels))
