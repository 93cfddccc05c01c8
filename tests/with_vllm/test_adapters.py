import pytest
from peft import LoraConfig, get_peft_model

from reframe_vl.policy.loading import load_policy
from reframe_vl.rollout.engine import EngineError
from tiny import sampling
from vllm_models import agree, changed, play, sampled


def with_adapter(model, targets):
    model.model = get_peft_model(model.model, LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    return model


@pytest.fixture(scope="module")
def engine(checkpoint, make_engine):
    targets = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
    return make_engine(with_adapter(load_policy(checkpoint).model, targets))


def base_answers(engine, loop):
    """What the engine's base says, without the adapter."""
    adapter, engine.backend._adapter = engine.backend._adapter, None
    try:
        return sampled(loop.run(play(engine, sampling(max_new_tokens=6), together=False)))
    finally:
        engine.backend._adapter = adapter


def test_f18_adapters_change_what_is_said_and_never_the_base(engine, loop):
    how = sampling(max_new_tokens=6)
    checksums = loop.run(engine.backend._llm.compute_weight_checksums())
    base = base_answers(engine, loop)
    loop.run(engine.sync(engine.model, 0))
    # A fresh adapter adds nothing.
    agree(engine.model, loop.run(play(engine, how)), how)
    seen = []
    for version in range(1, 101):
        loop.run(engine.sync(changed(engine.model, version, 0.05), version))
        if version % 25 == 1:
            contexts = loop.run(play(engine, how))
            agree(engine.model, contexts, how)
            seen.append(tuple(sampled(contexts)))
    assert len(set(seen)) == len(seen) and tuple(base) not in seen
    assert base_answers(engine, loop) == base
    assert loop.run(engine.backend._llm.compute_weight_checksums()) == checksums
    assert sum(len(worker) for worker in checksums) > 20


def test_g05_an_adapter_that_fits_no_module_is_refused(engine, loop, checkpoint, tmp_path):
    other = with_adapter(load_policy(checkpoint).model, r".*visual.*\.(qkv|proj)")
    other.model.save_pretrained(tmp_path)
    # vLLM itself refuses names that it does not know, or else applies none of them.
    with pytest.raises(Exception, match=r"module|LoRA|lora") as failure:
        loop.run(engine.backend.load_adapter(tmp_path))
    assert isinstance(failure.value, EngineError) or "module" in str(failure.value)
