"""Kills a run with SIGKILL while it writes checkpoints: is there always one to go on from?

A process (or two, that write a part each) makes steps, and a checkpoint after every one of them,
with the callback, the writers and the reader that runs use. At a random moment it is killed. Then
the newest complete checkpoint is looked for, as ``resume`` does, read whole and compared with what
its step must hold; the next process goes on from it.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist

from reframe_vl.callbacks.checkpoint import RunCheckpoint
from reframe_vl.checkpoint.reading import Form, read_progress, read_weights
from reframe_vl.checkpoint.writing import (
    CheckpointWriter,
    make_room,
    part_of,
    save_parts,
    snapshot,
)
from reframe_vl.runs import CHECKPOINTS, latest_checkpoint
from reframe_vl.strategies import FileIO

TENSORS, SIDE = 16, 256
"""The state: 16 tensors of 256 KiB, as many files' worth of writing as a small adapter."""


@dataclass
class Strategy:
    """What the checkpoint callback asks of a strategy."""

    checkpoint_io: Any = None


@dataclass
class Trainer:
    """What the checkpoint callback asks of a trainer; the state of step N is N everywhere."""

    rank: int
    group: dist.ProcessGroup | None
    writer: CheckpointWriter
    current_epoch: int = 0
    max_epochs: int = -1
    global_step: int = 0
    max_steps: int = -1
    should_stop: bool = False

    @property
    def is_global_zero(self) -> bool:
        return self.rank == 0

    @property
    def strategy(self) -> Strategy:
        return Strategy()

    def save_checkpoint(self, path: Path) -> None:
        step = self.current_epoch
        held = {f"policy.{i}": torch.full((SIDE, SIDE), float(step)) for i in range(TENSORS)}
        progress = {"epoch": step}
        if self.group is None:
            FileIO(self.writer).save_checkpoint({"state_dict": held, **progress}, path)
            return
        # As the FSDP2 strategy does it.
        self.writer.wait()
        if self.is_global_zero:
            make_room(path)
        dist.barrier()
        group, first, copy = self.group, self.is_global_zero, snapshot({"state_dict": held})
        self.writer.begin(path, lambda: save_parts(copy, progress, path, group, first))


def train(run: Path, ranks: int, rank: int, meeting: Path) -> None:
    """Goes on from the newest checkpoint until it is killed."""
    torch.set_num_threads(1)
    group = None
    if ranks > 1:
        dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=ranks)
        group = dist.new_group(backend="gloo")
    callback = RunCheckpoint(run / CHECKPOINTS, every=1, keep=1)
    trainer = Trainer(rank, group, callback._writer)
    callback.setup(trainer, None, "fit")  # type: ignore[arg-type]
    found = latest_checkpoint(run)
    if ranks > 1:
        dist.barrier()
    trainer.current_epoch = read_progress(found)["epoch"] + 1 if found else 0
    while True:
        callback.on_train_epoch_end(trainer, None)  # type: ignore[arg-type]
        trainer.current_epoch += 1


def started(run: Path, ranks: int, meeting: Path) -> list[int]:
    meeting.unlink(missing_ok=True)
    processes = []
    for rank in range(ranks):
        # Forked, since loading torch takes longer than all that is measured here.
        process = os.fork()
        if process == 0:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 2)
            try:
                train(run, ranks, rank, meeting)
            finally:
                os._exit(1)
        processes.append(process)
    return processes


def wait_for_another(run: Path, last: int, processes: list[int]) -> None:
    """Waits until a checkpoint of a later step than ``last`` is complete."""
    while (found := latest_checkpoint(run)) is None or int(found.stem[5:]) <= last:
        if any(os.waitpid(process, os.WNOHANG)[0] for process in processes):
            raise RuntimeError("A process ended by itself: run its train() to see why.")
        time.sleep(0.002)


def kill(processes: list[int], rng: random.Random) -> None:
    """One rank first and the others a moment later, as clusters do it."""
    rng.shuffle(processes)
    for process in processes:
        os.kill(process, signal.SIGKILL)
        time.sleep(rng.uniform(0, 0.01))
    for process in processes:
        os.waitpid(process, 0)


def check(run: Path) -> tuple[int, str]:
    """The step that can be gone on from, and what is wrong with it."""
    found = latest_checkpoint(run)
    if found is None:
        return -1, "no complete checkpoint"
    step = read_progress(found)["epoch"]
    weights = read_weights(found)
    if len(weights) != TENSORS or not all(bool((t == step).all()) for t in weights.values()):
        return step, f"{found.name} holds other values than step {step} had"
    return step, ""


def killed_runs(form: Form, kills: int, seed: int, window_s: float) -> dict[str, Any]:
    rng, ranks = random.Random(seed), 2 if form is Form.PARTS else 1
    resumable = during = steps = back = 0
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        (run / CHECKPOINTS).mkdir(parents=True)
        last = -1
        for _ in range(kills):
            processes = started(run, ranks, Path(folder) / "meeting")
            # Before there is any checkpoint, there is none to lose.
            wait_for_another(run, last, processes)
            time.sleep(rng.uniform(0, window_s))
            kill(processes, rng)
            during += any(part_of(p).exists() for p in _named(run))
            step, problem = check(run)
            resumable += not problem
            problems += [problem] if problem else []
            steps, back, last = max(steps, step), back + (step < last), max(step, last)
    return {
        "form": form.value,
        "ranks": ranks,
        "kills": kills,
        "during a write": during,
        "resumable": resumable,
        "older than before": back,
        "steps": steps + 1,
        "problem": problems[0] if problems else "",
    }


def _named(run: Path) -> list[Path]:
    """Checkpoints by their final names, of which a part may be there."""
    parts = (run / CHECKPOINTS).glob(".*.part")
    return [p.with_name(p.name[1:].removesuffix(".part")) for p in parts]


def main() -> int:
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--kills", type=int, default=100, help="of each form")
    parser.add_argument("--window", type=float, default=0.3, help="seconds in which a kill falls")
    args = parser.parse_args()
    kills = 5 if args.quick else args.kills
    rows = [killed_runs(form, kills, 0, args.window) for form in (Form.FILE, Form.PARTS)]
    summary = {
        "kills": sum(row["kills"] for row in rows),
        "during_a_write": sum(row["during a write"] for row in rows),
        "resumable": sum(row["resumable"] for row in rows),
    }
    content = common.report(rows, summary)
    common.show(rows, "checkpoints and SIGKILL")
    file = args.json or (None if args.quick else common.RESULTS / "checkpoint_kills.json")
    if file:
        common.write_json(file, content)
    if not args.quick:
        title = "Checkpoints of runs that are killed"
        common.write_markdown("checkpoint_kills", title, __doc__ or "", content)
    return 0 if summary["resumable"] == summary["kills"] else 1


if __name__ == "__main__":
    sys.exit(main())
