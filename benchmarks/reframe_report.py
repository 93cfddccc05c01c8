"""Table, JSON and plot of the distillation experiment, of the runs that are done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import common
from mini_rows import Rows
from mini_statistics import verdict
from reframe_runs import BASE, DISTILLED, MERGES, MIX, MIX_LONG, MODALITIES, SHORTCUT, Run
from reframe_statistics import AREA, END, KEYS, MEAN, Measurements, Part, difference

MAIN = ("accuracy", "tool_gain", "observation_dependence")
CLAIMS: dict[str, list[tuple[str, list[Part]]]] = {
    "OG-MOPD is above MOPD on average": [("accuracy", difference("ogmopd", "mopd", "accuracy"))],
    "MOPD is above Mix-RL on average": [
        ("at the distillation's budget", difference("mopd", MIX, "accuracy")),
        ("at the whole budget", difference("mopd", MIX_LONG, "accuracy")),
    ],
    "MOPD keeps most of the specialists' gain": [
        (
            "gain of MOPD less half of the specialists'",
            [
                (1.0, "mopd", "accuracy"),
                (-0.5, "specialists", "accuracy"),
                (-0.5, BASE, "accuracy"),
            ],
        )
    ],
    "OG-MOPD is above the specialists on average": [
        ("accuracy", difference("ogmopd", "specialists", "accuracy"))
    ],
    "The two stages complement each other": [
        (
            "what the gate adds with GD-GRPO's teachers less with outcome teachers",
            [
                *difference("ogmopd", "mopd", "accuracy"),
                *difference("mopd_outcome", "ogmopd_outcome", "accuracy"),
            ],
        )
    ],
}
"""Each difference is claimed to be positive."""

PAIRED = (
    *(difference("ogmopd", other, "") for other in ("mopd", "mopd_nll", MIX, MIX_LONG)),
    *(difference("ogmopd", other, "") for other in ("specialists", *MERGES)),
    difference("ogmopd_outcome", "mopd_outcome", ""),
    difference("mopd", "mopd_outcome", ""),
)


def write_report(runs: list[Run], rows: Rows, folder: Path, json_file: Path | None) -> None:
    """Writes ``mini_reframe.md``, ``.json`` and ``.png`` into a folder, and prints the claims."""
    measurements = Measurements(runs, rows)
    summary = summarise(measurements)
    shown = [
        {"run": run.name, "steps": row["steps"], "seconds": row["seconds"], "commit": row["commit"]}
        for run, row in measurements.rows.items()
    ]
    content = common.report(shown, summary)
    common.write_json(json_file or folder / "mini_reframe.json", content)
    _plot(measurements, folder / "mini_reframe.png")
    (folder / "mini_reframe.md").write_text(_page(measurements, rows.protocol, content))
    common.show(_claim_rows(summary["claims"]), "claims")
    common.show(_level_rows(summary), "mean of both modalities, at the end")


def summarise(measurements: Measurements) -> dict[str, Any]:
    """Everything that is computed from rows: levels by method, differences, claims."""
    summary: dict[str, Any] = {}
    for method in measurements.methods:
        levels = {
            modality: {
                name: measurements.contrast([(1.0, method, name)], modality) for name in KEYS
            }
            for modality in (MEAN, *MODALITIES)
        }
        at_area = {name: measurements.contrast([(1.0, method, name)], at=AREA) for name in MAIN}
        kept = {
            modality: {
                name: _share_kept(measurements, method, name, modality)
                for name in ("accuracy", "tool_gain")
            }
            for modality in (MEAN, *MODALITIES)
        }
        summary[method] = {
            **levels[MEAN],
            **{modality: levels[modality] for modality in MODALITIES},
            AREA: at_area,
            "share_kept": kept,
        }
    summary["claims"] = {
        claim: [
            {"compared": label, at: found and {**found, "verdict": verdict(found)}}
            for label, parts in entries
            if measurements.contrast(parts)
            for at in (END, AREA)
            for found in [measurements.contrast(parts, at=at)]
        ]
        for claim, entries in CLAIMS.items()
        if all(_has(measurements, parts) for _, parts in entries)
    }
    summary["differences"] = {
        f"{first} − {second}": {
            at: {
                name: measurements.contrast([(w, m, name) for w, m, _ in parts], at=at)
                for name in MAIN
            }
            for at in (END, AREA)
        }
        for parts in PAIRED
        if _has(measurements, parts)
        for (_, first, _), (_, second, _) in [parts]
    }
    done, missing = list(measurements.rows), measurements.missing
    summary["runs"] = {"done": len(done), "missing": [run.name for run in missing]}
    return summary


def _has(measurements: Measurements, parts: list[Part]) -> bool:
    return measurements.contrast([(w, m, "accuracy") for w, m, _ in parts]) is not None


def _share_kept(measurements: Measurements, method: str, name: str, modality: str) -> float | None:
    """What a method keeps of the specialists' gain over the frozen bases, as means have it."""
    gains = [
        measurements.contrast(difference(of, BASE, name), modality)
        for of in (method, "specialists")
    ]
    own, theirs = (gain and gain["value"] for gain in gains)
    return own / theirs if own is not None and theirs else None


# ------------------------------------------------------------------ page

_PAGE = """# Two specialists become one student: OG-MOPD on the mini worlds

{state}

Runs at {commits} on {machines}. Report: `{command}` at {commit}. Protocol `{fingerprint}`, set at
{first_commit}. Each run's row is in `mini_reframe/rows/`.

## What was done

Shortcut strength {shortcut} in both worlds. From each of the three shipped bases and with each of
two seeds: a spatial and a temporal specialist by GD-GRPO ({specialist} steps each), merges of the
two, distillations of both into one student ({distillation} steps: MOPD; MOPD with canonical calls
beside its rollouts; OG-MOPD), Mix-RL for as many steps as a distillation and for as many as
specialists and distillation together, and MOPD and OG-MOPD again from specialists trained on the
outcome alone. All steps have 16 prompts × 8 rollouts. All are evaluated greedily on the same
{items} test images and {items} test videos; "mean" weighs both worlds equally. `specialists` is
each specialist on its own world: no single model. Intervals are 95% percentile bootstrap intervals
over bases, then seeds, then scenes of each world, of paired differences. Settings were explored
with other seeds.

The numbers of reward, gate and training are ours; the paper gives the form only. What holds for 0.3
million parameters in these worlds need not hold for a real model.

## Claims

Each difference is claimed to be positive: **shown** if its whole interval is above 0, **reversed**
if wholly below, else **not shown**. "Most" of a gain is more than half of it.

{claims}

## Measures at the end, mean of both worlds

Share kept: the gain over the frozen bases as a part of the specialists' gain.

{levels}

## By world

{worlds}

## Paired differences

At the end:

{differences}

Area under the curve ("–" where methods have no curve, or not at the same steps):

{differences_by_area}

## Learning curves

![Learning curves](mini_reframe.png)

## Runs

Seconds of training; of a run that was stopped and gone on with, those of its last attempt alone.

{runs}
"""


def _page(measurements: Measurements, protocol: dict[str, Any], content: dict[str, Any]) -> str:
    summary, rows = content["summary"], measurements.rows.values()
    missing = summary["runs"]["missing"]
    state = f"**Partial: {len(missing)} of {len(missing) + len(rows)} runs are missing.**"
    return _PAGE.format(
        **protocol["settings"],
        shortcut=SHORTCUT,
        state=state if missing else f"All {len(rows)} runs are done, frozen bases included.",
        commits=", ".join(sorted({row["commit"] for row in rows})),
        machines="; ".join(sorted({row["machine"] for row in rows})),
        command=content["command"],
        commit=content["commit"],
        fingerprint=protocol["fingerprint"],
        first_commit=protocol["first_commit"],
        claims=common.markdown(_claim_rows(summary["claims"])),
        levels=common.markdown(_level_rows(summary)),
        worlds=common.markdown(_world_rows(summary)),
        differences=common.markdown(_difference_rows(summary["differences"], END)),
        differences_by_area=common.markdown(_difference_rows(summary["differences"], AREA)),
        runs=common.markdown(content["rows"]),
    )


def _text(found: dict[str, Any] | None) -> str:
    if found is None:
        return "–"
    return f"{found['value']:.3f} ({found['low']:.3f} to {found['high']:.3f})"


def _claim_rows(claims: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "claim": claim,
            "compared": entry["compared"],
            "at": at,
            "difference": _text(entry[at]),
            "verdict": entry[at]["verdict"] if entry[at] else "–",
            "runs": entry[at]["runs"] if entry[at] else "–",
        }
        for claim, entries in claims.items()
        for entry in entries
        for at in (END, AREA)
        if at in entry
    ]


def _methods(summary: dict[str, Any]) -> list[str]:
    order = (BASE, "specialists", MIX, MIX_LONG, *MERGES, *DISTILLED, "outcome_specialists")
    return [method for method in order if method in summary]


def _level_rows(summary: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"method": method}
        | {name: _text(summary[method][name]) for name in MAIN}
        | {"share kept": summary[method]["share_kept"][MEAN]["accuracy"]}
        for method in _methods(summary)
    ]


def _world_rows(summary: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"method": method, "world": modality}
        | {name: _text(summary[method][modality][name]) for name in KEYS}
        | {"share kept": summary[method]["share_kept"][modality]["accuracy"]}
        for method in _methods(summary)
        for modality in MODALITIES
    ]


def _difference_rows(differences: dict[str, Any], at: str) -> list[dict[str, Any]]:
    return [
        {"difference": name} | {measure: _text(found[at][measure]) for measure in MAIN}
        for name, found in differences.items()
    ]


def _plot(measurements: Measurements, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = [m for m in (MIX, "mopd", "mopd_nll", "ogmopd") if m in measurements.methods]
    figure, panels = plt.subplots(len(MODALITIES), len(MAIN), figsize=(12, 6), sharex=True)
    for row, modality in zip(panels, MODALITIES, strict=True):
        for panel, name in zip(row, MAIN, strict=True):
            for number, method in enumerate(shown):
                curve = measurements.curve(method, modality, name)
                steps, values = list(curve), list(curve.values())
                panel.plot(steps, [sum(v) / len(v) for v in values], f"C{number}o-", label=method)
                panel.fill_between(
                    steps, list(map(min, values)), list(map(max, values)), alpha=0.15
                )
            panel.set_title(f"{modality}: {name}", fontsize=9)
            panel.grid(alpha=0.3)
    panels[0][0].legend(fontsize=8)
    for panel in panels[-1]:
        panel.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
