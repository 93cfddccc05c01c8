"""What a step's rollouts look like, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from reframe_vl.types import CallStatus, RolloutGroup, Termination


def statistics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Means over rollouts, shares over groups; only what occurred is present.

    Keys: ``reward``, ``reward/…`` (each component over the rollouts it applies to), ``call_rate``
    (rollouts with a successful call), ``parse_rate`` (proposed calls that were valid; 1 without
    any), ``dead_groups`` (groups whose advantages are all 0), ``not_scorable`` (rollouts without a
    reward), ``blank_views`` (first views of one colour), ``dropped`` (rollouts that lost their
    original input), ``sampled_tokens``, ``visual_tokens``, ``turns``, ``coercions`` (calls whose
    arguments were converted), ``termination/…`` and ``refused/…`` (shares of rollouts, and calls a
    rollout).
    """
    rollouts = [r for group in groups for r in group.rollouts]
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
    result["call_rate"] = sum(any(c.succeeded for c in r.calls) for r in rollouts) / count
    result["parse_rate"] = 1 - len(refused) / len(own_calls) if own_calls else 1.0
    result["dead_groups"] = sum(
        not any(rollout.advantage for rollout in group.rollouts) for group in groups
    ) / len(groups)
    result["not_scorable"] = sum(r.reward is None for r in rollouts) / count
    views = [r.contexts[0].views[0] for r in rollouts if r.contexts and r.contexts[0].views]
    blank = sum(v.pixels is not None and not np.ptp(v.pixels, axis=(0, 1)).any() for v in views)
    result["blank_views"] = blank / len(views) if views else 0.0
    result["dropped"] = sum(r.dropped for r in rollouts) / count
    result["sampled_tokens"] = sum(r.num_sampled for r in rollouts) / count
    result["visual_tokens"] = sum(r.num_visual_tokens for r in rollouts) / count
    result["turns"] = sum(r.num_turns for r in rollouts) / count
    result["coercions"] = sum(c.coercions > 0 for c in own_calls) / count
    endings = Counter(r.termination for r in rollouts)
    result |= {f"termination/{end.value}": endings[end] / count for end in Termination}
    reasons = Counter(c.reason for c in refused)
    result |= {f"refused/{reason}": number / count for reason, number in sorted(reasons.items())}
    return result
