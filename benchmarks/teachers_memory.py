"""Memory of two teachers: as adapters on the student's base, and as models of their own.

A student trains a LoRA adapter on a random Qwen3-VL in float32. Peak memory is what loading and
scoring add to a process that has loaded the libraries: the student alone, the student with two
teachers' adapters on its own frozen base, and the student with two whole models beside it. Each is
a process of its own, and each teacher scores the same contexts once.

- `adapters_vs_one`: with two adapters, by the student alone.
- `models_vs_one`: with two models, by the student alone.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import common
import torch

sys.path.insert(0, str(common.ROOT / "src"))

ROUTES = {"image": "spatial", "video": "temporal"}
RANK = 16


def write_models(folder: Path, hidden: int) -> None:
    """The base, and each teacher as an adapter and as a whole model."""
    from vs_trl import write_model

    from reframe_vl.checkpoint.export import export_policy
    from reframe_vl.policy.loading import LoRASettings, load_policy

    write_model(folder / "base", hidden)
    for seed, name in enumerate(ROUTES.values()):
        policy = load_policy(folder / "base", lora=LoRASettings(rank=RANK))
        torch.manual_seed(seed)
        for key, parameter in policy.model.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(parameter, std=0.02)
        export_policy(policy, folder / name / "policy")


def measure(folder: Path, hosting: str) -> dict[str, float]:
    """Peak memory of a student, alone or with its teachers, while all score."""
    from scoring import contexts

    from reframe_vl.policy.loading import LoRASettings, load_policy
    from reframe_vl.policy.score import score
    from reframe_vl.policy.teachers import Teachers
    from reframe_vl.types import Modality

    torch.set_num_threads(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    student = load_policy(folder / "base", lora=LoRASettings(rank=RANK))
    image = student.model.placeholders[Modality.IMAGE]
    group = contexts(student.model, 256, 32, 4, image)
    how = student.sampling(1.0, 8)
    with torch.no_grad():
        score(student.model, group, how)
    if hosting != "none":
        paths = {name: str(folder / name) for name in ROUTES.values()}
        teachers = Teachers(paths, ROUTES, hosting=hosting)  # type: ignore[arg-type]
        teachers.load(student)
        for domain in ROUTES:
            with torch.no_grad():
                teachers.of(domain).log_probs(group, how)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak_mb": (peak - before) / 1024}


def _child(folder: str, task: str) -> str:
    command = [sys.executable, __file__, "--cell", folder, task]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Measures the three hostings, or one given by name."""
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--cell", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        folder, task = Path(args.cell[0]), args.cell[1]
        if task.isdigit():
            write_models(folder, int(task))
        else:
            # The parent reads the last line.
            sys.stdout.write(json.dumps(measure(folder, task)) + "\n")
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        # A child's peak begins at its parent's size, so the parent does nothing itself.
        _child(folder, "512" if args.quick else "1536")
        for hosting in ("none", "adapters", "models"):
            rows.append(
                {"teachers": hosting} | json.loads(_child(folder, hosting).splitlines()[-1])
            )
    one, adapters, models = (row["peak_mb"] for row in rows)
    summary = {"adapters_vs_one": adapters / one, "models_vs_one": models / one}
    content = common.report(rows, summary)
    common.show(rows, "peak memory")
    common.show([summary], "summary")
    file = args.json or (None if args.quick else common.RESULTS / "teachers_memory.json")
    if file:
        common.write_json(file, content)
    if not args.quick:
        common.write_markdown("teachers_memory", "Memory of two teachers", __doc__ or "", content)


if __name__ == "__main__":
    main()
