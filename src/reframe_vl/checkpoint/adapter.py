"""Reads a LoRA adapter as what it adds to each of the base's tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from peft import LoraConfig, PeftConfig
from peft.utils.other import get_pattern_key
from torch import Tensor

from reframe_vl.checkpoint.folder import (
    ADAPTER_CONFIG,
    EMBEDDING,
    HEAD,
    Checkpoint,
    StoredTensor,
    check_known,
    check_shape,
    current_name,
    read_headers,
)
from reframe_vl.policy.kinship import same_model

_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(\.[^.]+)?\.weight")

_VARIANTS = (
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "kasa_config",
    "arrow_config",
    "fan_in_fan_out",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
)
"""Settings with which an adapter is more, or something else, than B·A beside a linear layer."""

_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")
"""Initialisations that leave the base as it is; the others subtract their start from it."""


@dataclass(frozen=True)
class Product:
    """The factors of one linear layer: it gains ``scaling`` · B·A."""

    a: StoredTensor
    b: StoredTensor
    scaling: float


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter of one base.

    Attributes:
        folder: The folder.
        products: By the name of the weight they are added to, in the current layout.
        whole: Tensors that were trained as such, and take the place of the base's.
    """

    folder: Path
    products: dict[str, Product]
    whole: dict[str, StoredTensor]

    @classmethod
    def open(cls, folder: Path, base: Checkpoint) -> Adapter:
        """Reads the settings and headers and no weights.

        Raises:
            FileNotFoundError: The weights are missing.
            ValueError: The adapter is not plain LoRA, or does not fit the base.
        """
        config = PeftConfig.from_pretrained(str(folder))
        if not isinstance(config, LoraConfig):
            raise ValueError(
                f"{folder} is a {config.peft_type} adapter, and only LoRA can be merged: merge it "
                "into its base first."
            )
        _check_plain(folder, config)
        if not (folder / _ADAPTER_WEIGHTS).is_file():
            raise FileNotFoundError(f"{folder} has no {_ADAPTER_WEIGHTS}: save the adapter again.")
        factors: dict[str, dict[str, StoredTensor]] = {}
        whole: dict[str, StoredTensor] = {}
        modules: dict[str, str] = {}
        for stored in read_headers([folder / _ADAPTER_WEIGHTS]):
            name = stored.name.removeprefix("base_model.model.")
            if match := _FACTOR.fullmatch(name):
                weight = current_name(f"{match['module']}.weight")
                modules[weight] = match["module"]
                factors.setdefault(weight, {})[match["side"]] = stored
            elif "lora_" in name:
                raise ValueError(
                    f"{folder} holds {stored.name}, which is not part of plain LoRA: merge the "
                    "adapter into its base first."
                )
            else:
                whole[current_name(name)] = stored
        if incomplete := sorted(w for w, sides in factors.items() if len(sides) < 2):
            raise ValueError(
                f"{folder} has only one factor of {incomplete[0]}: save the adapter again."
            )
        products = {
            weight: Product(sides["A"], sides["B"], _scaling(config, modules[weight], sides))
            for weight, sides in factors.items()
        }
        adapter = cls(folder, products, whole)
        adapter._check_fits(base)
        trained_on = config.base_model_name_or_path
        if trained_on and not same_model(trained_on, base.folder):
            raise ValueError(
                f"The adapter in {folder} was trained on {trained_on}, and the base is "
                f"{base.folder}: give the base that it was trained on. Where that is the same "
                "model in another place or under another name, change base_model_name_or_path in "
                f"its {ADAPTER_CONFIG}."
            )
        return adapter

    def stored(self, name: str) -> StoredTensor | None:
        """A tensor that was trained as such; None where the base's is meant or added to."""
        return self.whole.get(name)

    def tensor(self, name: str, base: Tensor) -> Tensor:
        """The tensor with the adapter merged in, in float32."""
        if name in self.whole:
            return self.whole[name].read().float()
        return base + self.change(name, base) if name in self.products else base

    def change(self, name: str, base: Tensor) -> Tensor:
        """What the adapter adds to the base's tensor, in float32."""
        if name in self.whole:
            return self.whole[name].read().float() - base
        if name not in self.products:
            return base.new_zeros(()).expand(base.shape)
        product = self.products[name]
        return product.scaling * (product.b.read().float() @ product.a.read().float())

    def _check_fits(self, base: Checkpoint) -> None:
        names = self.products.keys() | self.whole.keys()
        if base.tied and (tied := sorted(names & {HEAD, EMBEDDING})):
            raise ValueError(
                f"{self.folder} trains {tied[0]} alone, but {base.folder} ties head and embedding, "
                "so it would change both: untie the base, or leave both out of the adapter."
            )
        if not names & base.tensors.keys():
            raise ValueError(
                f"No tensor of {self.folder} belongs to {base.folder} "
                f"(first: {min(names, default='none at all')}): give the base that the adapter was "
                "trained on."
            )
        check_known(self.folder, names, base)
        for name, stored in self.whole.items():
            check_shape(stored, stored.shape, base.tensors[name])
        for name, product in self.products.items():
            check_shape(product.b, (*product.b.shape[:1], *product.a.shape[1:]), base.tensors[name])


def _check_plain(folder: Path, config: LoraConfig) -> None:
    found = [name for name in _VARIANTS if getattr(config, name, None)]
    if config.init_lora_weights not in _PLAIN_STARTS:
        found.append(f"init_lora_weights={config.init_lora_weights}")
    if found:
        raise ValueError(
            f"{folder} was made with {', '.join(found)}, so it is more than B·A beside its base: "
            "merge it into the base first."
        )


def _scaling(config: LoraConfig, module: str, sides: Mapping[str, StoredTensor]) -> float:
    """The alpha over the rank of a module, as peft looks them up.

    Raises:
        ValueError: The module's factors are not of this rank.
    """
    ranks, alphas = config.rank_pattern or {}, config.alpha_pattern or {}
    rank = ranks.get(get_pattern_key(list(ranks), module), config.r)
    alpha = alphas.get(get_pattern_key(list(alphas), module), config.lora_alpha)
    a, b = sides["A"], sides["B"]
    if not a.shape[:1] == b.shape[1:] == (rank,):
        raise ValueError(
            f"{a.file.parent} gives {module} the rank {rank} in its {ADAPTER_CONFIG}, and factors "
            f"A of shape {list(a.shape)} and B of {list(b.shape)}, not [{rank}, in] and "
            f"[out, {rank}]: save the adapter again, settings and weights together."
        )
    return float(alpha / (math.sqrt(rank) if config.use_rslora else rank))
