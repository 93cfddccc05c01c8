"""One set of settings in two forms: Hydra's tree, and the config of Lightning's CLI.

| Hydra's tree | Lightning's CLI |
|---|---|
| ``_target_: CLASS`` beside its arguments | ``class_path: CLASS`` and ``init_args`` |
| ``trainer``, ``callbacks.NAME``, ``logger.NAME`` | ``trainer``, with two lists |
| ``algorithm``, ``model`` | ``model``, with ``init_args.policy`` |
| ``data`` | ``data`` |
| ``seed`` | ``seed_everything`` |
| all else | ``run`` |

Hydra calls what is ``_partial_`` with its known arguments; Lightning's CLI sees from the annotation
that a callable is wanted. Names of callbacks and loggers are kept by what they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from hydra.utils import get_object

Tree = dict[str, Any]

CONVERT = {"_convert_": "all"}
"""Arguments are plain lists and dictionaries, as those of Lightning's CLI are."""

RUN_DIR = "${paths.run_dir}"
"""Stands for the run's directory in either form, so that a saved config has no place of its own."""

OF_THE_COMMAND = ("resume", "run_name", "config", "paths")
"""What says where a run lives; another command that takes the config over has its own."""


class Partial:
    """A function with some of its arguments, which Lightning's CLI can only name without them.

    Args:
        function: Called.
        arguments: By name, as they are: their types are not known.
    """

    def __init__(self, function: Callable[..., Any], arguments: dict) -> None:
        """Checks the arguments' names.

        Raises:
            TypeError: The function does not take one of them.
        """
        inspect.signature(function).bind_partial(**arguments)
        self.function, self.arguments = function, arguments

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls it with the others."""
        return self.function(*args, **self.arguments, **kwargs)


PARTIAL = f"{__name__}.Partial"


# ------------------------------------------------------------------ Hydra to Lightning


def to_lightning(tree: Mapping[str, Any]) -> Tree:
    """The config of Lightning's CLI for a resolved tree."""
    rest = {name: value for name, value in tree.items() if name not in (*_PLACED, *OF_THE_COMMAND)}
    model = _class_form({**tree["algorithm"], "policy": tree["model"]})
    trainer = _class_form(tree["trainer"])["init_args"]
    for name in ("callbacks", "logger"):
        nodes = (tree[name] or {}).values()
        trainer[name] = [_class_form(node) for node in nodes if node is not None]
    return {
        "seed_everything": tree["seed"],
        "trainer": trainer,
        "model": model,
        "data": _class_form(tree["data"]),
        "run": rest,
    }


_PLACED = ("seed", "trainer", "callbacks", "logger", "algorithm", "model", "data")


def _class_form(node: Any) -> Any:
    if isinstance(node, Mapping):
        own = {name: _class_form(value) for name, value in node.items() if name not in _HYDRAS}
        if "_target_" not in node:
            return own
        target = node["_target_"]
        if node.get("_partial_") and not inspect.isclass(get_object(target)):
            return {"class_path": PARTIAL, "init_args": {"function": target, "arguments": own}}
        return {"class_path": target, "init_args": own}
    if isinstance(node, list):
        return [_class_form(value) for value in node]
    return node


_HYDRAS = ("_target_", "_partial_", "_convert_", "_recursive_")


# ------------------------------------------------------------------ Lightning to Hydra


def to_hydra(config: Mapping[str, Any], names: Mapping[str, str]) -> Tree:
    """The tree for a config of Lightning's CLI, as its parser gives it: with every class path.

    Args:
        config: Of one subcommand.
        names: Of callbacks and loggers by their class; others are named after what they are.
    """
    model = _target_form(config["model"])
    trainer = dict(config["trainer"])
    callbacks, loggers = trainer.pop("callbacks", None), trainer.pop("logger", None)
    return {
        **config["run"],
        "seed": config["seed_everything"],
        "data": _target_form(config["data"]),
        "model": model.pop("policy"),
        "algorithm": {**model, "_partial_": True},
        "trainer": {"_target_": "lightning.pytorch.Trainer", **_target_form(trainer), **CONVERT},
        "callbacks": _named(callbacks, names),
        "logger": _named(loggers, names),
    }


def _named(nodes: Any, names: Mapping[str, str]) -> Tree:
    """Callbacks or loggers by name."""
    named: Tree = {}
    for node in map(_target_form, _listed(nodes)):
        name = names.get(node["_target_"]) or _own_name(node["_target_"])
        named[name if name not in named else f"{name}_{len(named)}"] = node
    return named


def _listed(nodes: Any) -> list[Any]:
    """One node, several or none of them; Lightning's ``true`` and ``false`` are none."""
    if isinstance(nodes, Mapping):
        return [nodes]
    return list(nodes) if isinstance(nodes, list) else []


def _own_name(target: str) -> str:
    """Ours are named after their file, others after their class."""
    module, _, kind = target.rpartition(".")
    if target.startswith("reframe_vl."):
        return module.rpartition(".")[2]
    return kind.lower().removesuffix("callback").removesuffix("logger")


def _target_form(node: Any, hint: Any = None) -> Any:
    """A part in Hydra's form.

    Args:
        node: As the parser gives it.
        hint: The annotation of where it stands, which tells dataclasses that go without a path.
    """
    if isinstance(node, Mapping):
        return _target_of_mapping(node, hint)
    if isinstance(node, list | tuple):
        return [_target_form(value, _inner(hint)) for value in node]
    if isinstance(node, Path):
        return str(node)
    if callable(node):
        return {"_target_": "hydra.utils.get_object", "path": _path_of(node)}
    return node


def _target_of_mapping(node: Mapping[str, Any], hint: Any) -> Tree:
    path, given = node.get("class_path"), node.get("init_args", {})
    if path == PARTIAL:
        called, arguments = _path_of(given["function"]), _target_form(given["arguments"])
        return {"_target_": called, **arguments, "_partial_": True, **CONVERT}
    if path is None:
        kind = next((h for h in _choices(hint) if is_dataclass(h)), None)
        if kind is None:
            return {name: _target_form(value, _inner(hint)) for name, value in node.items()}
        path, given = _path_of(kind), node
    hints = _hints(path)
    values = {name: _target_form(value, hints.get(name)) for name, value in given.items()}
    # A class is to be called later where a callable is wanted, and its instances are none.
    late = Callable in [get_origin(h) for h in _choices(hint)] and not _makes_callables(path)
    return {"_target_": path, **values, **CONVERT, **({"_partial_": True} if late else {})}


def _choices(hint: Any) -> tuple[Any, ...]:
    """What may stand where an annotation is."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _inner(hint: Any) -> Any:
    """What a sequence or a mapping holds."""
    held = [get_args(h)[-1] for h in _choices(hint) if get_args(h) and get_args(h)[-1] is not ...]
    return held[0] if held else None


def _path_of(named: Any) -> str:
    return f"{named.__module__}.{named.__qualname__}"


def _hints(path: str) -> Mapping[str, Any]:
    """The annotations of a class's or function's parameters, where they can be told."""
    target = get_object(path)
    hints: dict[str, Any] = {}
    for part in reversed(target.__mro__) if inspect.isclass(target) else (target,):
        function = part.__dict__.get("__init__", part) if inspect.isclass(part) else part
        try:
            hints |= get_type_hints(function)
        except (NameError, TypeError):
            continue
    return hints


def _makes_callables(path: str) -> bool:
    target = get_object(path)
    return inspect.isclass(target) and any("__call__" in k.__dict__ for k in target.__mro__)


# ------------------------------------------------------------------ both


def without_default_callables(node: Any) -> Any:
    """A saved config of Lightning's CLI without functions that are there as defaults.

    ``--print_config`` writes all defaults; not every callable among them is taken as a value.
    """
    if isinstance(node, list):
        return [without_default_callables(value) for value in node]
    if not isinstance(node, Mapping):
        return node
    plain = {name: without_default_callables(value) for name, value in node.items()}
    if isinstance(plain.get("class_path"), str) and isinstance(plain.get("init_args"), dict):
        parameters = inspect.signature(get_object(plain["class_path"])).parameters
        for name in [n for n in plain["init_args"] if n in parameters]:
            default = parameters[name].default
            if callable(default) and plain["init_args"][name] == _path_of(default):
                del plain["init_args"][name]
    return plain


def without_defaults(node: Any) -> Any:
    """A tree without the arguments that are defaults anyway, which parsers fill in.

    Lists stand for tuples in settings: a default that is a tuple stays one.
    """
    if isinstance(node, list):
        return [without_defaults(value) for value in node]
    if not isinstance(node, Mapping):
        return node
    kept = {name: without_defaults(value) for name, value in node.items()}
    if "_target_" in kept:
        for name, parameter in inspect.signature(get_object(kept["_target_"])).parameters.items():
            default = parameter.default
            plain = list(default) if isinstance(default, tuple) else default
            if name in kept and kept[name] == plain:
                del kept[name]
    return kept


def patched(base: Any, before: Any, after: Any) -> Any:
    """A tree with what differs between two forms of it, and as it was elsewhere.

    Parsers fill defaults in: what no option changed stays as the tree has it.
    """
    if before == after:
        return base
    trees = [node for node in (base, before, after) if isinstance(node, dict)]
    if len(trees) < 3 or len({node.get("_target_") for node in trees}) > 1:
        return after
    kept = {name: value for name, value in base.items() if name in after or name not in before}
    for name, value in after.items():
        if name not in before:
            kept[name] = value
        elif before[name] != value:
            kept[name] = patched(base.get(name, before[name]), before[name], value)
    return kept


def placed(node: Any, old: str, new: str) -> Any:
    """The same with one text for another in all of its texts: where the run lives."""
    if isinstance(node, dict):
        return {name: placed(value, old, new) for name, value in node.items()}
    if isinstance(node, list | tuple):
        return [placed(value, old, new) for value in node]
    return node.replace(old, new) if isinstance(node, str) else node


def names_of(tree: Mapping[str, Any]) -> dict[str, str]:
    """The names of a tree's callbacks and loggers by their class."""
    return {
        node["_target_"]: name
        for group in ("callbacks", "logger")
        for name, node in (tree[group] or {}).items()
        if node is not None
    }
