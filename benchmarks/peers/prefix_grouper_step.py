"""The side of the package ``prefix-grouper``: attention that runs a group's shared prompt once.

The package splits and joins the queries, keys and values of a group inside each attention layer.
It has no trainer, no generation and no model: positions, images, head, loss and optimiser are
supplied here, as its documentation asks for, in the leanest form: the vision tower runs once for
the group, logits are those of completion tokens, and images are cut into patches before the clock
starts. Its attention interface is written for FlashAttention 2; on a CPU torch's fused attention
takes its place.

Runs in the environment that ``make trl-env`` makes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from exchange import MODEL, Stopwatch, Work, serve
from torchvision_operators import import_torchvision

KEPT = import_torchvision()

from PIL import Image  # noqa: E402
from prefix_grouper import PrefixGrouper  # noqa: E402
from prefix_grouper.utils.register_transformers import register_attention  # noqa: E402
from transformers import (  # noqa: E402
    AttentionInterface,
    AutoModelForImageTextToText,
    AutoProcessor,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402

LOWER_RIGHT = "lower_right_sdpa"


def lower_right_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What FlashAttention does: the last query sees all keys, each one before it one key less.

    The mask, which tells padding, is not needed: rollouts have one length.
    """
    queries, keys = query.shape[2], key.shape[2]
    # torch's own causal form aligns the first query with the first key.
    mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)[None, None]
    return sdpa_attention_forward(
        module, query, key, value, None if queries == keys else mask, scaling=scaling
    )


def train(folder: Path, work: Work, stopwatch: Stopwatch) -> dict[str, Any]:
    """Takes a step on each prompt; rollouts that are not given are random tokens."""
    register_attention()
    AttentionInterface.register(LOWER_RIGHT, lower_right_attention)
    path = folder / MODEL
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).train()
    model.config.text_config._attn_implementation = "prefix_grouper_attention"
    processor = AutoProcessor.from_pretrained(path)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    given = len(work.completions) > 0
    shape = (work.num_rollouts, work.num_tokens)
    prompt_ids: list[int] = []
    for pixels, question in zip(work.images, work.questions, strict=True):
        prompt = _processed(processor, pixels, str(question))
        prompt_ids = prompt["input_ids"][0].tolist()
        # Any ids do that are of letters.
        completions = torch.from_numpy(work.completions) if given else torch.randint(64, 256, shape)
        advantages = torch.from_numpy(work.advantages).float() if given else torch.randn(shape[0])
        stopwatch.begin()
        stopwatch.rollouts_are_there()
        logprobs, entropy = _score(model, prompt, completions)
        ratio = (logprobs - logprobs.detach()).exp()
        advantages_GT = advantages[:, None]
        loss = -torch.min(ratio * advantages_GT, ratio.clamp(0.8, 1.2) * advantages_GT).mean()
        optimizer.zero_grad()
        loss.backward()
        if not given:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        entropy.mean().item()
        stopwatch.end()
    parameters = model.named_parameters() if given else ()
    return {
        "gradients": {n: p.grad.numpy() for n, p in parameters if p.grad is not None},
        "prompt_ids": prompt_ids,
    }


def _processed(processor: Any, pixels: Any, question: str) -> Any:
    content = [{"type": "image", "image": Image.fromarray(pixels)}]
    return processor.apply_chat_template(
        [[{"role": "user", "content": [*content, {"type": "text", "text": question}]}]],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )


def _score(model: Any, prompt: Any, completions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of completion tokens, (G, T)."""
    prompt_ids, prompt_mask = prompt["input_ids"], prompt["attention_mask"]
    completion_mask = torch.ones_like(completions)
    group, length = completions.shape
    grouper = PrefixGrouper.from_ungrouped_masks(
        prompt_mask.bool(), completion_mask.bool(), group_sizes=group, padding_mode="right"
    )
    ids = grouper.concat_input(prompt_ids, prompt_mask, completions, completion_mask)
    positions, _ = model.model.get_rope_index(
        prompt_ids, prompt["mm_token_type_ids"], image_grid_thw=prompt["image_grid_thw"]
    )
    after = positions.max() + 1 + torch.arange(length)
    positions = torch.cat([positions, after.expand(3, 1, -1).repeat(1, 1, group)], -1)
    tower = model.model.visual(
        prompt["pixel_values"], grid_thw=prompt["image_grid_thw"], return_dict=True
    )
    images = ids == model.config.image_token_id
    embeds = model.model.language_model.get_input_embeddings()(ids)
    embeds = embeds.masked_scatter(images[..., None], tower.pooler_output)
    hidden = model.model.language_model(
        inputs_embeds=embeds,
        position_ids=positions,
        visual_pos_masks=images,
        deepstack_visual_embeds=tower.deepstack_features,
        use_cache=False,
        prefix_grouper=grouper,
        prefix_grouper_attn_func=LOWER_RIGHT,
    ).last_hidden_state
    _, _, states, _ = grouper.split_output(hidden, include_prefix_last=1)
    table = model.lm_head(states[:, :-1]).float().log_softmax(-1)
    with torch.no_grad():
        entropy = -(table.exp() * table).sum(-1)
    return table.gather(-1, completions[..., None])[..., 0], entropy


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(train)
