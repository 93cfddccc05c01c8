"""Makes the verifiers of the data pipeline from what a config says of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reframe_vl.data.chat_endpoint import EndpointSettings
from reframe_vl.data.verifiers.base import Verifier
from reframe_vl.data.verifiers.endpoint import EndpointVerifier

_LOCAL = frozenset(("max_new_tokens", "max_concurrent"))
_LOADING = frozenset(("family", "dtype", "thinking"))


def make_verifier(name: str, given: object) -> Verifier:
    """A verifier from its settings: ``url`` and ``model`` of an endpoint, or ``checkpoint``.

    Raises:
        ValueError: A setting is unknown, wrong or missing.
        FileNotFoundError: The checkpoint is not there.
    """
    wrong = f"verifiers.{name}: give url and model of an endpoint, or checkpoint, a folder"
    if not isinstance(given, Mapping) or ("url" in given) == ("checkpoint" in given):
        raise ValueError(f"{wrong}.")
    if "checkpoint" in given:
        return _local(name, given)
    return EndpointVerifier(EndpointSettings.of(given, f"verifiers.{name}"), name)


def _local(name: str, given: Mapping[str, Any]) -> Verifier:
    if given.keys() - _LOCAL - _LOADING - {"checkpoint"}:
        raise ValueError(
            f"verifiers.{name}: beside checkpoint there are {', '.join(sorted(_LOCAL | _LOADING))}."
        )
    # These load PyTorch, which a build without a local model does not need.
    from reframe_vl.policy.loading import load_policy
    from reframe_vl.rollout.hf_engine import HFEngine
    from reframe_vl.rollout.verifier import LocalVerifier

    loading = {key: given[key] for key in _LOADING & given.keys()}
    policy = load_policy(given["checkpoint"], **loading)
    local = {key: given[key] for key in _LOCAL & given.keys()}
    return LocalVerifier(policy, HFEngine(policy.model), name, **local)
