"""What vLLM's processes read from their environment, set before vLLM is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

_DEVICES = "CUDA_VISIBLE_DEVICES"

REMEDY = (
    "Install it with pip install 'reframe-vl[vllm]' (docs/vllm.md), or generate with transformers: "
    "rollout=hf."
)


def defaults() -> dict[str, str]:
    """Variables that vLLM needs here, where whoever starts the program has not set them."""
    variables = {
        "VLLM_NO_USAGE_STATS": "1",
        # Its warnings at each start are many, and what fails is raised here.
        "VLLM_LOGGING_LEVEL": "ERROR",
        # A copy of a process that has threads may hang on a lock that none of its threads holds.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if not torch.cuda.is_available():
        variables |= {
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # The engine's own process runs the model too.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # Compiling its few small functions takes longer than a small model's whole run.
            "TORCHDYNAMO_DISABLE": "1",
        }
    return {name: value for name, value in variables.items() if name not in os.environ}


def prepare() -> None:
    """Sets the defaults in this process, for it and its children."""
    os.environ.update(defaults())


def visible(device: torch.device, devices: str | None) -> dict[str, str]:
    """Variables that say which accelerators an engine sees.

    Args:
        device: The trainer's, which an engine shares where nothing else is said.
        devices: As ``CUDA_VISIBLE_DEVICES`` names them.
    """
    if devices is None and device.type == "cuda":
        # Numbers count what this process sees.
        names = os.environ.get(_DEVICES, "").split(",")
        number = device.index or 0
        devices = names[number] if number < len(names) and names[number] else str(number)
    return {} if devices is None else {_DEVICES: devices}


@contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Sets variables for the processes that are started meanwhile."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name)
            os.environ.update({name: before[name]} if name in before else {})
