"""Table, JSON and plot of the GD-GRPO experiment on the mini worlds, of the runs that are done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import common
from mini_claims import CLAIMS, PARTS, SETTINGS, answers, contributions, title_of
from mini_gdgrpo_plot import plot
from mini_rows import Rows
from mini_runs import ABLATIONS, BASE, FULL, OUTCOME, STRONG, Run
from mini_statistics import AREA, END, KEYS, MARGIN, Measurements, verdict

METHODS = (BASE, OUTCOME, FULL)
PART_MEASURES = (
    "accuracy",
    "conflict",
    "dropped",
    "no_tools",
    "tool_gain",
    "observation_dependence",
    "grounding_iou",
)
CROSS_MEASURES = ("accuracy", "no_tools", "tool_gain", "observation_dependence")


def write_report(runs: list[Run], rows: Rows, folder: Path, json_file: Path | None) -> None:
    """Writes ``mini_gdgrpo.md``, ``.json`` and ``.png`` into a folder, and prints the claims."""
    measurements = Measurements(runs, rows)
    summary = summarise(measurements)
    shown = [
        {"run": run.name, **measurements[run].values(), **_seconds(measurements.rows[run])}
        for run in runs
        if run in measurements
    ]
    content = common.report(shown, summary)
    common.write_json(json_file or folder / "mini_gdgrpo.json", content)
    plot(measurements, folder / "mini_gdgrpo.png")
    text = page(measurements, rows.protocol, content)
    (folder / "mini_gdgrpo.md").write_text(text)
    common.show(_verdict_rows(summary["claims"], "verdict"), "claims, at the end of training")


def summarise(measurements: Measurements) -> dict[str, Any]:
    """Everything that is computed from rows, by setting and method; areas below ``area``."""
    summary: dict[str, Any] = {}
    for setting, world in SETTINGS.items():
        methods = [*METHODS, *(ABLATIONS if setting == str(STRONG) else ())]
        for method in methods:
            if not measurements.of(*world, method):
                continue
            levels = {
                at: {
                    name: measurements.contrast(*world, [(1.0, method, name)], at) for name in KEYS
                }
                for at in (END, AREA)
            }
            summary.setdefault(setting, {})[method] = {**levels[END], AREA: levels[AREA]}
    summary["claims"] = {setting: answers(measurements, setting) for setting in SETTINGS}
    summary["parts"] = {
        at: {name: contributions(measurements, name, at) for name in KEYS} for at in (END, AREA)
    }
    summary["cross_modality"] = {
        f"{modality} specialists": {
            name: {
                "level": measurements.cross_contrast(modality, name),
                "minus_base": measurements.cross_contrast(modality, name, minus_base=True),
            }
            for name in CROSS_MEASURES
        }
        for modality in ("image", "video")
    }
    done, missing = list(measurements.rows), measurements.missing
    summary["runs"] = {
        "done": len(done),
        "planned": len(done) + len(missing),
        "missing": [run.name for run in missing],
    }
    return summary


# ------------------------------------------------------------------ page

_PAGE = """# GD-GRPO on the mini worlds: the paper's claims, tested small

{state}

Runs at {commits} on {machines}. Report: `{command}` at {commit}. Protocol `{fingerprint}`, set at
{first_commit}. Each run's row is in `mini_gdgrpo/rows/`.

## What was done

Each run starts from one of the three shipped bases and trains for {steps} steps: with GD-GRPO
(`gdgrpo`), with GRPO on the outcome alone (`grpo_outcome`), or with GD-GRPO without a part. Runs of
one seed see the same training scenes. All are evaluated greedily on the same {items} test scenes
and {items} conflict scenes, in which the shortcut always misleads. Learning curves have a point
every {every} steps, on the first {curve_items} of these scenes.

- Images: shortcut strengths 0.5, 0.7 and 0.9, three bases, two seeds. Parts are left out at 0.9,
  three bases, one seed. Videos: strength 0.9, three bases, one seed.
- Measures are defined in [method.md](../method.md), 1.6. *Area* is the mean under the learning
  curve, from the untrained base to the last step.
- Intervals are 95% percentile bootstrap intervals over bases, then seeds, then scenes. Differences
  are paired: same base, same seed, same scene. Three bases are few, so intervals may be too narrow.
  They are not corrected for how many of them are on this page.

**To keep in mind.** All numbers of the reward and of the training are our choice; the paper gives
the form only. The bases are biased on purpose: when they were made, a quarter of the answers after
a call that they imitated repeated the cue instead of the right digit, and most of the calls showed
nothing to read ([method.md](../method.md), 2). That makes room for the failure that the paper
describes; that they have it is no finding. What holds for 0.3 million parameters in this world
need not hold for a real model. Settings were explored with other seeds, and none of those runs are
on this page.

## Claims

A difference that is claimed to be positive is **shown** if its whole interval is above 0,
**reversed** if it is wholly below 0, else **not shown**. That an accuracy changes *only slightly*
is **shown** if the interval lies within ±{margin}, **reversed** if it lies wholly outside, else
**not shown**. A claim of several parts is shown if all are, and reversed if one is.

At the end:

{claims}

By the area under the curve:

{claims_by_area}

What they rest on (lines in italics are shown beside a claim and do not decide it):

{predictions}

## Measures at the end

{levels}

## What each part adds

Shortcut {strong}, images: GD-GRPO with the part less GD-GRPO without it, so above 0 the part adds.
The interaction is how much more dropping adds with R_obs than without. An asterisk marks intervals
that leave out 0.

At the end:

{parts}

Area under the curve:

{parts_by_area}

## Specialists on the other modality

GD-GRPO's specialists (shortcut {strong}, seed 0) without further training; in brackets the
difference to their frozen bases.

{crossed}

## Learning curves

Lines are means over runs; bands reach from the lowest run to the highest.

![Learning curves](mini_gdgrpo.png)

## Runs

{runs}
"""


def page(measurements: Measurements, protocol: dict[str, Any], content: dict[str, Any]) -> str:
    """The Markdown page."""
    summary, rows = content["summary"], measurements.rows.values()
    return _PAGE.format(
        **protocol["settings"],
        state=_state(summary["runs"]),
        commits=", ".join(sorted({row["commit"] for row in rows})),
        machines="; ".join(sorted({row["machine"] for row in rows})),
        command=content["command"],
        commit=content["commit"],
        fingerprint=protocol["fingerprint"],
        first_commit=protocol["first_commit"],
        margin=MARGIN,
        strong=STRONG,
        claims=_table(_verdict_rows(summary["claims"], "verdict")),
        claims_by_area=_table(_verdict_rows(summary["claims"], "verdict_over_the_curve")),
        predictions=_table(_prediction_rows(summary["claims"])),
        levels=_table(_level_rows(summary)),
        parts=_table(_part_rows(summary["parts"][END])),
        parts_by_area=_table(_part_rows(summary["parts"][AREA])),
        crossed=_table(_cross_rows(summary["cross_modality"])),
        runs=_table(content["rows"]),
    )


def _state(runs: dict[str, Any]) -> str:
    if not runs["missing"]:
        return f"All {runs['planned']} runs are done, frozen bases included."
    missing = "".join(f"\n- `{name}`" for name in runs["missing"])
    return (
        f"**Partial: {runs['done']} of {runs['planned']} runs are done, frozen bases included.** "
        "All that follows rests on these alone.\n\n"
        f"<details><summary>Missing runs</summary>\n{missing}\n\n</details>"
    )


def _table(rows: list[dict[str, Any]]) -> str:
    return common.markdown(rows) or "*No runs for this yet.*"


def _verdict_rows(claims: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """A row a claim, a column a setting."""
    settings = {title_of(setting): answered for setting, answered in claims.items()}
    return [
        {
            "claim": f"{number}. {text}",
            **{
                title: answered[text][key] if text in answered else "–"
                for title, answered in settings.items()
            },
        }
        for number, text in enumerate(CLAIMS, 1)
    ]


def _prediction_rows(claims: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for setting, answered in claims.items():
        for number, text in enumerate(CLAIMS, 1):
            for entry in answered[text]["predictions"] if text in answered else ():
                mark = "" if entry["decides"] else "*"
                rows.append(
                    {
                        "setting": title_of(setting),
                        "claim": number,
                        "compared": f"{mark}{entry['compared']}{mark}",
                        "end": _cell(entry[END]),
                        "verdict": entry[END]["verdict"],
                        "area": _cell(entry[AREA]),
                        "verdict of the area": entry[AREA]["verdict"],
                        "runs": entry[END]["runs"],
                    }
                )
    return rows


def _level_rows(summary: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "setting": title_of(setting),
            "method": method,
            "runs": entries["accuracy"]["runs"],
            **{name.replace("_", " "): _cell(entries[name]) for name in KEYS},
        }
        for setting in SETTINGS
        for method, entries in summary.get(setting, {}).items()
    ]


def _part_rows(parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "part": part,
            **{name.replace("_", " "): _marked(parts[name].get(part)) for name in PART_MEASURES},
        }
        for part in PARTS
        if part in parts["accuracy"]
    ]


def _cross_rows(crossed: dict[str, Any]) -> list[dict[str, Any]]:
    on = {"image specialists": "videos", "video specialists": "images"}
    return [
        {
            "policies": who,
            "on": on[who],
            "runs": entries["accuracy"]["level"]["runs"],
            **{
                name.replace("_", " "): f"{_cell(e['level'])} [{_cell(e['minus_base'])}]"
                for name, e in entries.items()
            },
        }
        for who, entries in crossed.items()
        if entries["accuracy"]["level"]
    ]


def _cell(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return "–"
    return f"{entry['value']:.3f} ({entry['low']:.3f} to {entry['high']:.3f})"


def _marked(entry: dict[str, Any] | None) -> str:
    return _cell(entry) + ("*" if entry and verdict(entry) != "not shown" else "")


def _seconds(row: dict[str, Any]) -> dict[str, Any]:
    return {f"{what} s": round(seconds) for what, seconds in row["seconds"].items()}
