"""Writes a policy as a checkpoint folder that transformers, vLLM and ``load_policy`` read."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from reframe_vl.policy.loading import Policy

_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "chat_template.jinja")


def export_policy(policy: Policy, folder: Path) -> None:
    """Writes weights, tokenizer and processor settings; an older folder is replaced whole.

    Adapters are merged into a copy of the base in float32, and cast to its dtype last; the trained
    adapter itself is kept in the folder ``adapter``.

    Args:
        policy: The policy; it is not changed.
        folder: Where to write.
    """
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    model: Any = policy.model.model
    if hasattr(model, "merge_and_unload"):
        model.save_pretrained(temporary / "adapter", selected_adapters=model.active_adapters)
        model = _merged(model)
    model.save_pretrained(temporary)
    policy.tokenizer.save_pretrained(temporary)
    for name in _PROCESSOR_FILES:
        source = Path(policy.path) / name
        if source.is_file():
            shutil.copy(source, temporary / name)
    # Old shards beside new ones would win at the next load: never write into a used folder.
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)


def _merged(model: Any) -> Any:
    import copy

    dtype = model.dtype
    return copy.deepcopy(model).float().merge_and_unload().to(dtype)
