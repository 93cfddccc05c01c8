"""What is trained is kept in single precision where a model computes in half."""

import asyncio
import copy
import warnings

import numpy as np
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.utils._python_dispatch import TorchDispatchMode

from reframe_vl.policy.score import score
from reframe_vl.rollout.hf_engine import HFEngine
from reframe_vl.types import Context
from tiny import random_context, sampling, tiny_model


def half_model():
    model = tiny_model("qwen3_vl")
    model.dtype = torch.bfloat16
    model.narrow()
    return model


def dtypes(model):
    return {parameter.dtype for parameter in model.parameters()}


class Roundings(TorchDispatchMode):
    """Counts how often tensors of a shape are rounded."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.ops.aten._to_copy.default and args[0].shape == self.shape:
            self.count += kwargs.get("dtype") is torch.bfloat16
        return function(*args, **kwargs)


def test_a_wide_model_computes_in_half_and_a_copy_can_be_narrowed_by_itself():
    model = half_model()
    model.base.config.tie_word_embeddings = True
    model.base.tie_weights()
    model.widen_trained()
    rng = np.random.default_rng(0)
    contexts = [random_context(rng, model.view_maker) for _ in range(3)]
    head, embedding = model.base.lm_head, model.language_model.get_input_embeddings()
    assert head.weight is embedding.weight and dtypes(model) == {torch.float32}
    reference = copy.deepcopy(model)
    reference.narrow()
    assert dtypes(reference) == {torch.bfloat16} and dtypes(model) == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = score(model, contexts, sampling()).logprobs_T
    for scored, limit in ((model, 0.0), (reference, 0.05)):
        with scored.inference():
            found = score(scored, contexts, sampling()).logprobs_T
        torch.testing.assert_close(found, expected, rtol=0, atol=limit)


def test_a_model_whose_parameters_were_narrowed_by_others_runs_as_it_is():
    # FSDP2 and DeepSpeed hand out parameters in what they compute in.
    model = tiny_model("qwen3_vl")
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    with warnings.catch_warnings(action="error"), model.inference():
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("trains", [True, False])
def test_a_wave_rounds_a_weight_once_and_not_for_each_token(trains):
    model = half_model()
    model.widen_trained()
    engine = HFEngine(model)
    if trains:
        engine.precision = MixedPrecision("bf16-mixed", "cpu").forward_context
    context = random_context(np.random.default_rng(0), model.view_maker)
    how = sampling(max_new_tokens=6)
    engine.open(["one"])
    with Roundings(model.base.lm_head.weight.shape) as rounded:
        turn = asyncio.run(engine.generate("one", Context(context.spans[:1]), how, 0))
    assert len(turn.token_ids) > 2
    assert rounded.count == 1
