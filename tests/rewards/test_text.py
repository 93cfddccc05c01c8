import pytest
from hypothesis import given
from hypothesis import strategies as st

from reframe_vl.rewards.text import normalise, strip_markup


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("The Red Car.", "red car"), ("**red car**", "red car"), ("red  car\n", "a red car"),
        ("ﬁre", "fire"), ("STRASSE", "straße"), ("don't", "dont"), ("T-shirt", "t shirt"),
        ("`main.py`", "main py"), ("\u201cred car\u201d", "red car"), ("$1,204.50", "$1,204.50."),
        ("\u22123", "-3"), ("an apple", "apple"), ("the 7", "7"), ("A-", "a-."),
        ("(A\u2212)", "A-"),
    ],
)  # fmt: skip
def test_dress_does_not_matter(left: str, right: str) -> None:
    assert normalise(left) == normalise(right)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("-5", "5"), ("3.5", "35"), ("12:30", "1230"), ("1/2", "12"), ("10²", "102"), ("50%", "50"),
        ("C++", "C"), ("C#", "C"), ("$12", "€12"), ("red car", "red"), ("not red", "red"),
        ("3-4", "34"), ("2*3", "23"), ("Vitamin A", "Vitamin"), ("Type A", "type"), ("A-", "A"),
        ("A+", "A"), ("A+", "A-"), ("A B", "B"), ("vitamin a deficiency", "vitamin deficiency"),
    ],
)  # fmt: skip
def test_d03_content_is_never_taken_for_dress(left: str, right: str) -> None:
    assert normalise(left) != normalise(right)


def test_an_answer_that_is_only_an_article_stays() -> None:
    assert normalise("A") == "a"


@given(st.text(max_size=40))
def test_normalising_twice_changes_nothing(text: str) -> None:
    assert normalise(normalise(text)) == normalise(text)


@given(st.text(st.sampled_from("*_`$\\(){}ab 1"), max_size=30))
def test_stripping_markup_ends_at_a_fixed_point(text: str) -> None:
    assert strip_markup(strip_markup(text)) == strip_markup(text)
