"""Formulas as sums of products of symbols, so that an equation can be compared and not only evaluated.

`Formula` is a polynomial with rational coefficients whose exponents may be negative: 10h + 24h/t + 5as/t. It adds,
multiplies, substitutes, prints, compares exactly, and evaluates with whole numbers (exactly) or with numpy arrays (a
thousand layouts at once).
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np

Monomial = tuple[tuple[str, int], ...]
"""Symbols with their exponents, sorted by name: (("h", 1), ("t", -1)) is h/t."""


class Formula:
    """A sum of products of symbols with rational coefficients.

    >>> h, t = symbols("h t")
    >>> total = 4 * h + 24 * h / t + 6 * h
    >>> print(total), total == 10 * h + 24 * h / t, total.at({"h": 12288, "t": 8})
    10h + 24h/t
    (None, True, 159744)
    """

    __slots__ = ("_terms",)

    def __init__(self, terms: Mapping[Monomial, Fraction] | None = None) -> None:
        self._terms = {monomial: factor for monomial, factor in sorted((terms or {}).items()) if factor}

    @property
    def terms(self) -> dict[Monomial, Fraction]:
        """Coefficients by product of symbols."""
        return dict(self._terms)

    @property
    def names(self) -> frozenset[str]:
        """The symbols that occur."""
        return frozenset(name for monomial in self._terms for name, _ in monomial)

    def __add__(self, other: Formula | int | Fraction) -> Formula:
        terms = dict(self._terms)
        for monomial, factor in _formula(other)._terms.items():
            terms[monomial] = terms.get(monomial, Fraction(0)) + factor
        return Formula(terms)

    __radd__ = __add__

    def __neg__(self) -> Formula:
        return Formula({monomial: -factor for monomial, factor in self._terms.items()})

    def __sub__(self, other: Formula | int | Fraction) -> Formula:
        return self + -_formula(other)

    def __rsub__(self, other: Formula | int | Fraction) -> Formula:
        return _formula(other) - self

    def __mul__(self, other: Formula | int | Fraction) -> Formula:
        terms: dict[Monomial, Fraction] = {}
        for left, left_factor in self._terms.items():
            for right, right_factor in _formula(other)._terms.items():
                monomial = _times(left, right)
                terms[monomial] = terms.get(monomial, Fraction(0)) + left_factor * right_factor
        return Formula(terms)

    __rmul__ = __mul__

    def __truediv__(self, other: Formula | int | Fraction) -> Formula:
        divisor = _formula(other)
        if len(divisor._terms) != 1:
            raise ValueError(f"can only divide by one product of symbols, not by {divisor}")
        ((monomial, factor),) = divisor._terms.items()
        inverse = Formula({tuple((name, -exponent) for name, exponent in monomial): 1 / factor})
        return self * inverse

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int | Fraction):
            other = _formula(other)
        return isinstance(other, Formula) and self._terms == other._terms

    def __hash__(self) -> int:
        return hash(tuple(self._terms.items()))

    def __bool__(self) -> bool:
        return bool(self._terms)

    def substitute(self, **values: Formula | int | Fraction) -> Formula:
        """The formula with symbols replaced by other formulas or numbers.

        >>> h, t = symbols("h t")
        >>> print((10 * h + 24 * h / t).substitute(t=8))
        13h
        """
        result = Formula()
        for monomial, factor in self._terms.items():
            term = Formula({(): factor})
            for name, exponent in monomial:
                value = _formula(values[name]) if name in values else symbol(name)
                for _ in range(abs(exponent)):
                    term = term * value if exponent > 0 else term / value
            result = result + term
        return result

    def at(self, values: Mapping[str, Any]) -> Any:
        """The formula's value.

        Args:
            values: a whole number, a Fraction or a numpy array for each symbol.

        Returns:
            An int where the result is whole, else a Fraction; a float array where any value is an array.

        Raises:
            KeyError: a symbol has no value.
        """
        approximate = any(isinstance(values[name], np.ndarray | float) for name in self.names)
        total: Any = 0
        for monomial, factor in self._terms.items():
            numerator: Any = factor.numerator
            denominator: Any = factor.denominator
            for name, exponent in monomial:
                if exponent > 0:
                    numerator = numerator * values[name] ** exponent
                else:
                    denominator = denominator * values[name] ** -exponent
            total = total + (numerator / denominator if approximate else Fraction(numerator) / denominator)
        return int(total) if isinstance(total, Fraction) and total.denominator == 1 else total

    def __str__(self) -> str:
        if not self._terms:
            return "0"
        ordered = sorted(self._terms.items(), key=lambda item: (_below(item[0]), len(_above(item[0])), _above(item[0])))
        text = ""
        for monomial, factor in ordered:
            sign = " - " if factor < 0 else " + "
            text += (sign if text or factor < 0 else "") + _term(monomial, abs(factor))
        return text.strip()

    __repr__ = __str__


def symbol(name: str) -> Formula:
    """The formula that is one symbol."""
    return Formula({((name, 1),): Fraction(1)})


def symbols(names: str) -> tuple[Formula, ...]:
    """Several symbols, separated by blanks."""
    return tuple(symbol(name) for name in names.split())


def total(formulas: Any) -> Formula:
    """The sum of formulas, nothing for none."""
    result = Formula()
    for formula in formulas:
        result = result + formula
    return result


def _formula(value: Formula | int | Fraction) -> Formula:
    return value if isinstance(value, Formula) else Formula({(): Fraction(value)})


def _times(left: Monomial, right: Monomial) -> Monomial:
    exponents = dict(left)
    for name, exponent in right:
        exponents[name] = exponents.get(name, 0) + exponent
    return tuple(sorted((name, exponent) for name, exponent in exponents.items() if exponent))


def _above(monomial: Monomial) -> list[str]:
    return [name for name, exponent in monomial for _ in range(exponent)]


def _below(monomial: Monomial) -> list[str]:
    return [name for name, exponent in monomial for _ in range(-exponent)]


def _term(monomial: Monomial, factor: Fraction) -> str:
    above = "\u00b7".join(_above(monomial)) if any(len(name) > 1 for name, _ in monomial) else "".join(_above(monomial))
    below = "/".join(_below(monomial))
    number = str(factor) if factor.denominator == 1 else f"({factor})"
    if factor == 1 and above:
        number = ""
    separator = "\u00b7" if number and "\u00b7" in above else ""
    return f"{number}{separator}{above}" + (f"/{below}" if below else "")
