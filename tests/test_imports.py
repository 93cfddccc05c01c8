import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"

LAYERS = (
    ("types", "schedules", "one_a_file", "files"),
    ("tools", "rewards", "data", "policy", "checkpoint"),
    ("rollout",),
    ("algorithms", "mini"),
    ("strategies",),
    ("evaluation", "callbacks"),
    (
        "slurm",
        "runs",
        "evaluating",
        "training",
        "lightning_config",
        "lightning_cli",
        "command",
        "sweeps",
    ),
    ("viewer", "play", "lmms_plugin", "budget"),
)
"""The library from the bottom up. A part imports from lower layers and its own, never upwards."""

RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}

MATHEMATICS = (
    "reframe_vl.algorithms.advantages",
    "reframe_vl.algorithms.losses",
    "reframe_vl.algorithms.selection",
    "reframe_vl.rewards",
)
FRAMEWORKS = {"lightning", "pytorch_lightning", "transformers", "vllm"}


@cache
def sources() -> dict[str, Path]:
    """Files of the library by module name; callbacks/ is reached through its link."""
    package = SRC / "reframe_vl"
    files = [*package.rglob("*.py"), *(package / "callbacks").rglob("*.py")]
    return {
        ".".join(file.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__"): file
        for file in files
    }


def imported_names(tree: ast.AST, module: str, is_package: bool) -> set[str]:
    """Everything that a module imports, inside functions too, as absolute dotted names.

    ``from a import b`` gives ``a.b``: b may be a module.
    """
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            base = parts[: len(parts) - node.level + is_package] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            names.update(f"{prefix}.{alias.name}" for alias in node.names)
    return names


@cache
def imports_of(module: str) -> frozenset[str]:
    file = sources()[module]
    tree = ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
    return frozenset(imported_names(tree, module, file.name == "__init__.py"))


def part_of(name: str) -> str | None:
    """The part of the library that a dotted name lies in, None outside the library."""
    package, _, rest = name.partition(".")
    return rest.partition(".")[0] if package == "reframe_vl" and rest else None


def own_modules(names: frozenset[str]) -> set[str]:
    """The library's modules that importing these names runs, parent packages included."""
    found = set()
    for name in names:
        parts = name.split(".")
        found |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
    return found & sources().keys()


def reached_from(module: str) -> set[str]:
    """Every dotted name that importing a module imports, through the library's own modules."""
    names: set[str] = set()
    seen: set[str] = set()
    queue = [module]
    while queue:
        current = queue.pop()
        if current not in seen:
            seen.add(current)
            names |= imports_of(current)
            queue.extend(own_modules(imports_of(current)))
    return names


def test_every_part_of_the_library_has_a_layer() -> None:
    unplaced = {part_of(module) for module in sources()} - RANK.keys() - {None}
    assert not unplaced, f"Name the layer of {sorted(map(str, unplaced))} in LAYERS."


def test_imports_never_go_upwards() -> None:
    upwards = [
        f"{module} imports {name}"
        for module in sorted(sources())
        for name in sorted(imports_of(module))
        if (part := part_of(module)) in RANK
        and (other := part_of(name)) in RANK
        and RANK[other] > RANK[part]
    ]
    assert not upwards


def test_parts_of_a_layer_do_not_import_each_other_in_circles() -> None:
    graph: dict[str, set[str]] = {part: set() for part in RANK}
    for module in sources():
        if (part := part_of(module)) in RANK:
            graph[part] |= {
                other for name in imports_of(module) if (other := part_of(name)) in RANK
            } - {part}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"These parts import each other: {' <- '.join(error.args[1])}.")


def test_the_library_never_imports_an_entry_point_or_tests() -> None:
    outside = {file.stem for file in SRC.glob("*.py")} | {"tests", "benchmarks", "callbacks"}
    wrong = [
        f"{module} imports {name}"
        for module in sorted(sources())
        for name in sorted(imports_of(module))
        if name.partition(".")[0] in outside
    ]
    assert not wrong


def test_mathematics_imports_no_framework() -> None:
    wrong = [
        f"{module} reaches {name}"
        for module in sorted(sources())
        if module.startswith(MATHEMATICS)
        for name in sorted(reached_from(module))
        if name.partition(".")[0] in FRAMEWORKS
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("import lightning.pytorch as pl", "lightning.pytorch"),
        ("from reframe_vl import rollout", "reframe_vl.rollout"),
        ("from reframe_vl.rollout.gate import Gate", "reframe_vl.rollout.gate.Gate"),
        ("from ..rollout import gate", "reframe_vl.rollout.gate"),
        ("from .. import rollout", "reframe_vl.rollout"),
        ("from . import iou", "reframe_vl.rewards.iou"),
        ("def f():\n    import vllm", "vllm"),
    ],
)
def test_every_way_to_write_an_import_is_seen(line: str, name: str) -> None:
    assert imported_names(ast.parse(line), "reframe_vl.rewards.answer", False) == {name}


def test_a_relative_import_in_a_package_starts_at_the_package() -> None:
    tree = ast.parse("from .answer import score")
    assert imported_names(tree, "reframe_vl.rewards", True) == {"reframe_vl.rewards.answer.score"}
