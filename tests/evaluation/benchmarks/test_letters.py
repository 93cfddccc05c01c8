import pytest

from reframe_vl.evaluation.rules.letters import (
    AFTER_SEMICOLONS,
    IN_PARENTHESES,
    ON_LINES,
    read_letter,
    split_options,
)

ANIMALS = ("cat", "dog", "cow", "fox")
TRICKY = [
    # What people and models write for one option.
    ("B", "B"),
    ("(B)", "B"),
    ("b.", "B"),
    ("B. dog", "B"),
    ("(B) a brown dog", "B"),
    ("B: it barks", "B"),
    ("dog", "B"),
    ("A dog.", "B"),
    ("Answer: **D**", "D"),
    ("**D**", "D"),
    ("$\\boxed{C}$", "C"),
    ("The answer is (C).", "C"),
    ("The best answer is: D. fox", "D"),
    ("I considered (A) ... final answer: D", "D"),
    # And what states none.
    ("", None),
    ("it is a dog", None),
    ("a", "A"),
    ("A or B", None),
    ("A, B, C, D", None),
    ("ABCD", None),
    ("None of the above", None),
    ("Don't know", None),
    ("correct", None),
    ("Cannot determine the answer", None),
    ("I reject option D", None),
    ("E", None),
    ("(E) none", None),
    ("cat dog cow fox", None),
    ("Which animal is it? (A) cat (B) dog (C) cow (D) fox", None),
    ("dog " * 12_000, None),
]


@pytest.mark.parametrize(("text", "letter"), TRICKY)
def test_d06_d10_d11_d12_d13_letters_are_read_only_where_they_are_stated(text, letter):
    assert read_letter(text, ANIMALS) == letter


def test_without_options_any_letter_may_be_stated():
    assert read_letter("(H) eight of them") == "H"
    assert read_letter("it is a dog") is None


@pytest.mark.parametrize(
    ("text", "marker", "question", "options"),
    [
        ("Q? (A) x (B) y (z) (C) w", IN_PARENTHESES, "Q?", ("x", "y (z)", "w")),
        ("Q?\n(A) x\n(B) y\nAnswer with the letter.", IN_PARENTHESES, "Q?", ("x", "y")),
        ("Is plan (A) good?\n(A) yes\n(B) no", IN_PARENTHESES, "Is plan (A) good?", ("yes", "no")),
        ("Q?\nChoices:\nA:2\nB:3", ON_LINES, "Q?\nChoices:", ("2", "3")),
        ("A. 1, 2;B. 2; C. 3.;", AFTER_SEMICOLONS, "", ("1, 2", "2", "3.;")),
        ("No options here", IN_PARENTHESES, "No options here", ()),
        ("Only (A) one", IN_PARENTHESES, "Only (A) one", ()),
        (
            "Q? (A) x (B) y (C) z (D) Both (A) and (B)",
            IN_PARENTHESES,
            "Q?",
            ("x", "y", "z", "Both (A) and (B)"),
        ),
        ("Q? (A) x (B) as (A) (C) z", IN_PARENTHESES, "Q?", ("x", "as (A)", "z")),
        ("From (A) to (B)? (A) x (B) y", IN_PARENTHESES, "From (A) to (B)?", ("x", "y")),
    ],
)
def test_options_are_split_off_the_question(text, marker, question, options):
    assert split_options(text, marker) == (question, options)
