"""Teachers behind vLLM servers: models too large to stand beside the student."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reframe_vl.policy.loading import Policy
from reframe_vl.policy.model import VisionLanguageModel
from reframe_vl.policy.teachers import Teacher, Teachers
from reframe_vl.rollout.engine import EngineError
from reframe_vl.rollout.vllm_backend import EngineDown
from reframe_vl.rollout.vllm_http import ServerVLLM
from reframe_vl.rollout.vllm_request import check_expansion, known, score_request
from reframe_vl.types import Context, Sampling

logger = logging.getLogger(__name__)


@dataclass
class ServedTeacher(Teacher):
    """A teacher that a server asks for the log-probs of prompts; the server prefills in chunks.

    Attributes:
        url: Of a server that ``reframe_vl.rollout.vllm_server`` started; it serves one run.
        student: Whom it teaches.
        max_concurrent: Contexts under way at once.
        max_tries: How often scoring is begun where the server dies meanwhile.
        start_timeout_s: How long the server may take until it answers, first or again.
    """

    url: str
    student: VisionLanguageModel
    max_concurrent: int = 64
    max_tries: int = 3
    start_timeout_s: float = 600.0

    def log_probs(
        self, contexts: Sequence[Context], sampling: Sampling
    ) -> list[npt.NDArray[np.float32]]:
        """Scores contexts on the server.

        Raises:
            EngineError: The server does not answer, or refuses.
            ExpansionError: It reads other tokens than the student.
        """
        for _ in range(self.max_tries - 1):
            try:
                return asyncio.run(self._log_probs(contexts, sampling))
            except EngineDown as failure:
                logger.warning("The teacher at %s is down (%s): asking again.", self.url, failure)
        return asyncio.run(self._log_probs(contexts, sampling))

    async def _log_probs(
        self, contexts: Sequence[Context], sampling: Sampling
    ) -> list[npt.NDArray[np.float32]]:
        server = ServerVLLM(self.url, self.start_timeout_s)
        slots = asyncio.Semaphore(self.max_concurrent)

        async def one(context: Context) -> npt.NDArray[np.float32]:
            async with slots:
                return await self._one(server, context)

        await server.start()
        try:
            # Each time: the server may have been started again since.
            await server.call(
                "shape_logits",
                str(sampling.temperature or 1.0),
                json.dumps(sampling.banned_ids),
                str(self.student.vocab_size),
            )
            return await asyncio.gather(*map(one, contexts))
        finally:
            await server.close()

    async def _one(self, server: ServerVLLM, context: Context) -> npt.NDArray[np.float32]:
        row = self.student.expand(context)
        if not len(row.trained):
            return np.zeros(0, np.float32)
        request = score_request(context)
        reply = await server.generate(request)
        check_expansion(row.token_ids, reply.prompt_ids, request.views)
        values = [known(reply.prompt_logprobs[at]) for at in row.trained]
        if None in values:
            token = int(row.token_ids[row.trained[values.index(None)]])
            raise EngineError(
                f"The teacher at {self.url} gives no log-prob of token {token}: it is banned in "
                "the student's sampling, or not in the teacher's vocabulary."
            )
        return np.asarray(values, np.float32)


@dataclass
class ServedTeachers(Teachers):
    """Teachers of which some are URLs: those are asked, the others loaded.

    Attributes:
        context_tokens: That a context to score may have; None does not look at what servers take.
    """

    context_tokens: int | None = None

    def check(self, student: Policy, domains: Collection[str] = ()) -> None:
        """Connects to the served ones that are routed to, and looks at the others' folders.

        Raises:
            EngineError: A server does not answer, takes shorter contexts than there may be, or
                reads text in another way than the student.
        """
        for name in self.routed:
            path = str(self.paths[name])
            if name not in self._teachers and path.startswith(("http://", "https://")):
                asyncio.run(_check_tokens(student, path, name, self.context_tokens))
                self.add(name, ServedTeacher(path, student.model))
        super().check(student, domains)

    @property
    def heads_stay(self) -> bool:
        """A served teacher's head is never at hand."""
        served = any(isinstance(teacher, ServedTeacher) for teacher in self._teachers.values())
        return super().heads_stay and not served


async def _check_tokens(student: Policy, url: str, name: str, context_tokens: int | None) -> None:
    """Token ids must mean the same to both: compared on the control tokens and on some text."""
    controls = sorted(student.tokenizer.get_added_vocab())
    text = "".join(controls) + "".join(map(chr, range(32, 127))) + " Größe, 图像, 12345"
    mine = student.tokenizer(text, add_special_tokens=False)["input_ids"]
    # vLLM has no request that asks for no token: to score takes one more than the context has.
    server = ServerVLLM(url, min_length=context_tokens and context_tokens + 1)
    await server.start()
    try:
        theirs = await server.tokenize(text)
    finally:
        await server.close()
    if mine != theirs:
        raise EngineError(
            f"Teacher {name} at {url} reads a text as {len(theirs)} tokens, the student as "
            f"{len(mine)}, or as others: distillation compares ids, so both need one tokenizer."
        )
