"""How the ranks of a run share the work: Lightning's strategies, as configs/strategy/ sets them.

DDP is Lightning's own. What is here adds checkpoints that appear whole or not at all, and that hold
only what is trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy, Strategy
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from reframe_vl.algorithms.module import PolicyModule
from reframe_vl.checkpoint.reading import PROGRESS, Form, form_of, part_names
from reframe_vl.checkpoint.writing import (
    CheckpointWriter,
    make_room,
    part_of,
    put_in_place,
    remove,
    save_file,
    save_parts,
    snapshot,
)
from reframe_vl.policy.lockstep import GradientOrder
from reframe_vl.policy.sharding import in_lockstep


class FileIO(CheckpointIO):
    """Writes one file, from a copy of the state, while training goes on."""

    def __init__(self, writer: CheckpointWriter) -> None:
        """Keeps the writer."""
        self.writer = writer

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Begins to write."""
        state, place = snapshot(checkpoint), Path(path)
        self.writer.begin(place, lambda: save_file(state, place))

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Reads a file."""
        self.writer.wait()
        state: dict[str, Any] = torch.load(
            path, map_location=map_location, weights_only=bool(weights_only)
        )
        return state

    def remove_checkpoint(self, path: str | Path) -> None:
        """Removes a file or a folder."""
        remove(Path(path))


class FSDP2(ModelParallelStrategy):
    """Each rank holds a part of every parameter, of its gradient and of its optimiser state.

    ``PolicyModule.configure_model`` says which parts are gathered together. A checkpoint is a
    folder to which each rank writes its part, in the background; it can be loaded by another number
    of ranks. The file of one process or of DDP is loaded too.

    Args:
        timeout_s: How long a rank waits for the others.
    """

    def __init__(self, timeout_s: float = 1800.0) -> None:
        """Nothing is set up before the processes are there."""
        super().__init__(tensor_parallel_size=1, timeout=timedelta(seconds=timeout_s))
        self.writer = CheckpointWriter()
        self._writers_group: dist.ProcessGroup | None = None

    def setup_environment(self) -> None:
        """Makes all ranks one group: Lightning's own default is a group a machine."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()
        # Writing goes on while training communicates: each has a group of its own.
        self._writers_group = dist.new_group(backend="gloo", timeout=self._timeout)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Begins to write a folder with a part from each rank."""
        path = Path(self.broadcast(str(filepath)))
        self.writer.wait()
        if self.is_global_zero:
            make_room(path)
        self.barrier("folder made")
        optimizers = checkpoint.pop("optimizer_states", [])
        tensors = {"state_dict": checkpoint.pop("state_dict")}
        tensors |= {_optimizer(number): state for number, state in enumerate(optimizers)}
        tensors, progress = snapshot(tensors), snapshot(checkpoint)
        group, first = self._writers_group, self.is_global_zero
        self.writer.begin(path, lambda: save_parts(tensors, progress, path, group, first))

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads weights and optimiser, and returns what else there is.

        Raises:
            ValueError: The checkpoint is DeepSpeed's, or trains other parameters than this run.
        """
        path = Path(self.broadcast(str(checkpoint_path)))
        if form_of(path) is Form.PARTS:
            return self._load_parts(path)
        return self._load_file(path)

    def _load_parts(self, path: Path) -> dict[str, Any]:
        module, reader = self._policy_module(), dcp.FileSystemReader(path)
        held = part_names(path)
        module.check_trained(held)
        weights = {n: value for n, value in get_model_state_dict(module).items() if n in held}
        dcp.load({"state_dict": weights}, storage_reader=reader)
        set_model_state_dict(module, weights, options=StateDictOptions(strict=False))
        for number, optimizer in enumerate(self.optimizers):
            name = _optimizer(number)
            state = {name: get_optimizer_state_dict(module, optimizer)}
            dcp.load(state, storage_reader=dcp.FileSystemReader(path))
            set_optimizer_state_dict(module, optimizer, optim_state_dict=state[name])
        progress: dict[str, Any] = torch.load(
            path / PROGRESS, map_location="cpu", weights_only=False
        )
        return progress

    def _load_file(self, path: Path) -> dict[str, Any]:
        module = self._policy_module()
        checkpoint: dict[str, Any] = torch.load(
            path, map_location="cpu", mmap=True, weights_only=False
        )
        weights = checkpoint.pop("state_dict")
        module.check_trained(set(weights))
        options = StateDictOptions(full_state_dict=True, strict=False)
        set_model_state_dict(module, weights, options=options)
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            set_optimizer_state_dict(
                module, optimizer, optim_state_dict=_by_name(state, module), options=options
            )
        return checkpoint

    def _policy_module(self) -> PolicyModule:
        if not isinstance(self.lightning_module, PolicyModule):
            raise TypeError("FSDP2 trains a PolicyModule, which knows how it is sharded.")
        return self.lightning_module


class DeepSpeedZeRO(DeepSpeedStrategy):
    """DeepSpeed's ZeRO; its checkpoint, a folder, takes its name once all ranks have written.

    It needs forwards that are alike on all ranks: stage 3 to gather weights, both stages to add up
    gradients, which they do in the order in which these arrive.
    """

    _order: GradientOrder | None = None

    def setup(self, trainer: Trainer) -> None:
        """Sets DeepSpeed up, and keeps forwards alike.

        Raises:
            TypeError: What is trained is no policy.
        """
        if not isinstance(self.lightning_module, PolicyModule):
            raise TypeError("DeepSpeed trains a PolicyModule, whose forwards are kept alike.")
        policy = self.lightning_module.policy
        layers: Any = policy.language_model.layers
        forked = {type(layer) for layer in layers if hasattr(layer, "linear_attn")}
        if self.zero_stage_3 and forked:
            from deepspeed.utils import set_z3_leaf_modules

            # Inside, a rank runs modules as often as its rollouts fork: all are gathered before.
            set_z3_leaf_modules(policy, list(forked))
        buffers = {name: buffer.clone() for name, buffer in policy.named_buffers()}
        super().setup(trainer)
        for name, buffer in policy.named_buffers():
            # In half precision, as DeepSpeed makes them, rotary frequencies are off by many tokens.
            buffer.data = buffers[name].to(buffer.device)
        in_lockstep(policy)
        self._order = GradientOrder([p for p in policy.parameters() if p.requires_grad])

    def post_backward(self, closure_loss: Tensor) -> None:
        """Makes sure that the gradients which were added up are of the same parameters.

        Raises:
            RuntimeError: They are not.
        """
        super().post_backward(closure_loss)
        if self._order is not None:
            self._order.check(self.root_device)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Writes a folder in DeepSpeed's own form."""
        path = Path(self.broadcast(str(filepath)))
        part = part_of(path)
        if self.is_global_zero:
            remove(part)
        self.barrier("old part removed")
        super().save_checkpoint(checkpoint, part, storage_options)
        self.barrier("parts written")
        if self.is_global_zero:
            put_in_place(part, path)
        self.barrier("checkpoint in place")


def use_writer(strategy: Strategy, writer: CheckpointWriter) -> None:
    """Has a strategy write its checkpoints whole, and in the background where it can."""
    if isinstance(strategy, FSDP2):
        strategy.writer = writer
    elif not isinstance(strategy, DeepSpeedZeRO):
        strategy.checkpoint_io = FileIO(writer)


def check_resumable(strategy: Strategy, path: Path) -> None:
    """Checks that a strategy can go on from a checkpoint.

    Raises:
        ValueError: It was written by a strategy of another kind.
    """
    form = form_of(path)
    reads: dict[type[Strategy], tuple[Form, ...]] = {
        FSDP2: (Form.PARTS, Form.FILE),
        DeepSpeedZeRO: (Form.ZERO,),
    }
    known = next((forms for kind, forms in reads.items() if isinstance(strategy, kind)), None)
    if form is not None and form not in (known or (Form.FILE,)):
        by = {Form.FILE: "auto or ddp", Form.PARTS: "fsdp2", Form.ZERO: "deepspeed_zero2 or _zero3"}
        raise ValueError(
            f"{path} was written with strategy={by[form]}, and this run has another one: resume "
            "with the same strategy; or write its weights as a folder (python src/merge.py "
            f"method=consolidate checkpoints=[{path}] output=DIR) and start a new run from "
            "model.path=DIR."
        )


def _optimizer(number: int) -> str:
    return f"optimizer_{number}"


def _by_name(state: Mapping[str, Any], module: PolicyModule) -> dict[str, Any]:
    """An optimiser's state with the parameters' names in place of their numbers."""
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    groups = [
        dict(group) | {"params": [names[number] for number in group["params"]]}
        for group in state["param_groups"]
    ]
    return {
        "state": {names[number]: values for number, values in state["state"].items()},
        "param_groups": groups,
    }
