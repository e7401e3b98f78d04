"""`holdover` is a catalogue of names: complete, sorted, and cheap to import."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import holdover

HEAVY = ("scipy", "rich", "typer", "jinja2", "matplotlib", "transformers", "torch")


def modules_after(statement: str) -> set[str]:
    program = f"import sys\n{statement}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_holdover_loads_nothing_heavy() -> None:
    assert not modules_after("import holdover") & set(HEAVY)


def test_the_main_names_load_neither_scipy_nor_the_command_line() -> None:
    loaded = modules_after("from holdover import apply_, estimate, inspect, remove_, verify, Plan")
    assert not loaded & {"scipy", "rich", "typer", "jinja2", "matplotlib", "transformers"}


def test_the_import_test_can_fail() -> None:
    assert "rich" in modules_after("import holdover.report.text")


def test_all_is_sorted_and_every_name_is_there() -> None:
    assert holdover.__all__ == sorted(holdover.__all__)
    assert set(holdover.__all__) == set(holdover._HOMES)
    for name in holdover.__all__:
        assert getattr(holdover, name).__name__ == name
        assert name in dir(holdover)


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(holdover.__file__).read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname: node.module for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen == holdover._HOMES


def test_every_public_name_is_documented() -> None:
    for name in holdover.__all__:
        assert (getattr(holdover, name).__doc__ or "").strip(), name


def test_every_public_name_has_a_row_in_the_table_of_the_api_page() -> None:
    page = (Path(__file__).parent.parent / "docs" / "api.md").read_text()
    rows = re.findall(r"^\| `(\w+)", page, re.MULTILINE)
    assert sorted(rows) == holdover.__all__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'holdover' has no attribute 'frobnicate'"):
        holdover.frobnicate  # noqa: B018


def test_the_version_is_the_one_of_the_distribution() -> None:
    from importlib.metadata import version

    assert holdover.__version__ == version("holdover")
