"""The documentation's lists are the code's lists, and its example runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdover.closed_form.layers import layer
from holdover.closed_form.presets import PRESETS
from holdover.closed_form.settings import CODE

PAGE = (Path(__file__).parents[2] / "docs" / "closed-form.md").read_text()
LISTS = re.findall(r"<!-- list: (\S+), (\S+) -->\n((?:\|.*\n)+)", PAGE)


@pytest.mark.parametrize(("model", "code", "table"), LISTS, ids=lambda text: text if len(text) < 20 else "")
def test_tables_are_the_lists(model: str, code: str, table: str) -> None:
    written = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]
    assert written == [
        [
            value.name,
            value.op,
            str(value.bytes),
            value.shard.value,
            ", ".join(sorted(value.dropped_by)) or "-",
        ]
        for value in layer(PRESETS[model], CODE[code]).stored
    ]


def test_three_lists_are_written_out() -> None:
    assert [(model, code) for model, code, _ in LISTS] == [
        ("gpt3-175b", "paper"),
        ("llama3-8b", "megatron"),
        ("llama3-8b", "huggingface"),
    ]


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(example, "docs/closed-form.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_the_printed_example_is_what_the_command_prints() -> None:
    from typer.testing import CliRunner

    from holdover.cli.app import app

    command, output = re.findall(r"```console\n\$ holdover (.*)\n(.*?)```", PAGE, re.DOTALL)[0]
    assert CliRunner().invoke(app, command.split()).output.startswith(output)
