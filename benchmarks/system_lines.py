"""How many lines of code each system has of its own, beside the trainer that all of them share.

    python benchmarks/system_lines.py [--json FILE]

A file belongs to a system if no other would miss it: its tool, its reward, its selection, its
LightningModule. Counted are lines with code: no blank lines, comments or docstrings. What a shared
file does for one system alone (a reward's term, an option of the loss) counts as shared.
"""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path
from typing import Any

from common import ROOT, arguments, conclude, report, show

SHARED = "shared by all"
PACKAGE = "src/reframe_vl"
SYSTEMS: dict[str, tuple[str, ...]] = {
    "Reframe, GD-GRPO": (
        f"{PACKAGE}/rollout/drop.py",
        f"{PACKAGE}/rewards/call.py",
        "callbacks/ground_drop.py",
        "configs/callbacks/ground_drop/*.yaml",
        "configs/reward/gdgrpo.yaml",
        "configs/experiment/gdgrpo_*.yaml",
    ),
    "Reframe, OG-MOPD": (
        f"{PACKAGE}/algorithms/ogmopd.py",
        f"{PACKAGE}/algorithms/distillation.py",
        f"{PACKAGE}/algorithms/self_check.py",
        f"{PACKAGE}/policy/teachers.py",
        f"{PACKAGE}/rollout/gate.py",
        f"{PACKAGE}/rollout/vllm_teacher.py",
        "callbacks/gate.py",
        "configs/algorithm/ogmopd.yaml",
        "configs/callbacks/gate/*.yaml",
        "configs/experiment/ogmopd.yaml",
    ),
    "PyVision-RL, without the sandbox": (
        f"{PACKAGE}/tools/python_exec.py",
        f"{PACKAGE}/rewards/tool_use.py",
        "configs/algorithm/pyvision.yaml",
        "configs/reward/pyvision.yaml",
        "configs/rollout/python.yaml",
        "configs/numbers/pyvision_*.yaml",
        "configs/experiment/pyvision_*.yaml",
    ),
    "PyVision-RL, the sandbox": (f"{PACKAGE}/tools/sandbox*.py",),
    "Vision-EKIPL": (
        f"{PACKAGE}/algorithms/ekipl.py",
        f"{PACKAGE}/rollout/auxiliary.py",
        f"{PACKAGE}/rollout/endpoint_engine.py",
        "callbacks/auxiliary.py",
        "configs/algorithm/ekipl.yaml",
        "configs/reward/ekipl.yaml",
        "configs/numbers/ekipl_*.yaml",
        "configs/experiment/vision_ekipl.yaml",
    ),
}
ALL = (f"{PACKAGE}/**/*.py", "callbacks/*.py", "src/*.py", "configs/**/*.yaml")


def files(patterns: tuple[str, ...]) -> set[Path]:
    """What the patterns name; ``callbacks`` is the folder that the package links to.

    Raises:
        FileNotFoundError: A pattern names nothing.
    """
    found: set[Path] = set()
    for pattern in patterns:
        if not (new := {path.resolve() for path in ROOT.glob(pattern)}):
            raise FileNotFoundError(f"{pattern} of benchmarks/system_lines.py names no file.")
        found |= new
    return found


def lines_of_code(path: Path) -> int:
    """Lines with code."""
    text = path.read_text()
    if path.suffix == ".yaml":
        return sum(
            bool(line.strip()) and not line.lstrip().startswith("#") for line in text.splitlines()
        )
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent and token.type != tokenize.ENDMARKER:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        # Docstrings, those of attributes too.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def main() -> None:
    """Counts, and prints the table."""
    args = arguments(__doc__ or "").parse_args()
    own = {name: files(patterns) for name, patterns in SYSTEMS.items()}
    own[SHARED] = files(ALL) - set().union(*own.values())
    rows: list[dict[str, Any]] = []
    for name, found in own.items():
        kinds = {kind: [p for p in found if p.suffix == kind] for kind in (".py", ".yaml")}
        rows.append(
            {
                "system": name,
                "files": len(found),
                "Python": sum(map(lines_of_code, kinds[".py"])),
                "YAML": sum(map(lines_of_code, kinds[".yaml"])),
            }
        )
    total = sum(row["Python"] for row in rows)
    for row in rows:
        row["share_of_Python"] = row["Python"] / total
    show(rows, "Lines of code of each system")
    content = report(rows, {row["system"]: row["Python"] for row in rows})
    conclude(args, "Lines of code of each system", __doc__ or "", content)


if __name__ == "__main__":
    main()
