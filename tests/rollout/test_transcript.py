from collections.abc import Sequence
from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from reframe_vl.rollout.transcript import call_line, transcript
from reframe_vl.types import (
    CallRecord,
    CallStatus,
    Context,
    Provenance,
    Rollout,
    RolloutKey,
    Sampling,
    Span,
    Termination,
)

hostile = st.lists(
    st.sampled_from(
        [
            "`",
            "```",
            "````text",
            "\n",
            "~~~",
            "<script>",
            "# h",
            "[a](b)",
            "\x1b[31m",
            "\ud800",
            "x",
        ]
    ),
    max_size=8,
).map("".join)


def decode(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


def rollout(text: str = "look", **fields) -> Rollout:
    span = Span(Provenance.SAMPLED, tuple(map(ord, text)), logprobs=(-0.5,) * len(text))
    return Rollout(
        fields.pop("key", RolloutKey(0, 12, "s", 3)),
        [Context([Span(Provenance.PROMPT, (63,)), span])],
        Sampling(),
        Termination.ANSWERED,
        **fields,
    )


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)


@given(hostile)
def test_what_a_model_wrote_is_shown_and_not_obeyed(text):
    call = CallRecord(0, text, {text: [text]}, CallStatus.REFUSED, reason=text)
    written = transcript(
        rollout(
            text,
            key=RolloutKey(0, 0, text, 0),
            calls=[call],
            answers=[text],
            rewards={text: 1.0},
            error=text,
        ),
        decode,
    )
    assert all(c.isprintable() or c == "\n" for c in written)
    tokens = MarkdownIt().parse(written)
    assert [t.type for t in tokens if t.type in ("fence", "heading_open")] == [
        *("heading_open", "fence"),
        *("heading_open", "fence", "fence"),
        *("heading_open", "fence"),
    ]
    page = Tags()
    page.feed(MarkdownIt().render(written))
    assert page.tags <= {"h2", "h3", "p", "strong", "pre", "code"}


def test_turns_provenance_calls_reasons_and_rewards_are_told():
    calls = [
        CallRecord(
            0, "CropImage", {"bbox_2d": [0, 0, 9, 9]}, CallStatus.OK, ((0.0, 0.0, 8.5, 9.0),)
        ),
        CallRecord(1, "", {}, CallStatus.REFUSED, reason="not_json"),
    ]
    shown = rollout(calls=calls, answers=["7"], rewards={"answer": 1.0, "call": None}, reward=1.5)
    shown.contexts.append(
        Context([Span(Provenance.SAMPLED, (108,), carried=True), Span(Provenance.OBSERVED, (111,))])
    )
    text = transcript(shown, decode)
    for part in (
        "rollout     3 of step 12",
        'answers     "7"',
        "reward      1.5 (answer 1, call none), advantage none",
        "original    dropped",
        "**prompt**, 1 tokens\n\n```text\n?\n```",
        "**sampled**, 4 tokens, log-probability -2\n\n```text\nlook\n```",
        "carried over from the context before\n\n**observed**",
        'turn 0: ok CropImage {"bbox_2d": [0, 0, 9, 9]} -> pixels [0, 0, 8.5, 9]',
        "turn 1: refused (not_json) no tool {}",
    ):
        assert part in text


def test_a_call_is_one_line():
    call = CallRecord(0, "a\nb", {"x": "\r\n"}, CallStatus.OK, frames=(1, 2), by_gate=True)
    assert call_line(call) == r'turn 0: ok by the gate a\nb {"x": "\r\n"} -> frames 1, 2'
