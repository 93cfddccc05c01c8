from __future__ import annotations

import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz_text import noise, repeated
from reframe_vl.rewards import math_worker
from reframe_vl.rewards.answer import is_right
from reframe_vl.rewards.number import read_number
from reframe_vl.rewards.text import _strip_emphasis, strip_markup
from reframe_vl.types import Answer

ANSWERS = (
    (Answer("mcq", "B"), ("a cat", "a dog", "7", "none")),
    (Answer("number", "5 million", tolerance=0.01), ()),
    (Answer("open", "the red car"), ()),
    (Answer("span", "$1,204.00"), ()),
)
# A mark of each kind, letters, spaces and what stands beside marks.
marked = st.text(st.sampled_from("*_`~a \n."), max_size=30)


@settings(max_examples=150)
@given(st.sampled_from(ANSWERS), noise | repeated | st.text() | marked)
def test_any_text_is_right_or_wrong(answer: tuple[Answer, tuple[str, ...]], text: str) -> None:
    reference, options = answer
    assert is_right(text, reference, options) in (True, False)
    assert is_right(f"**{reference.value}**", reference, options) is True


@pytest.mark.parametrize("text", ["5 m\u0131ll\u0131on", "5 m\u0130llion", "5 b\u0131llion kg"])
def test_a_dotless_or_dotted_i_spells_no_scale(text: str) -> None:
    read = read_number(text)
    assert read is None or read.value == 5
    assert is_right(text, ANSWERS[1][0]) is False


@pytest.mark.parametrize("text", ["5 MILLION", "5 Million", "5M\u0130L\u0130ON", "5E6", "5000 K"])
def test_the_case_of_a_number_s_words_does_not_matter(text: str) -> None:
    assert is_right(text, ANSWERS[1][0]) is ("\u0130" not in text)


@given(marked)
def test_emphasis_is_stripped_as_one_pattern_of_both_marks_does_it(text: str) -> None:
    slow = r"(?<!\w)(\*{1,3}|_{1,3}|`{1,3}|~~)(?=\S)(.+?)(?<=\S)\1(?!\w)"
    assert _strip_emphasis(text) == re.sub(slow, r"\2", text, flags=re.DOTALL)


# Each takes minutes or hours where the time is that of the square of the length.
@pytest.mark.parametrize("piece", ["*a ", "**a ", "_a ", "`a ", "~~a ", "***a *b"])
def test_thousands_of_marks_that_do_not_close_are_read_in_one_pass(piece: str) -> None:
    assert strip_markup(piece * 50_000).count("a") == 50_000


@pytest.mark.parametrize("opening, closing", [("\\boxed{", "}"), ("\\(", "\\)")])
def test_a_few_layers_of_markup_are_stripped_and_thousands_are_left(
    opening: str, closing: str
) -> None:
    assert strip_markup(opening * 5 + "7" + closing * 5) == "7"
    left = strip_markup(opening * 20_000 + "7" + closing * 20_000)
    assert left.count(opening) == left.count(closing) > 10_000


def test_the_math_worker_loads_what_it_needs_before_its_first_item() -> None:
    loaded = "{name for name in sys.modules if name.startswith('sympy')}"
    code = (
        "import runpy, sys\n"
        f"worker = runpy.run_path({math_worker.__file__!r})\n"
        f"worker['warm_up']()\nbefore = {loaded}\n"
        "for pair in [('2x + 4', '1,000'), ('3', '2'), ('2(x + 2)', '2x + 4')]:\n"
        "    worker['compare'](*pair)\n"
        f"print(sorted({loaded} - before))"
    )
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, check=True)
    assert run.stdout.split() == [b"[]"]
