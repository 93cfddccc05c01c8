"""DeepSpeed's ZeRO on CPUs, which Lightning refuses: enough to see what it makes of gradients."""

import os
from pathlib import Path

import deepspeed
import lightning.pytorch.strategies.deepspeed as of_lightning
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import OmegaConf

from reframe_vl.strategies import DeepSpeedZeRO

CONFIGS = Path(__file__).parents[1] / "configs" / "strategy"
_initialize = deepspeed.initialize


def _initialize_on_cpus(args, **settings):
    args.device_rank = int(os.environ["LOCAL_RANK"])
    return _initialize(args=args, **settings)


# For good: what imports this is a process of two ranks and of nothing else.
deepspeed.initialize = _initialize_on_cpus
of_lightning._validate_device_index_selection = lambda devices: None


class ZeROOnCPUs(DeepSpeedZeRO):
    """As configs/strategy/ sets it, but for streams, which CPUs lack."""

    def __init__(self, stage: int):
        settings = OmegaConf.to_container(
            OmegaConf.load(CONFIGS / f"deepspeed_zero{stage}.yaml").strategy
        )
        del settings["_target_"]
        zero = settings["config"]["zero_optimization"]
        zero["overlap_comm"] = False
        if stage == 3:
            # The tiny model's parameters would all stay gathered.
            zero["stage3_param_persistence_threshold"] = 0
        super().__init__(process_group_backend="gloo", **settings)

    def setup_environment(self):
        DDPStrategy.setup_environment(self)
