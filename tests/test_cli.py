"""Lightning's CLI and ``src/train.py`` are two ways to say one thing."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser
from omegaconf import OmegaConf

from reframe_vl import evaluating, lightning_cli, runs
from reframe_vl.algorithms.module import PolicyModule
from reframe_vl.command import Command, hydra_job, split
from reframe_vl.data.datamodule import SampleDataModule
from reframe_vl.lightning_config import (
    OF_THE_COMMAND,
    Partial,
    names_of,
    patched,
    to_hydra,
    to_lightning,
    without_default_callables,
)
from reframe_vl.training import train

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
runs.register_resolvers()


@pytest.fixture(scope="module")
def small(random_model):
    return [
        f"model.path={random_model}",
        "steps=2",
        "prompts_per_step=2",
        "rollouts_per_prompt=4",
        "evaluation.every=0",
        "evaluation.items=2",
        "evaluation.curve_arms=[tools]",
        "evaluation.arms=[tools,no_tools]",
        "data.evaluation_size=4",
        "evaluate=false",
    ]


def composed(*overrides):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("train", list(overrides))


@pytest.fixture
def cli(monkeypatch, capsys):
    """Runs a command in this process; gives the run's directory, or what was printed."""
    # The handlers of pytest stay.
    monkeypatch.setattr(lightning_cli, "open_log", lambda: None)

    def run(*arguments, printed=False):
        command = split(arguments)
        ended = contextlib.suppress(SystemExit) if printed else contextlib.nullcontext()
        with hydra_job(CONFIGS, command) as cfg:
            with ended:
                lightning_cli.main(command, cfg)
            return capsys.readouterr().out if printed else Path(cfg.paths.run_dir)

    return run


def kept_files(run):
    files = [run / "policy" / "model.safetensors", *sorted((run / "rollouts").glob("*.jsonl"))]
    return {str(f.relative_to(run)): f.read_bytes() for f in files}


def settings_of(run):
    saved = (run / "config.yaml").read_text().replace(str(run), "RUN")
    tree = yaml.safe_load(saved)
    return {name: value for name, value in tree.items() if name not in OF_THE_COMMAND}


@pytest.fixture(scope="module")
def trained(small, tmp_path_factory):
    """What ``src/train.py`` makes of the settings."""
    run = tmp_path_factory.mktemp("train")
    train(composed(*small, f"paths.run_dir={run}"))
    return run


# ------------------------------------------------------------------ the same from both


def test_a_run_is_the_same_from_either_front_end(cli, small, trained, tmp_path):
    run = cli("fit", *small, f"paths.log_dir={tmp_path}")
    assert kept_files(run) == kept_files(trained)
    assert settings_of(run) == settings_of(trained)


def test_a_config_that_one_saved_runs_in_the_other(cli, small, trained, tmp_path):
    printed = tmp_path / "printed.yaml"
    printed.write_text(cli("fit", *small, "--print_config", printed=True))
    theirs = tmp_path / "train"
    cfg = composed(f"config={printed}", f"paths.run_dir={theirs}")
    train(lightning_cli.saved_config(printed, cfg))
    assert kept_files(theirs) == kept_files(trained)

    saved = trained / "config.yaml"
    for index, given in enumerate((f"config={saved}", f"--config={saved}")):
        run = cli("fit", given, f"paths.log_dir={tmp_path / str(index)}")
        assert run != trained
        assert kept_files(run) == kept_files(trained)


def test_a_printed_config_runs_again_and_an_option_beside_it_counts(cli, small, trained, tmp_path):
    printed = tmp_path / "printed.yaml"
    printed.write_text(cli("fit", *small, "--print_config", printed=True))
    logs = f"paths.log_dir={tmp_path}"
    run = cli("fit", logs, "--config", str(printed), "--trainer.max_steps=1")
    assert settings_of(run)["trainer"]["max_steps"] == 1
    # It ends there as it would at the last step: with a checkpoint.
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000000.ckpt"]
    first = "rollouts/step_000000.jsonl"
    files = kept_files(run)
    assert files[first] == kept_files(trained)[first]
    assert "rollouts/step_000001.jsonl" not in files


EXPERIMENTS = {
    "gdgrpo_spatial": [],
    "ogmopd": ["teachers.spatial=a", "teachers.temporal=b"],
    "sft": [],
    "vision_ekipl": ["auxiliaries={a:{checkpoint:x}}", "scale=paper"],
}


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_no_setting_is_lost_between_the_two_forms(experiment, tmp_path):
    tree = lightning_cli.resolved(
        composed(f"experiment={experiment}", *EXPERIMENTS[experiment], f"paths.run_dir={tmp_path}")
    )
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_argument("--seed_everything", type=int)
    parser.add_lightning_class_args(Trainer, "trainer")
    parser.add_lightning_class_args(PolicyModule, "model", subclass_mode=True)
    parser.add_lightning_class_args(SampleDataModule, "data", subclass_mode=True)
    lightning_cli.add_rest(parser)
    parsed = parser.parse_object(to_lightning(tree))
    back = to_hydra(parsed.as_dict(), names_of(tree))
    lost = {
        name: (value, flat(back).get(name, "is gone"))
        for name, value in flat(tree).items()
        if flat(back).get(name, "is gone") != value
    }
    # Callbacks that are left out have no place in a list; a function has several paths.
    kinds = {name for name, (value, _) in lost.items() if value is not None}
    assert kinds <= {"algorithm.scheduler._target_", *(f"{n}" for n in flat_names(tree))}
    # What is printed, and read again, is the same.
    printed = yaml.safe_load(parser.dump(parsed, skip_unset=False))
    again = parser.parse_object(without_default_callables(printed))
    assert to_hydra(again.as_dict(), names_of(tree)) == back
    assert patched(tree, back, back) == tree


def flat(node, path=""):
    if isinstance(node, dict):
        pairs = node.items()
    elif isinstance(node, list | tuple):
        pairs = enumerate(node)
    else:
        return {path: node}
    found = {}
    for name, value in pairs:
        if name != "_convert_":
            found |= flat(value, f"{path}.{name}".strip("."))
    return found


def flat_names(tree):
    return [name for name in flat(tree) if name.split(".")[0] in OF_THE_COMMAND]


def test_an_option_changes_its_value_alone_and_another_class_all_of_its_arguments():
    tree = {"a": {"_target_": "x", "n": 1, "_convert_": "all"}, "b": {"k": 1}, "c": None}
    before = {"a": {"_target_": "x", "n": 1, "default": 0}, "b": {"k": 1}}
    after = {"a": {"_target_": "x", "n": 2, "default": 0}, "b": {"k": 1}}
    changed = {**tree, "a": {"_target_": "x", "n": 2, "_convert_": "all"}}
    assert patched(tree, before, after) == changed
    other = {"a": {"_target_": "y", "m": 2}, "b": {"k": 1}}
    assert patched(tree, before, other) == {**tree, "a": {"_target_": "y", "m": 2}}
    assert patched(tree, before, {"a": before["a"]}) == {"a": tree["a"], "c": None}


def test_a_function_with_arguments_checks_their_names():
    assert Partial(pow, {"exp": 2})(3) == 9
    with pytest.raises(TypeError, match="colour"):
        Partial(split, {"colour": 2})


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("lr=fast", "lr"),
        ("--trainer.max_steps=ten", "max_steps"),
        ("--trainer.max_stepz=10", "max_stepz"),
        ("--model.init_args.settings.clip_low=wide", "clip_low"),
        ("data.evaluation_size=many", "evaluation_size"),
        ("+data.colour=red", "colour"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_before_a_model_is_loaded(
    cli, small, tmp_path, monkeypatch, capsys, given, words
):
    def loaded(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("transformers.AutoModelForImageTextToText.from_pretrained", loaded)
    with pytest.raises(SystemExit) as ended:
        cli("fit", *small, given, f"paths.log_dir={tmp_path}")
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert words in error and "rror" in error
    # Nothing was begun.
    assert not list(tmp_path.iterdir())


def test_a_mistyped_override_is_told_without_a_stack_trace():
    done = subprocess.run(
        [sys.executable, str(ROOT / "src/cli.py"), "fit", "stepz=3"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 1
    assert "Could not override 'stepz'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_that_is_no_saved_config_is_refused(tmp_path):
    path = tmp_path / "x.yaml"
    for text, words in (("a: 1", "neither"), ("- 1", "no settings by name"), ("{", "be read")):
        path.write_text(text)
        with pytest.raises(runs.ConfigError, match=words):
            lightning_cli.saved_tree(path, OmegaConf.create())


def test_an_override_that_a_saved_config_would_undo_is_refused(cli, tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("{trainer: {}, model: {}, data: {}, run: {}}")
    for given in (f"config={path}", f"--config={path}"):
        with pytest.raises(runs.ConfigError, match="seed=1 cannot be set beside"):
            cli("fit", "seed=1", given, f"paths.log_dir={tmp_path}")


def test_a_launcher_of_multiruns_is_refused(cli):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    with pytest.raises(runs.ConfigError, match="add -m"):
        cli("fit", "launcher=slurm")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], Command("", [], [])),
        (["--help"], Command("", [], ["--help"])),
        (
            ["fit", "+a.b=1", "~c", "--x.y", "k=v", "d@e.f=g", "--print_config", "z=[1,2]"],
            Command(
                "fit", ["+a.b=1", "~c", "d@e.f=g", "z=[1,2]"], ["--x.y", "k=v", "--print_config"]
            ),
        ),
        (["test", "--ckpt_path=a=b", "s=1"], Command("test", ["s=1"], ["--ckpt_path=a=b"])),
    ],
)
def test_overrides_are_told_from_options_and_their_values(arguments, expected):
    assert split(arguments) == expected


# ------------------------------------------------------------------ other subcommands


def played(report):
    return {arm for arm, measure in report["accuracy"].items() if measure is not None}


def test_validate_and_test_measure_a_checkpoint_beside_its_base(cli, small, trained, tmp_path):
    logs = f"paths.log_dir={tmp_path}"
    run = cli("validate", *small, logs, f"--ckpt_path={trained}", "--model.max_forward_tokens=99")
    report = yaml.safe_load((run / "results.json").read_text())
    assert report["items"] == 2 and played(report) == {"tools"}
    assert report["base"]["items"] == 2
    run = cli("test", *small, logs, "run_name=t")
    assert run == tmp_path / "eval" / "t"
    report = yaml.safe_load((run / "results.json").read_text())
    assert report["items"] == 4 and report["base"] is None
    assert played(report) == {"tools", "no_tools"}


def test_a_base_is_measured_in_the_precision_of_the_checkpoint(cli, small, tmp_path, monkeypatch):
    measured = []
    monkeypatch.setattr(evaluating, "evaluate", lambda *given: measured.extend(given[1:3]))
    half = ["+model.dtype=bfloat16", "trainer.precision=bf16-mixed"]
    path = next(value for value in small if value.startswith("model.path=")).partition("=")[2]
    cli("test", *small, *half, f"paths.log_dir={tmp_path}", f"--ckpt_path={path}")
    for policy in measured:
        assert {p.dtype for p in policy.model.parameters()} == {torch.bfloat16}
    assert len(measured) == 2
