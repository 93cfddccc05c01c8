import json
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from reframe_vl.callbacks.checkpoint import RunCheckpoint
from reframe_vl.checkpoint.reading import form_of, read_progress, read_weights
from reframe_vl.checkpoint.writing import (
    CheckpointWriter,
    aside,
    make_room,
    part_of,
    remove,
    remove_leftovers,
    save_file,
    save_parts,
    snapshot,
    written_whole,
)

ROOT = Path(__file__).parents[2]


def state(step, size=1000):
    return {"state_dict": {"policy.w": torch.full((size,), float(step))}, "epoch": step}


def save_folder(given, path):
    make_room(path)
    tensors = {"state_dict": given["state_dict"]}
    save_parts(tensors, {"epoch": given["epoch"]}, path, None, True)


FORMS = {"file": save_file, "parts": save_folder}


@contextmanager
def full_disk(left: int):
    """No file can grow above so many bytes, as on a disk without room."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (left, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_written_reads_back_and_is_replaced_whole(form, tmp_path):
    path = tmp_path / "step_000003.ckpt"
    for step in (3, 4):
        FORMS[form](state(step), path)
        assert form_of(path) == form
        assert read_progress(path)["epoch"] == step
        assert read_weights(path)["w"].eq(step).all()
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("form", FORMS)
def test_a_full_disk_leaves_the_one_before_and_is_told_at_the_next(form, tmp_path):
    first, second = tmp_path / "step_000001.ckpt", tmp_path / "step_000002.ckpt"
    writer = CheckpointWriter()
    writer.begin(first, lambda: FORMS[form](state(1), first))
    writer.wait()
    with full_disk(100_000):
        writer.begin(second, lambda: FORMS[form](state(2, 1_000_000), second))
        with pytest.raises(OSError, match=r"step_000002.*make room .* resume"):
            writer.wait()
    assert form_of(second) is None
    assert read_weights(first)["w"].eq(1).all()
    # Once there is room again, the same step can be written.
    writer.begin(second, lambda: FORMS[form](state(2, 1_000_000), second))
    writer.close()
    assert read_weights(second)["w"].eq(2).all()


def test_a_failure_leaves_the_older_folder(tmp_path):
    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / "old").write_text("old")
    with pytest.raises(ValueError, match="no"), written_whole(folder) as part:
        part.mkdir()
        raise ValueError("no")
    assert (folder / "old").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["policy"]


def write_folder(path, text):
    with written_whole(path) as part:
        part.mkdir()
        (part / "file").write_text(text)


@pytest.mark.parametrize("made", [True, False])
def test_a_link_is_followed_and_stays_however_often_it_is_written(tmp_path, made):
    disk, link = tmp_path / "disk" / "out", tmp_path / "here" / "out"
    link.parent.mkdir()
    link.symlink_to(disk)
    if made:
        disk.mkdir(parents=True)
    for text in "abc":
        write_folder(link, text)
        assert link.readlink() == disk and (disk / "file").read_text() == text
        assert [p.name for p in (*link.parent.iterdir(), *disk.parent.iterdir())] == ["out"] * 2


def test_the_working_directory_can_be_written(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    write_folder(Path("."), "a")
    assert (tmp_path / "out" / "file").read_text() == "a"


def test_a_link_is_removed_and_not_what_it_leads_to(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    remove(tmp_path / "link")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_what_a_killed_process_left_is_removed_or_named_again(tmp_path):
    save_folder(state(1), tmp_path / "step_000001.ckpt")
    # Killed between the two names of a folder that replaces another.
    (tmp_path / "step_000001.ckpt").rename(tmp_path / ".step_000001.ckpt.old")
    part_of(tmp_path / "step_000002.ckpt").mkdir()
    part_of(tmp_path / "step_000003.ckpt").write_bytes(b"half")
    remove_leftovers(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001.ckpt"]


HELD = """
import sys, time
from pathlib import Path
from reframe_vl.checkpoint.writing import aside
with aside(Path(sys.argv[1])) as place:
    (place / "model.safetensors").write_bytes(b"large")
    print(place.name, flush=True)
    time.sleep(100)
"""


def test_a_folder_aside_goes_with_its_process_and_not_before(tmp_path):
    held = subprocess.Popen(
        [sys.executable, "-c", HELD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        theirs = tmp_path / held.stdout.readline().strip()
        with aside(tmp_path) as one, aside(tmp_path) as two:
            assert sorted(tmp_path.iterdir()) == sorted([theirs, one, two])
        assert [p.name for p in theirs.glob("*.safetensors")] == ["model.safetensors"]
    finally:
        held.kill()
        held.communicate()
    assert list(tmp_path.iterdir()) == [theirs]
    with aside(tmp_path) as one:
        assert list(tmp_path.iterdir()) == [one]
    assert not list(tmp_path.iterdir())


def test_a_snapshot_is_not_trained_and_keeps_what_is_shared():
    weight = torch.zeros(3)
    held = {"embed": weight, "head": weight, "more": [weight.view(3), (1, "a")], "step": 2}
    copy = snapshot(held)
    weight += 1
    assert copy["embed"].eq(0).all() and copy["head"] is copy["embed"]
    assert copy["more"][1] == (1, "a") and copy["step"] == 2


class FakeTrainer(Trainer):
    """As far as the checkpoint callback goes."""

    is_global_zero, should_stop, max_epochs, max_steps, global_step = True, False, 9, -1, 0
    current_epoch, callback_metrics = 0, None

    def __init__(self):
        pass

    def save_checkpoint(self, path):
        save_file(state(self.current_epoch), path)


@pytest.mark.parametrize(("best", "kept"), [(None, [7, 8]), ("val/accuracy", [3, 7, 8])])
def test_the_newest_and_the_best_are_kept(best, kept, tmp_path):
    callback, trainer = RunCheckpoint(tmp_path, every=1, keep=2, best=best), FakeTrainer()
    values = [0.1, 0.2, 0.2, 0.9, 0.3, 0.9, 0.1, 0.1, 0.1]
    for step, value in enumerate(values):
        trainer.current_epoch = step
        trainer.callback_metrics = {"val/accuracy": torch.tensor(value)}
        callback.on_train_epoch_end(trainer, LightningModule())
        # One that goes on knows the best so far.
        again = RunCheckpoint(tmp_path, every=1, keep=2, best=best)
        again.load_state_dict(callback.state_dict())
        callback = again
    callback.on_train_end(trainer, LightningModule())
    assert sorted(int(p.stem[5:]) for p in tmp_path.iterdir()) == kept


def test_killed_while_writing_there_is_always_one_to_go_on_from(tmp_path):
    script, report = ROOT / "benchmarks" / "checkpoint_kills.py", tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, str(script), "--quick", f"--json={report}"],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(report.read_text())["summary"]
    assert summary["resumable"] == summary["kills"] == 10
