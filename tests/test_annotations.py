import pytest
from jaxtyping import TypeCheckError

from reframe_vl.types import Answer, Provenance, Span


def test_annotations_of_the_package_are_checked_while_testing() -> None:
    with pytest.raises(TypeCheckError):
        Span(Provenance.SAMPLED, ("a",))  # type: ignore[arg-type]


def test_an_int_may_stand_where_a_float_is_asked_for() -> None:
    assert Answer("number", "1", tolerance=1).tolerance == 1
