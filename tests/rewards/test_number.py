from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reframe_vl.rewards.number import numbers_agree, read_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", "7"), ("7.", "7"), ("-7", "-7"), ("\u22127", "-7"), ("+7", "7"), ("0.50", "0.5"),
        (".5", "0.5"), ("1,234,567.5", "1234567.5"), ("1 234", "1234"), ("1e3", "1000"),
        ("2.5E-3", "0.0025"), ("$12.50", "12.5"), ("-$5", "-5"), ("$-5", "-5"), ("12 €", "12"),
        ("50%", "50"), ("50 percent", "50"), ("**42**", "42"), ("Answer: 42", "42"), ("$42$", "42"),
        (r"\boxed{42}", "42"), ("12 cm", "12"), ("12cm", "12"), ("3 km/h", "3"), ("4 m²", "4"),
        ("90°", "90"), ("5 million", "5000000"), ("5k", "5000"), ("3 thousand dollars", "3000"),
        ("The answer is 7.", "7"), ("\uff17", "7"),
    ],
)  # fmt: skip
def test_a_number_is_read_however_it_is_written(text: str, value: str) -> None:
    number = read_number(text)
    assert number is not None
    assert number.value == Fraction(value)


@pytest.mark.parametrize(
    "text",
    [
        "", "seven", "3 or 4", "3, 4", "3-4", "3-2", "10²", "½", "1½", "1/2", "1,23", "12,34,567",
        "nan", "inf", "1e9999", "--5", "+-5", "-$-5", "7 8", "3 4", "1.2.3", "12:30", "about 7",
        "I saw 7 dogs", "7" * 300, "0x10", "1_000", "3^2", "5 and 6", "1 2 3 4 5",
    ],
)  # fmt: skip
def test_what_is_not_exactly_one_number_is_none(text: str) -> None:
    assert read_number(text) is None


@given(
    st.decimals(
        allow_nan=False, allow_infinity=False, places=3, min_value=-(10**9), max_value=10**9
    )
)
def test_thousands_separators_do_not_change_the_value(value: object) -> None:
    plain, grouped = read_number(f"{value:f}"), read_number(f"{value:,f}")
    assert plain is not None
    assert plain == grouped
    assert plain.value == Fraction(str(value))


@given(st.integers(-(10**6), 10**6), st.integers(-(10**6), 10**6), st.sampled_from([0, 0.01, 0.3]))
def test_agreement_is_the_relative_error(answer: int, reference: int, tolerance: float) -> None:
    given_, wanted = read_number(str(answer)), read_number(str(reference))
    assert given_ is not None
    assert wanted is not None
    hundredths = round(tolerance * 100)
    expected = 100 * abs(answer - reference) <= hundredths * abs(reference)
    assert numbers_agree(given_, wanted, tolerance) is expected


def test_d03_tiny_numbers_and_signs_are_told_apart() -> None:
    for left, right in [("1e-30", "2e-30"), ("0.0000001", "0"), ("-1", "1"), ("5 m", "5 cm")]:
        first, second = read_number(left), read_number(right)
        assert first is not None
        assert second is not None
        assert not numbers_agree(first, second, 0.05)
