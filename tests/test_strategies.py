from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import OmegaConf

from reframe_vl.runs import is_first_rank, register_resolvers
from reframe_vl.strategies import FSDP2

CONFIGS = Path(__file__).parents[1] / "configs"
STRATEGIES = sorted(p.stem for p in (CONFIGS / "strategy").glob("*.yaml"))
register_resolvers()


def composed(*overrides):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("train", [*overrides, "paths.run_dir=unused"])


@pytest.mark.parametrize("scale", ["mini", "paper"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_composes_at_every_scale(name, scale):
    cfg = composed(f"strategy={name}", f"scale={scale}", "trainer.devices=8")
    resolved = OmegaConf.to_container(cfg.trainer, resolve=True)
    assert (resolved["strategy"] == "auto") == (name == "auto")
    assert resolved["devices"] == 8


def test_those_for_cpus_are_made():
    assert isinstance(instantiate(composed("strategy=ddp").trainer.strategy), DDPStrategy)
    made = instantiate(composed("strategy=fsdp2").trainer.strategy)
    assert isinstance(made, FSDP2)
    assert made._timeout.total_seconds() == 7200


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeeds_own_schema_takes_its_configs(stage):
    pytest.importorskip("deepspeed", reason="deepspeed is an extra")
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    config = composed(f"strategy=deepspeed_zero{stage}").trainer.strategy.config
    # It refuses names that it does not know.
    checked = DeepSpeedZeroConfig(**OmegaConf.to_container(config.zero_optimization))
    assert int(checked.stage) == stage


@pytest.mark.parametrize(
    ("environment", "first"),
    [
        ({}, True),
        ({"RANK": "0", "LOCAL_RANK": "0"}, True),
        ({"RANK": "3", "LOCAL_RANK": "0"}, False),
        ({"SLURM_PROCID": "1"}, False),
        ({"LOCAL_RANK": "1", "NODE_RANK": "0"}, False),
        ({"LOCAL_RANK": "0", "NODE_RANK": "1"}, False),
        ({"LOCAL_RANK": "0", "NODE_RANK": "0"}, True),
    ],
)
def test_g20_the_first_rank_is_known_by_what_launchers_set(monkeypatch, environment, first):
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert is_first_rank() is first
