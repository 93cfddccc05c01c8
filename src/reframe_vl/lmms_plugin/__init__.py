"""The agent inside lmms-eval, which finds it by an entry point (docs/evaluation.md).

lmms-eval reads the entry point while it is being loaded: nothing here may load its models.
"""

from __future__ import annotations

from typing import Any

NAME = "reframe"
"""What lmms-eval's ``--model`` calls it."""


def manifest() -> Any:
    """Tells lmms-eval where the agent's class is."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest(NAME, simple_class_path=f"{__name__}.agent.ReframeAgent")
