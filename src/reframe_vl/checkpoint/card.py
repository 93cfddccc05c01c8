"""The model card: what a checkpoint folder says of itself to whoever finds it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib.metadata import version

CARD = "README.md"

_SHOWN = ("val/", "rollouts/reward", "rollouts/call_rate", "train/entropy", "train/loss")


def model_card(base: str, settings: str, steps: int, numbers: Mapping[str, float]) -> str:
    """Says what a model was trained from, how, and how well it did.

    Args:
        base: The folder or name of the model that training began with.
        settings: The run's configuration, as YAML.
        steps: That it was trained for.
        numbers: What was measured last; those of the policy as a whole are shown.
    """
    shown = {n: v for n, v in sorted(numbers.items()) if n.startswith(_SHOWN) and math.isfinite(v)}
    rows = "\n".join(f"| {name} | {value:.4g} |" for name, value in shown.items())
    measured = f"| measure | last value |\n|---|---|\n{rows}" if rows else "Nothing was measured."
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    return f"""---
base_model: {base}
library_name: transformers
pipeline_tag: image-text-to-text
tags:
- reframe
- reinforcement-learning
---

# A visual agent trained with Reframe

Trained from `{base}` for {steps} steps. It answers questions about images and videos, and calls
tools to look closer; the tool prompt is part of its chat template's input.

```python
from transformers import AutoModelForImageTextToText, AutoProcessor

model = AutoModelForImageTextToText.from_pretrained("<this folder>")
processor = AutoProcessor.from_pretrained("<this folder>")
```

## Measures

{measured}

## Configuration

Written with {packages}.

```yaml
{settings.strip()}
```
"""
