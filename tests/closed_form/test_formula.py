"""Formulas compare, substitute and evaluate exactly."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdover.closed_form.formula import Formula, symbol, symbols, total

h, a, t = symbols("h a t")


def test_equal_formulas_are_equal_however_they_were_written() -> None:
    assert (h + a) * (h - a) == h * h - a * a
    assert 24 * h / t == 12 * h / t + h / t * 12
    assert hash(h + a) == hash(a + h)
    assert h != a
    assert h - h == 0


def test_substitution_replaces_symbols_under_the_line_too() -> None:
    assert (10 * h + 24 * h / t).substitute(t=1) == 34 * h
    assert (5 * a / h).substitute(a=h * t) == 5 * t


def test_whole_numbers_stay_whole_and_others_stay_exact() -> None:
    assert (h / t).at({"h": 12, "t": 4}) == 3
    assert isinstance((h / t).at({"h": 12, "t": 4}), int)
    assert (h / t).at({"h": 1, "t": 3}) == Fraction(1, 3)


def test_constants_and_arrays_mix() -> None:
    values = (h / t + 8).at({"h": np.array([4.0, 8.0]), "t": np.array([2.0, 2.0])})
    assert values.tolist() == [10.0, 12.0]


def test_dividing_by_a_sum_is_refused() -> None:
    with pytest.raises(ValueError, match="one product"):
        h / (a + t)


def test_a_missing_symbol_is_an_error() -> None:
    with pytest.raises(KeyError):
        (h + a).at({"h": 1})


def test_text() -> None:
    assert str(34 * h + 5 * a * symbol("s")) == "34h + 5as"
    assert str(2 * h / t - a) == "-a + 2h/t" or str(2 * h / t - a) == " - a + 2h/t".strip()
    assert str(Formula()) == "0"
    assert str(Fraction(33, 32) * h) == "(33/32)h"
    assert str(6 * symbol("f_e") * symbol("k")) == "6\u00b7f_e\u00b7k"


numbers = st.integers(1, 50)
formulas = st.recursive(
    st.sampled_from([h, a, t]) | st.integers(-3, 3).map(lambda n: Formula() + n),
    lambda inner: (
        st.tuples(inner, inner).map(lambda pair: pair[0] + pair[1])
        | st.tuples(inner, inner).map(lambda pair: pair[0] * pair[1])
    ),
    max_leaves=6,
)


@given(formulas, formulas, numbers, numbers, numbers)
def test_evaluation_is_a_homomorphism(left: Formula, right: Formula, x: int, y: int, z: int) -> None:
    values = {"h": x, "a": y, "t": z}
    assert (left + right).at(values) == left.at(values) + right.at(values)
    assert (left * right).at(values) == left.at(values) * right.at(values)
    assert (left - right).at(values) == left.at(values) - right.at(values)
    assert total([left, right, left]).at(values) == 2 * left.at(values) + right.at(values)
    assert left.substitute(h=symbol("a")).at(values) == left.at(values | {"h": y})
