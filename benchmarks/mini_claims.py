"""The claims that the GD-GRPO experiment tests, and the contrasts that answer them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mini_runs import BASE, FULL, OUTCOME, STRONG
from mini_statistics import (
    AREA,
    END,
    Measurements,
    Part,
    difference,
    joint,
    verdict,
    verdict_of_no_change,
)

SETTINGS = {"0.5": ("image", 0.5), "0.7": ("image", 0.7), "0.9": ("image", STRONG)} | {
    "video": ("video", STRONG)
}
"""World and shortcut strength by their name in the summary."""


@dataclass(frozen=True)
class Prediction:
    """A contrast with a prediction.

    Attributes:
        label: What is compared.
        parts: The contrast.
        slight: It is predicted to be near 0; else above it.
        decides: It is part of the claim; else it is shown beside it.
    """

    label: str
    parts: list[Part]
    slight: bool = False
    decides: bool = True

    def verdict(self, interval: dict[str, Any]) -> str:
        """By the rule of the prediction."""
        return verdict_of_no_change(interval) if self.slight else verdict(interval)


def _rise(measure: str) -> list[Part]:
    return difference(FULL, BASE, measure)


def _rise_beyond(measure: str) -> list[Part]:
    """How much more the accuracy under true observations rises than that under others."""
    return [*_rise("true"), *((-w, method, name) for w, method, name in _rise(measure))]


CLAIMS = {
    "GD-GRPO ends with a higher tool gain than outcome GRPO": [
        Prediction("tool gain", difference(FULL, OUTCOME, "tool_gain")),
        Prediction(
            "tool gain over the frozen base without tools",
            difference(FULL, OUTCOME, "tool_gain_vs_base"),
            decides=False,
        ),
    ],
    "GD-GRPO ends with a higher observation dependence than outcome GRPO": [
        Prediction("original kept", difference(FULL, OUTCOME, "observation_dependence")),
        Prediction(
            "original dropped",
            difference(FULL, OUTCOME, "observation_dependence_dropped"),
            decides=False,
        ),
    ],
    "GD-GRPO changes the accuracy without tools only slightly": [
        Prediction("against the frozen base", _rise("no_tools"), slight=True),
        Prediction(
            "against outcome GRPO",
            difference(FULL, OUTCOME, "no_tools"),
            slight=True,
            decides=False,
        ),
    ],
    "GD-GRPO raises the accuracy under true, random and blank observations, most under true": [
        Prediction("rise under true", _rise("true")),
        Prediction("rise under random", _rise("random")),
        Prediction("rise under blank", _rise("blank")),
        Prediction("rise under true beyond random", _rise_beyond("random")),
        Prediction("rise under true beyond blank", _rise_beyond("blank")),
    ],
}

PARTS: dict[str, list[tuple[float, str]]] = {
    "drop, with R_obs": [(1, FULL), (-1, "no_drop")],
    "drop, without R_obs": [(1, "no_grounding"), (-1, "no_grounding_no_drop")],
    "R_obs, with drop": [(1, FULL), (-1, "no_grounding")],
    "R_obs, without drop": [(1, "no_drop"), (-1, "no_grounding_no_drop")],
    "R_obs × drop (interaction)": [
        (1, FULL),
        (-1, "no_grounding"),
        (-1, "no_drop"),
        (1, "no_grounding_no_drop"),
    ],
    "R_call": [(1, FULL), (-1, "no_call_reward")],
    "advantages in subgroups": [(1, FULL), (-1, "whole_group")],
}
"""What each part adds: methods with it less those without."""


def title_of(setting: str) -> str:
    """A setting's name in tables and plots."""
    return setting if setting == "video" else f"image {setting}"


def answers(measurements: Measurements, setting: str) -> dict[str, Any]:
    """Every claim's verdict at a setting, at the end and over the curve, with what it rests on.

    Claims that no finished pair of runs speaks to are left out.
    """
    found = {}
    for claim, predictions in CLAIMS.items():
        entries = []
        for prediction in predictions:
            entry: dict[str, Any] = {"compared": prediction.label, "decides": prediction.decides}
            for at in (END, AREA):
                interval = measurements.contrast(*SETTINGS[setting], prediction.parts, at)
                if interval:
                    entry[at] = {**interval, "verdict": prediction.verdict(interval)}
            entries.append(entry)
        if not all(END in entry and AREA in entry for entry in entries):
            continue
        deciding = [entry for entry in entries if entry["decides"]]
        found[claim] = {
            "verdict": joint(entry[END]["verdict"] for entry in deciding),
            "verdict_over_the_curve": joint(entry[AREA]["verdict"] for entry in deciding),
            "predictions": entries,
        }
    return found


def contributions(measurements: Measurements, measure: str, at: str) -> dict[str, Any]:
    """What each part adds to a measure at the strong shortcut, as far as runs are finished."""
    found = {}
    for part, weights in PARTS.items():
        parts: list[Part] = [(float(w), method, measure) for w, method in weights]
        interval = measurements.contrast(*SETTINGS[str(STRONG)], parts, at)
        if interval:
            found[part] = {**interval, "verdict": verdict(interval)}
    return found
