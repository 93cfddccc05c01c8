"""Builds the next step's prompts while the present one trains: media are read and resized then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from reframe_vl.rollout.prompt import Prompt
from reframe_vl.types import Sample


class PromptsAhead:
    """Prompts by sample; those that were begun in time are ready.

    What comes of it does not depend on what was begun: a prompt depends on its sample alone.

    Args:
        build: Makes a sample's prompt; an exception reaches whoever takes the prompt.
    """

    def __init__(self, build: Callable[[Sample], Prompt]) -> None:
        self._build = build
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prompts-ahead")
        self._begun: dict[str, Future[Prompt]] = {}

    def begin(self, samples: Sequence[Sample]) -> None:
        """Begins to build these, and forgets the others."""
        for future in self._begun.values():
            future.cancel()
        distinct = {sample.id: sample for sample in samples}
        self._begun = {i: self._thread.submit(self._build, s) for i, s in distinct.items()}

    def take(self, sample: Sample) -> Prompt:
        """A sample's prompt, once."""
        future = self._begun.pop(sample.id, None)
        return self._build(sample) if future is None else future.result()

    def close(self) -> None:
        """Ends the thread; prompts are built when they are taken from now on."""
        self.begin([])
        self._thread.shutdown(cancel_futures=True)
