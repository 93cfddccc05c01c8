import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reframe_vl.rewards.choice import letter_of, read_choice

OPTIONS = ("a cat", "the dog", "None of the above", "two foxes")


@pytest.mark.parametrize(
    "text",
    [
        "D", "d", "(D)", "(d).", "D.", "D)", "[D]", "**D**", "`D`", "*D*", " D \n", '"D"', "$D$",
        r"\boxed{D}", r"$\boxed{\text{D}}$", r"\(D\)", "Answer: D", "answer: d", "Answer: **D**",
        "**Answer:** D", "**Answer: D**", "The answer is D.", "The correct answer is (D).",
        "Option D", "The correct option is D", "choice: d", "final D", "\uff24",
        "I considered (A) ... final D", "I considered (A), but the final answer is **D**.",
        "two foxes", "Two foxes.", "**two foxes**", "(D) two foxes", "D. Two foxes", "D: two foxes",
        "Answer: (D) two foxes", "The answer is two foxes", "Answer: A. No, final answer: D",
    ],
)  # fmt: skip
def test_d06_d11_an_option_is_read_however_it_is_dressed(text: str) -> None:
    assert read_choice(text, OPTIONS) == "D"


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "it is a dog", "It is a fox", "correct", "Don't know", "A or B", "A, B", "A B",
        "ABCD", "A B C D", "(A)(B)(C)(D)", "A. B. C. D.", "A) B) C) D)", "E", "Z", "1", "Aa",
        "dogs", "(D) a cat", "D. a cat", "Answer: A or D", "answer", "final", "Answer:",
        "I think therefore I am", "a dog or a cat", "D'oh", "Plan B it is",
        " ".join(f"({letter_of(i)}) {option}" for i, option in enumerate(OPTIONS)),
        "\n".join(f"{letter_of(i)}. {option}" for i, option in enumerate(OPTIONS)),
        "What is it? " + " ".join(OPTIONS),
    ],
)  # fmt: skip
def test_d10_d12_letters_of_words_lists_and_hedges_are_no_option(text: str) -> None:
    assert read_choice(text, OPTIONS) is None


@pytest.mark.parametrize("text", ["None of the above", "Don't know", "it is a dog", "correct"])
def test_d12_a_phrase_is_no_option_where_the_options_are_not_known(text: str) -> None:
    assert read_choice(text) is None


def test_d12_a_phrase_is_the_option_that_it_is_the_whole_text_of() -> None:
    assert read_choice("none of the above", OPTIONS) == "C"


def test_a_letter_wins_over_an_option_whose_text_is_that_letter() -> None:
    assert read_choice("A", ("B", "A")) == "A"


def test_a_text_that_two_options_share_states_neither() -> None:
    assert read_choice("cat", ("cat", "a cat", "dog")) is None


def test_a_letter_in_front_of_an_option_is_not_part_of_its_text() -> None:
    assert read_choice("red", ("A. blue", "B. red")) == "B"
    assert read_choice("B. red", ("A. blue", "B. red")) == "B"


@given(st.integers(2, 26), st.sampled_from(string.ascii_letters))
def test_only_letters_of_existing_options_are_valid(count: int, letter: str) -> None:
    options = [f"thing number {i}" for i in range(count)]
    expected = letter.upper() if letter.upper() in string.ascii_uppercase[:count] else None
    assert read_choice(letter, options) == expected


@given(st.text(max_size=60))
def test_any_text_gives_a_valid_letter_or_none(text: str) -> None:
    assert read_choice(text, OPTIONS) in {None, "A", "B", "C", "D"}


@given(st.lists(st.sampled_from(["it", "is", "bad", "cab", "ace", "dead", "and"]), min_size=2))
def test_d10_sentences_of_words_never_give_an_option(words: list[str]) -> None:
    assert read_choice(" ".join(words), OPTIONS) is None
