"""Sizes and budgets read from text, and written for people."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdover
from holdover.units import binary_unit, format_bytes, format_parts, format_share, parse_budget, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("24GiB", 24 * 2**30),
        ("24 GiB", 24 * 2**30),
        ("24gib", 24 * 2**30),
        (" 1.5MiB ", 3 * 2**19),
        ("16GB", 16 * 10**9),
        ("1_000kB", 10**6),
        ("4096B", 4096),
        ("1048576", 2**20),
        ("0", 0),
        ("7B", 7),
        (".5KiB", 512),
        (4096, 4096),
        (np.int64(12), 12),
    ],
)
def test_sizes_are_read(text: int | str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("16gb?", "cannot read '16gb?' as a size: write a number and a unit, such as 24GiB, 512MiB or 4096B"),
        ("16gb", "'16gb' can be read in two ways: write 16GiB (17,179,869,184 bytes) or 16GB (16,000,000,000 bytes)"),
        ("16G", "'16G' can be read in two ways: write 16GiB (17,179,869,184 bytes) or 16GB (16,000,000,000 bytes)"),
        ("2k", "'2k' can be read in two ways: write 2KiB (2,048 bytes) or 2kB (2,000 bytes)"),
        (
            "3 ell",
            "unknown unit 'ell' in '3 ell': the units are B, KiB, MiB, GiB, TiB and kB, KB, MB, GB, TB",
        ),
        ("1.5", "'1.5' is not a whole number of bytes: give it a unit, such as 1.5GiB"),
        ("", "cannot read '' as a size: write a number and a unit, such as 24GiB, 512MiB or 4096B"),
        ("-1GiB", "cannot read '-1GiB' as a size: write a number and a unit, such as 24GiB, 512MiB or 4096B"),
        ("70", "'70' has no unit, and would be 70 bytes: write 70MiB or 70GiB, or 70B if bytes are meant"),
        (
            "4_096",
            "'4_096' has no unit, and would be 4,096 bytes: write 4096MiB or 4096GiB, or 4096B if bytes are meant",
        ),
        (-1, "a size cannot be negative: -1"),
        (True, "cannot read True as a size: give a whole number of bytes, or text such as '24GiB'"),
        (1.5e9, "cannot read 1500000000.0 as a size: give a whole number of bytes, or text such as '24GiB'"),
        (None, "cannot read None as a size: give a whole number of bytes, or text such as '24GiB'"),
    ],
)
def test_what_cannot_be_read_is_told(text: int | str, message: str) -> None:
    with pytest.raises(holdover.UnitError) as caught:
        parse_bytes(text)
    assert str(caught.value) == message


def test_budgets_are_bytes_shares_or_min() -> None:
    assert parse_budget("50%") == 0.5
    assert isinstance(parse_budget("100 %"), float)
    assert parse_budget("min") == parse_budget(" MIN ") == "min"
    assert parse_budget("2GiB") == parse_budget(2**31) == 2**31


@pytest.mark.parametrize(
    ("budget", "share"), [("70", "70%"), ("100", "100%"), ("0.7", "70%"), ("1.5", "1.5%"), (0.5, "50%"), ("101", "80%")]
)
def test_a_number_alone_is_no_budget_but_names_the_share_it_may_have_meant(budget: str, share: str) -> None:
    with pytest.raises(holdover.UnitError) as caught:
        parse_budget(budget)
    assert f'A budget may also be a share of the step\'s own peak ("{share}") or "min"' in str(caught.value)
    assert parse_budget(70) == parse_budget("70B") == 70  # a number that is no text is bytes


@pytest.mark.parametrize("budget", ["0%", "101%", "0", 0, "maximum", "-5%", "50 percent", 0.5])
def test_a_bad_budget_is_refused(budget: int | str) -> None:
    with pytest.raises(holdover.UnitError):
        parse_budget(budget)


def test_a_unit_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="budget may also be a share"):
        parse_budget("16gb?")


@given(st.integers(0, 2**50))
def test_bytes_survive_the_way_through_text(nbytes: int) -> None:
    assert parse_bytes(format_bytes(nbytes, "B").replace(",", "")) == nbytes


@given(st.integers(1, 2**50), st.sampled_from(["B", "KiB", "MiB", "GiB", "TiB"]))
def test_three_digits_of_any_size_are_told_whatever_unit_it_stands_among(nbytes: int, unit: str) -> None:
    figure, own = format_bytes(nbytes, unit).split()
    told = parse_bytes(f"{figure.replace(',', '')}{own}")
    assert abs(told - nbytes) <= 0.005 * nbytes + 1  # which is read rounded down
    assert own == "B" or float(figure.replace(",", "")) >= 1


@given(st.lists(st.integers(0, 2**45), max_size=20), st.sampled_from(["B", "KiB", "MiB", "GiB"]))
def test_printed_parts_add_up_to_the_printed_total(parts: list[int], unit: str) -> None:
    cents = [round(float(figure.replace(",", "")) * 100) for figure in format_parts(parts, unit)]
    assert sum(cents[:-1]) == cents[-1]


def test_formats() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 5 * 2**30)] == ["0 B", "1,023 B", "1.00 KiB", "5.00 GiB"]
    assert [format_bytes(n, "GiB") for n in (0, -(2**21), 2**30 - 2**20, 2**33)] == [
        "0 B", "-2.00 MiB", "1,023.00 MiB", "8.00 GiB"
    ]  # fmt: skip
    assert binary_unit(2**40) == "TiB"
    assert format_share(-0.0312, sign=True) == "-3.1 %"
