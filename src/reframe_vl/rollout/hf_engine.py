"""The in-process transformers engine: the embedded default, and the reference for others.

It shares the policy's weights, so there is nothing to synchronise. A group's common prompt runs
once; a rollout's cache is kept across its turns; results depend on the requests alone, never on
their timing.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

from reframe_vl.policy.inputs import ExpandedContext, shared_prefix
from reframe_vl.policy.model import (
    Batch,
    VisionLanguageModel,
    VisualFeatures,
    sampling_log_probs,
)
from reframe_vl.rollout import kv_cache
from reframe_vl.rollout.engine import EngineError, Generation
from reframe_vl.types import Context, Sampling, View


@dataclass
class _Session:
    """What the cache of a session holds."""

    cache: kv_cache.RowCache | None = None
    token_ids: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    blocks: tuple[tuple[int, View], ...] = ()

    def keep_prefix(self, row: ExpandedContext) -> int:
        """Tokens of ``row`` that are in the cache, which then holds no others.

        The gate rewrites the end of a turn: what stands before it need not run again.
        """
        if self.cache is None:
            return 0
        shared = shared_prefix(self.token_ids, self.blocks, row.token_ids, row.blocks)
        # One token must run to predict the next.
        shared = min(shared, len(row.token_ids) - 1)
        for start, view in row.blocks:
            if start < shared < start + view.num_tokens:
                shared = start
        # Little is saved by a short beginning, and equal rows that start afresh run once for all.
        if shared < self.cache.length and not (
            self.cache.can_be_cut and 2 * shared > len(row.token_ids)
        ):
            return 0
        self.cache = self.cache.cut(shared)
        return shared


@dataclass
class _Request:
    session: str
    row: ExpandedContext
    sampling: Sampling
    seed: int
    future: asyncio.Future[Generation]


@dataclass
class _Row:
    """A request after its prompt has run."""

    request: _Request
    cache: kv_cache.RowCache
    hidden: Float[Tensor, "hidden"]


class HFEngine:
    """Batched generation with a transformers model in this process.

    Args:
        model: The policy itself.
        max_batch_size: Rollouts that decode together.
        max_prefill_tokens: Prompt tokens of one forward (a longer prompt goes alone).
        precision: Entered around every wave, for mixed precision.
    """

    def __init__(
        self,
        model: VisionLanguageModel,
        *,
        max_batch_size: int = 256,
        max_prefill_tokens: int = 16384,
        precision: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.model = model
        self.max_batch_size = max_batch_size
        self.max_prefill_tokens = max_prefill_tokens
        self.precision = precision
        self._sessions: dict[str, _Session] = {}
        self._pending: dict[str, _Request] = {}

    # ------------------------------------------------------------------ Engine protocol

    def open(self, sessions: Sequence[str]) -> None:
        """Announces sessions; generation waits until each of them asks or is released."""
        self._sessions |= {session: _Session() for session in sessions}

    async def generate(
        self, session: str, context: Context, sampling: Sampling, seed: int
    ) -> Generation:
        """Samples the next turn of a session, together with all other open sessions'."""
        if session not in self._sessions:
            raise EngineError(f"Session {session} was not opened: call open() before generate().")
        future = asyncio.get_running_loop().create_future()
        row = self.model.expand(context)
        self._pending[session] = _Request(session, row, sampling, seed, future)
        self._run_when_complete()
        return await future

    def release(self, session: str) -> None:
        """Frees a session's cache; the others no longer wait for it."""
        self._sessions.pop(session, None)
        self._pending.pop(session, None)
        self._run_when_complete()

    def close(self) -> None:
        """Frees all caches."""
        self._sessions.clear()
        self._pending.clear()

    # ------------------------------------------------------------------ one wave

    def _run_when_complete(self) -> None:
        if not self._pending or len(self._pending) < len(self._sessions):
            return
        # Sessions keep the order in which they were opened, whatever order they asked in.
        requests = [self._pending[s] for s in self._sessions]
        self._pending = {}
        results: list[Generation] = []
        try:
            results = self._generate(requests)
        finally:
            # On a failure the caller gets the exception; nobody may wait for ever.
            for request, result in itertools.zip_longest(requests, results):
                if result is None:
                    request.future.cancel()
                else:
                    request.future.set_result(result)

    def _generate(self, requests: list[_Request]) -> list[Generation]:
        results: dict[str, Generation] = {}
        by_sampling: dict[Sampling, list[_Request]] = {}
        for request in requests:
            by_sampling.setdefault(request.sampling, []).append(request)
        # The model's own is the inner one: it rounds a weight once a wave, not for every token.
        with self.precision(), self.model.inference():
            for sampling, group in by_sampling.items():
                for start in range(0, len(group), self.max_batch_size):
                    rows = self._prefill(group[start : start + self.max_batch_size])
                    results |= self._decode(rows, sampling)
        return [results[request.session] for request in requests]

    def _prefill(self, requests: list[_Request]) -> list[_Row]:
        """Runs what is not cached: each distinct new prompt once, else a session's suffix."""
        starts = [self._sessions[r.session].keep_prefix(r.row) for r in requests]
        features = self.model.encode(
            [
                view
                for request, start in zip(requests, starts, strict=True)
                for view in request.row.views_from(start)
            ]
        )
        jobs: dict[object, list[int]] = {}
        for index, (request, start) in enumerate(zip(requests, starts, strict=True)):
            row = request.row
            fresh = (row.token_ids.tobytes(), tuple((at, v.hash) for at, v in row.blocks))
            jobs.setdefault(request.session if start else fresh, []).append(index)
        # Rows of a bucket run the same number of new tokens: recurrent layers admit no padding.
        buckets: dict[tuple[int, bool], list[list[int]]] = {}
        for members in jobs.values():
            first = members[0]
            new_tokens = len(requests[first].row.token_ids) - starts[first]
            buckets.setdefault((new_tokens, bool(starts[first])), []).append(members)
        rows: dict[int, _Row] = {}
        for (new_tokens, _), bucket in buckets.items():
            size = max(1, self.max_prefill_tokens // new_tokens)
            for at in range(0, len(bucket), size):
                part = bucket[at : at + size]
                heads = [members[0] for members in part]
                caches, hidden = self._run_prompts(
                    [requests[i] for i in heads], [starts[i] for i in heads], features
                )
                for members, cache, state in zip(part, caches, hidden, strict=True):
                    rows |= {i: _Row(requests[i], cache, state) for i in members}
        return [rows[i] for i in range(len(requests))]

    def _run_prompts(
        self, requests: list[_Request], starts: list[int], features: VisualFeatures | None
    ) -> tuple[list[kv_cache.RowCache], Float[Tensor, "B hidden"]]:
        batch = self.model.batch([r.row for r in requests], starts)
        old = [self._sessions[r.session].cache for r in requests]
        held = [cache for cache, start in zip(old, starts, strict=True) if cache and start]
        if held:
            cache, width = kv_cache.stack(held, self.model.language_model.config)
            mask = _left_padding_mask([c.length for c in held], width, batch.ids.shape[1])
        else:
            cache = kv_cache.empty(self.model.language_model.config)
            mask = None
        hidden = self.model.hidden_states(
            batch,
            features,
            past_key_values=cache,
            use_cache=True,
            attention_mask=None if mask is None else mask.to(batch.ids.device),
        )
        lengths = [len(r.row.token_ids) for r in requests]
        return [kv_cache.take(cache, i, n) for i, n in enumerate(lengths)], hidden[:, -1]

    def _decode(self, rows: list[_Row], sampling: Sampling) -> dict[str, Generation]:
        """Samples turns for all rows; a row leaves the batch when its turn ends."""
        config = self.model.language_model.config
        lengths = [row.cache.length for row in rows]
        cache, width = kv_cache.stack([row.cache for row in rows], config)
        device = rows[0].hidden.device
        mask = _left_padding_mask(lengths, width, 0)
        mask = None if mask is None else mask.to(device)
        hidden = torch.stack([row.hidden for row in rows])
        positions = torch.tensor([row.request.row.next_position for row in rows], device=device)
        uniforms = torch.tensor(
            np.stack([_uniforms(row.request.seed, sampling.max_new_tokens) for row in rows]),
            device=device,
        )
        stop = torch.tensor(sampling.stop_ids, dtype=torch.long, device=device)
        active = list(range(len(rows)))
        tokens: list[list[int]] = [[] for _ in rows]
        logprobs: list[list[float]] = [[] for _ in rows]
        results: dict[str, Generation] = {}
        for step in range(sampling.max_new_tokens):
            drawn, values = draw(self.model.head(hidden), sampling, uniforms[:, step])
            for row, token, value in zip(active, drawn.tolist(), values.tolist(), strict=True):
                tokens[row].append(token)
                logprobs[row].append(value)
            stopped = torch.isin(drawn, stop)
            last = step + 1 == sampling.max_new_tokens
            ended = torch.ones_like(stopped) if last else stopped
            if bool(ended.any()):
                for at in ended.nonzero()[:, 0].tolist():
                    row = active[at]
                    request = rows[row].request
                    # The last token has not been fed: the next turn's suffix begins with it.
                    self._keep(
                        request, kv_cache.take(cache, at, lengths[row] + step), tokens[row][:-1]
                    )
                    results[request.session] = Generation(
                        tuple(tokens[row]),
                        tuple(logprobs[row]),
                        "stop" if bool(stopped[at]) else "length",
                    )
                going = (~ended).nonzero()[:, 0]
                if not len(going):
                    break
                kv_cache.select(cache, going)
                active = [active[i] for i in going.tolist()]
                drawn, positions, uniforms = drawn[going], positions[going], uniforms[going]
                mask = None if mask is None else mask[going]
            if mask is not None:
                mask = torch.cat([mask, mask.new_ones(len(active), 1)], 1)
            hidden = self.model.hidden_states(
                _one_token_batch(drawn, positions),
                None,
                past_key_values=cache,
                use_cache=True,
                attention_mask=mask,
            )[:, -1]
            positions = positions + 1
        return results

    def _keep(self, request: _Request, cache: kv_cache.RowCache, fed: list[int]) -> None:
        session = self._sessions[request.session]
        session.cache = cache
        session.token_ids = np.concatenate([request.row.token_ids, np.asarray(fed, np.int64)])
        session.blocks = request.row.blocks


def draw(
    logits: Float[Tensor, "B V"], sampling: Sampling, uniforms_B: Float[Tensor, "B"]
) -> tuple[Int[Tensor, "B"], Float[Tensor, "B"]]:
    """Draws one token a row by inverting the distribution function at the given uniforms.

    A row's token depends on its own logits and uniform only, whatever shares the batch.

    Returns:
        The tokens and their log-probabilities under the distribution drawn from.
    """
    table = sampling_log_probs(logits, sampling)
    banned = torch.tensor(sampling.banned_ids, dtype=torch.long, device=logits.device)
    if sampling.temperature == 0:
        tokens = table.index_fill(-1, banned, float("-inf")).argmax(-1)
    else:
        # float64, since a float32 cumulative sum over a large vocabulary loses rare tokens.
        cumulative = table.double().exp().index_fill(-1, banned, 0.0).cumsum(-1)
        target = uniforms_B.double()[:, None] * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, target, right=True)[:, 0]
        # Rounding at the top end must not fall off the table or onto a banned id.
        last_allowed = (cumulative < cumulative[:, -1:]).sum(-1)
        tokens = torch.minimum(tokens, last_allowed)
    return tokens, table.gather(-1, tokens[:, None])[:, 0]


def _uniforms(seed: int, count: int) -> npt.NDArray[np.float64]:
    return np.random.Generator(np.random.Philox(seed)).random(count)


def _left_padding_mask(lengths: list[int], width: int, new: int) -> Int[Tensor, "B T"] | None:
    """1 for real tokens, or None where no row has padding."""
    if min(lengths) == width:
        return None
    columns = torch.arange(width + new)
    starts = torch.tensor([width - length for length in lengths])
    return (columns >= starts[:, None]).long()


def _one_token_batch(tokens: Int[Tensor, "B"], positions: Int[Tensor, "B"]) -> Batch:
    ids = tokens[:, None]
    return Batch(
        ids, positions[None, :, None].expand(3, -1, -1), [1] * len(ids), ids.bool() & False, []
    )
