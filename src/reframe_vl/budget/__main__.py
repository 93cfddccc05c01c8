"""Prints what a configuration takes: ``python -m reframe_vl.budget [key=value …]``.

The overrides are those of ``src/train.py``. Nothing is loaded or downloaded but a model's settings:

    python -m reframe_vl.budget scale=paper rollout=vllm strategy=fsdp2 trainer.devices=8
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.table import Table

from reframe_vl.budget.memory import STRATEGIES, Settings, memory, together
from reframe_vl.budget.shape import Shape, shape_of
from reframe_vl.budget.speed import DEVICES, Device, Step, seconds
from reframe_vl.runs import register_resolvers

_CONFIGS = Path(__file__).resolve().parents[3] / "configs"


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the tables.

    Raises:
        SystemExit: The configuration cannot be composed, or its model is not known.
    """
    args = _parser().parse_args(argv)
    console = Console(highlight=False)
    try:
        cfg, strategy = _composed(args.overrides)
        model = cfg.model
        shape = shape_of(
            str(model.path),
            instantiate(model.lora) if model.get("lora") else None,
            bool(model.get("freeze_vision", False)),
        )
        device = DEVICES[args.device]
        settings, step = _settings(cfg, strategy, device), _step(cfg, args)
    except (OSError, ValueError, LookupError, HydraException, OmegaConfBaseException) as error:
        sys.exit(f"{error}")
    _print(console, str(model.path), shape, settings, step, device, args.device)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m reframe_vl.budget",
        description="Memory of each rank and the least time of a step, for a configuration.",
    )
    parser.add_argument("overrides", nargs="*", help="as for training: key=value")
    parser.add_argument("--device", choices=DEVICES, default="h100", help="default: h100")
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        help="of a prompt with its images (default: a quarter of the "
        "visual limit, and 500 of text)",
    )
    parser.add_argument(
        "--turns", type=float, default=2.0, help="of a rollout, on average (default: 2)"
    )
    parser.add_argument(
        "--turn-tokens",
        type=int,
        help="that the policy writes in a turn (default: a fifth of limits.max_new_tokens)",
    )
    return parser


def _composed(overrides: Sequence[str]) -> tuple[DictConfig, str]:
    register_resolvers()
    with initialize_config_dir(str(_CONFIGS), version_base="1.3"):
        cfg = compose("train", [*overrides, "paths.run_dir=unused", "resume=null"])
    chosen = [o.partition("=")[2] for o in overrides if o.startswith("strategy=")]
    strategy = chosen[-1] if chosen else "auto"
    OmegaConf.resolve(cfg)
    return cfg, strategy if strategy in STRATEGIES else "auto"


def _settings(cfg: DictConfig, strategy: str, device: Device) -> Settings:
    ranks = _whole(cfg.trainer.get("devices", 1)) * int(cfg.trainer.get("num_nodes", 1))
    algorithm: Any = cfg.algorithm
    own_engine = "vllm" in str(cfg.rollout.engine.get("_target_", "")).lower()
    colocated = own_engine and not cfg.rollout.engine.get("url")
    adapted = bool(cfg.model.get("lora"))
    sequences = -(-cfg.prompts_per_step // ranks) * cfg.rollouts_per_prompt
    return Settings(
        strategy=strategy if ranks > 1 or strategy == "auto" else "auto",
        ranks=ranks,
        bytes_per_number=4 if str(cfg.model.get("dtype", "float32")) == "float32" else 2,
        optimizer_numbers=2 if "adam" in str(algorithm.optimizer.get("_target_")).lower() else 0,
        forward_tokens=int(algorithm.get("max_forward_tokens", 16384)),
        logits_chunk=4096,
        recomputes=bool(cfg.model.get("gradient_checkpointing", False)),
        reference=not adapted and bool(algorithm.get("settings", {}).get("kl_coef", 0.0)),
        teachers=_whole_teachers(algorithm.get("teachers"), adapted),
        sequences=0 if own_engine else min(sequences, 256),
        context_tokens=int(cfg.limits.max_context_tokens),
        engine_share=float(cfg.vllm.get("gpu_memory_utilization", 0.0)) if colocated else 0.0,
        device_gib=device.gib,
    )


def _whole_teachers(teachers: Any, adapted: bool) -> int:
    """Models that teachers add to a rank: a server's none, adapters one base that they share."""
    if not teachers:
        return 0
    paths = teachers.get("paths") or {}
    names = set((teachers.get("routes") or {}).values())
    held = [n for n in names if not str(paths.get(n)).startswith(("http://", "https://"))]
    if teachers.get("hosting") == "adapters":
        return 0 if adapted or not held else 1
    return 0 if teachers.get("offload") else len(held)


def _whole(devices: Any) -> int:
    """How many devices are asked for."""
    if isinstance(devices, int) and devices > 0:
        return devices
    if isinstance(devices, str) and devices.isdigit():
        return int(devices)
    raise ValueError(
        f"trainer.devices={devices} does not say how many accelerators there are: give a number."
    )


def _step(cfg: DictConfig, args: argparse.Namespace) -> Step:
    prompt = args.prompt_tokens or int(cfg.limits.max_visual_tokens) // 4 + 500
    written = args.turn_tokens or max(int(cfg.limits.max_new_tokens) // 5, 1)
    crop = int(cfg.limits.tool_view_pixels) // 32**2
    sampled = int(args.turns * written)
    return Step(
        prompts=int(cfg.prompts_per_step),
        rollouts=int(cfg.rollouts_per_prompt),
        prompt_tokens=prompt,
        own_tokens=sampled + int((args.turns - 1) * crop),
        sampled_tokens=sampled,
        micro_batches=int(cfg.trainer.accumulate_grad_batches),
    )


def _print(
    console: Console,
    path: str,
    shape: Shape,
    settings: Settings,
    step: Step,
    device: Device,
    name: str,
) -> None:
    console.print(
        f"{path}: {shape.parameters / 1e9:.2f} billion parameters, {shape.trained / 1e9:.2f} "
        f"trained; strategy={settings.strategy}, {settings.ranks} x {name} of "
        f"{device.gib:.0f} GiB"
    )
    terms = memory(shape, settings)
    table = Table(title="Memory of a rank, GiB")
    for column in ("what", "GiB"):
        table.add_column(column, justify="right")
    for term, size in terms.items():
        if size:
            table.add_row(term, f"{size:.1f}")
    most = together(terms)
    table.add_section()
    table.add_row("most at one time", f"{most:.1f}")
    table.add_row("left", f"{device.gib - most:.1f}")
    console.print(table)
    if most > device.gib:
        console.print(
            "This does not fit. More ranks with strategy=fsdp2, adapters (model.lora), a smaller "
            "algorithm.max_forward_tokens or a smaller vllm.gpu_memory_utilization take less; "
            "teachers with algorithm.teachers.offload=true, behind servers, or as adapters."
        )
    table = Table(title="Least time of a step, s")
    for column in ("part", "s"):
        table.add_column(column, justify="right")
    parts = seconds(shape, settings, step, device)
    for part, time in parts.items():
        if time:
            table.add_row(part, f"{time:.2f}")
    console.print(table)
    console.print(
        f"For {step.prompts} prompts of {step.prompt_tokens} tokens with {step.rollouts} rollouts "
        f"of {step.own_tokens} each ({step.sampled_tokens} sampled): "
        f"{step.packed_tokens:,} tokens are trained, in {step.micro_batches} micro-batches."
    )


if __name__ == "__main__":
    main()
