"""What runs inside vLLM's own processes, beside its worker (``worker_extension_cls``).

Importing this module makes the process end when the one that started the engine has died.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from reframe_vl.rollout.vllm_lifetime import end_with_owner


class WeightSync:
    """Methods that the trainer calls by name, on every worker."""

    model_runner: Any
    reload_weights: Any

    def take_weights(self, folder: str) -> None:
        """Loads all weights from a folder of safetensors."""
        # It warns, each time, of modules that have none.
        logging.getLogger("vllm.model_executor.model_loader.reload").setLevel(logging.ERROR)
        self.reload_weights(weights_path=folder)
        self._pack_tied_heads()

    def count_adapted_modules(self) -> int:
        """Modules that the present LoRA adapter changes: with 0 the base would answer."""
        manager = self.model_runner.lora_manager._adapter_manager
        adapters = manager.list_adapters().values()
        return sum(a.get_lora(name) is not None for a in adapters for name in manager.modules)

    def shape_logits(self, temperature: str, banned_ids: str, vocab_size: str) -> None:
        """Makes all log-probs those of a student's sampling distribution.

        vLLM applies temperature and biases to sampled tokens only; a teacher is asked about tokens
        of the prompt.

        Args:
            temperature: A number; strings, since a server passes nothing else on.
            banned_ids: A JSON list of ids.
            vocab_size: Of the student, who never draws ids beyond.
        """
        import torch

        # The model itself: on an accelerator the runner holds it in a wrapper for CUDA graphs.
        model = self.model_runner.get_model()
        plain = type(model).compute_logits
        banned = torch.tensor(json.loads(banned_ids), dtype=torch.long, device=self._device)
        scale, size = float(temperature), int(vocab_size)

        def compute_logits(*args: Any, **kwargs: Any) -> Any:
            logits = plain(model, *args, **kwargs)
            if logits is None:
                return None
            # The student bans its own padded rows too, and the teacher may have fewer.
            own = banned[banned < logits.shape[-1]]
            logits = (logits.float() / scale).index_fill(-1, own, float("-inf"))
            logits[..., size:] = float("-inf")
            return logits

        model.compute_logits = compute_logits

    @property
    def _device(self) -> Any:
        return self.model_runner.device

    def _pack_tied_heads(self) -> None:
        """On a CPU a head that is tied to the embedding keeps a packed copy of the old weights."""
        import torch

        if self._device != torch.device("cpu"):
            return
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for module in self.model_runner.model.modules():
            if isinstance(module, ParallelLMHead):
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)


# vLLM imports this before it loads the model and calls nothing here until all is ready: a trainer
# may be killed in between.
end_with_owner()
