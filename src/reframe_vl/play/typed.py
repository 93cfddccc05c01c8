"""An engine whose words are typed by a person."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from reframe_vl.play.screen import Screen
from reframe_vl.rollout.encoding import Encoder
from reframe_vl.rollout.engine import Generation
from reframe_vl.tools.codec import TURN_CLOSE, Codec
from reframe_vl.types import Context, Markup, Provenance, Sampling

HELP = """\
crop X0 Y0 X1 Y1    calls CropImage, in the model's own coordinates
frames N N …        calls SelectFrames
= TEXT              answers
anything else       is the model's turn as it stands; a line that ends in \\ goes on in the next
?                   these lines; Ctrl-D ends the game"""


class TypedEngine:
    """Asks a person for each turn, and gives it on as the tokens the model would have written.

    Args:
        encoder: Of the model.
        codec: Writes the short forms out.
        screen: Shows the context before each turn.
        ask: Reads a line, given what to print before it.
    """

    def __init__(
        self, encoder: Encoder, codec: Codec, screen: Screen, ask: Callable[[str], str]
    ) -> None:
        """Asks for nothing before the first turn."""
        self._encoder, self._codec, self._screen, self._ask = encoder, codec, screen, ask

    def open(self, sessions: Sequence[str]) -> None:
        """A person plays one game at a time."""

    async def generate(
        self, session: str, context: Context, sampling: Sampling, seed: int
    ) -> Generation:
        """Shows the context and reads turns until one could have been sampled.

        Raises:
            EOFError: There is no more input.
        """
        self._screen.show(context)
        while True:
            ids = self._encoder.span([Markup(self._read())], Provenance.SAMPLED).token_ids
            # The model ends its turn with the first such token.
            ends = [at for at, token in enumerate(ids) if token in sampling.stop_ids]
            ids = ids[: ends[0] + 1] if ends else ids
            banned = sorted(set(ids) & set(sampling.banned_ids))
            if banned:
                words = ", ".join(self._encoder.decode([token]) for token in banned)
                self._screen.say(f"The model can never write {words}. Type the turn anew.", "red")
                continue
            if len(ids) > sampling.max_new_tokens:
                limit = sampling.max_new_tokens
                self._screen.say(
                    f"These are {len(ids)} tokens: as the model's turn, it is cut after {limit} "
                    f"(limits.max_new_tokens={limit}).",
                    "yellow",
                )
                return Generation(ids[:limit], (None,) * limit, "length")
            return Generation(ids, (None,) * len(ids), "stop")

    def release(self, session: str) -> None:
        """Nothing is kept for a session."""

    def close(self) -> None:
        """Nothing is held."""

    def _read(self) -> str:
        while True:
            lines = [self._ask("> ")]
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1][:-1]
                lines.append(self._ask(". "))
            typed = "\n".join(lines)
            if typed.strip() != "?":
                return turn_text(typed, self._codec)
            self._screen.say(HELP)


def turn_text(typed: str, codec: Codec) -> str:
    """A turn as the model would write it.

    Args:
        typed: A short form (see ``HELP``), or the turn itself.
        codec: Of the model family.
    """
    word, _, rest = typed.strip().partition(" ")
    if word == "=":
        return codec.render_answer(rest.strip())
    if word in ("crop", "frames"):
        numbers = _numbers(rest)
        if numbers is not None:
            crop = word == "crop"
            arguments = {"bbox_2d" if crop else "frames": numbers}
            return codec.render_call("CropImage" if crop else "SelectFrames", arguments)
    return f"{typed}{TURN_CLOSE}"


def _numbers(text: str) -> list[int | float] | None:
    """Numbers between spaces or commas; None where something else is among them."""
    try:
        found = [json.loads(word) for word in text.replace(",", " ").split()]
    except ValueError:
        return None
    return found if found and all(type(n) in (int, float) for n in found) else None
