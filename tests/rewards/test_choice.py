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
        "So the answer is D", "Therefore, my final answer is option D.", "I choose option D",
        "I'll go with option D.", "The correct answer is: option (D) two foxes", "### Answer: D",
        "Based on the picture, the answer is D.", "It has two tails, so the answer is D",
        "It is not A, so the answer is D", "I am not sure, but the answer is D",
        "Not A. The answer is D.", "Let me think:\nAnswer: D", "Final answer:\nOption D",
        "It's option D", "Probably option D", "Without a doubt, the answer is D",
        "A dog? No. Answer: D", "I reject (A).\n\nAnswer: **D**",
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
        "option A option D", "option A, option D", "Option A. Option D.", "Answer: A. Answer: D",
        "A or option D", "Is the answer D?",
        " ".join(f"({letter_of(i)}) {option}" for i, option in enumerate(OPTIONS)),
        "\n".join(f"{letter_of(i)}. {option}" for i, option in enumerate(OPTIONS)),
        "What is it? " + " ".join(OPTIONS),
    ],
)  # fmt: skip
def test_d10_d12_letters_of_words_lists_and_hedges_are_no_option(text: str) -> None:
    assert read_choice(text, OPTIONS) is None


@pytest.mark.parametrize("options", [OPTIONS, ("cat", "dog", "cow", "fox"), ()])
@pytest.mark.parametrize(
    "text",
    [
        "It cannot be option D", "I reject option D", "I would never choose option D",
        "wrong answer: D", "The incorrect option is D", "not the right choice: D",
        "The worst option is D", "The answer is anything except option D",
        "The answer is anything but option D", "Anything, but option D", "The answer is not D",
        "The answer isn't option D", "It is unlikely that the answer is D", "All except option D",
        "Neither is right, the answer is D", "Options ruled out:\nOption D", "Wrong:\n\nOption D",
        "I don't think the answer is D", "I don\u2019t think so - the answer is D", "No option D",
        "It is false: the answer is D", "exclude choice D",
        "Any, other than that - final D", "Not option D", "D) is wrong",
        "D: A or B", "D: not this one", "D: A", "D. maybe A", "Answer: D) is wrong",
    ],
)  # fmt: skip
def test_d10_d11_a_rejected_or_ambiguous_option_is_not_stated(
    text: str, options: tuple[str, ...]
) -> None:
    assert read_choice(text, options) is None


@pytest.mark.parametrize(
    "text",
    ["D. None of the above", "D) two foxes", "D: A fox", "D. Vitamin C", "Answer: D. No", "D. no"],
)
def test_d12_a_text_after_the_letter_may_be_any_where_the_options_are_not_known(
    text: str,
) -> None:
    assert read_choice(text) == "D"


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
