"""Starts vLLM's OpenAI-compatible server as the trainer needs it.

    python -m reframe_vl.rollout.vllm_server MODEL [--port 8000] [any option of "vllm serve"]

It is "vllm serve" with the arguments on which trainer and engine have to agree, and with the
endpoints that take weights. These let whoever reaches the port change the model: serve on an
address that only the trainer can reach (127.0.0.1 by default).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from reframe_vl.rollout.vllm_backend import FIXED_ARGUMENTS, default_arguments
from reframe_vl.rollout.vllm_environment import prepare
from reframe_vl.rollout.vllm_lifetime import end_with_owner, own


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Engine arguments as options of its command.

    Example:
        >>> command_line({"max_num_seqs": 8, "enforce_eager": True, "seed": None})
        ['--max-num-seqs', '8', '--enforce-eager']
    """
    words: list[str] = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        match value:
            case None:
                continue
            case True:
                words.append(f"--{option}")
            case False:
                words.append(f"--no-{option}")
            case Mapping():
                words += [f"--{option}", json.dumps(dict(value))]
            case _:
                words += [f"--{option}", str(value)]
    return words


def main(arguments: Sequence[str]) -> None:
    """Serves until it is stopped."""
    if not arguments or arguments[0].startswith("-"):
        raise SystemExit(__doc__)
    # Of a trainer that started this, if one did; the engine's own processes end with this one.
    end_with_owner()
    own()
    prepare()
    os.environ.setdefault("VLLM_SERVER_DEV_MODE", "1")
    os.environ.setdefault("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    # Seconds that an idle connection is kept: whoever asks ends it first.
    os.environ.setdefault("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "60")
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    # What is given twice counts as given last.
    ours = command_line({**FIXED_ARGUMENTS, "enable_scale_out": True})
    first = ["--host", "127.0.0.1", *command_line(default_arguments())]
    sys.argv = ["vllm", *first, *arguments[1:], "--model", arguments[0], *ours]
    serve()


if __name__ == "__main__":
    main(sys.argv[1:])
