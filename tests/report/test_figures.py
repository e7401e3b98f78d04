"""The figures: drawn from small recordings, in every format, the same each time."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import holdover
from holdover.cli.figures import draw_megatron_models, draw_recorded
from holdover.cli.gpt import Shape
from holdover.report.figures.canvas import check_drawable
from holdover.report.figures.frontier import draw_frontier


def words(svg: Path) -> int:
    """Texts of an SVG, which are drawn as paths with the text in a comment."""
    return svg.read_text().count("<!-- ")


def test_all_figures_of_a_small_gpt(tmp_path: Path) -> None:
    draw_megatron_models(tmp_path)
    draw_recorded(tmp_path, Shape(layers=3, width=64, heads=2, context=64), (1, 2), 3.0)
    names = {"megatron", "stack", "strategies", "life"}
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.{kind}" for name in names for kind in ("svg", "png")}
    for name in names:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        svg = tmp_path / f"{name}.svg"
        assert ElementTree.parse(svg).getroot().tag == "{http://www.w3.org/2000/svg}svg"
        assert words(svg) > 8
    text = (tmp_path / "life.svg").read_text()
    for said in ("not in memory", "produced, dropped", "made again, used, freed"):
        assert f"<!-- {said} -->" in text
    text = (tmp_path / "stack.svg").read_text()
    assert "<!-- batch 2 -->" in text
    assert "<!-- weights -->" in text
    assert "<!-- every block -->" in (tmp_path / "strategies.svg").read_text()


def test_a_figure_is_the_same_each_time(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8), nn.GELU(), nn.Linear(8, 8))
    found = holdover.frontier(model, (torch.ones(1000, 8),), time_limit=2)
    draw_frontier(found, tmp_path / "a.svg")
    draw_frontier(found, tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert words(tmp_path / "a.svg") > 8
    assert {path.name for path in tmp_path.iterdir()} == {"a.svg", "b.svg"}


def test_other_endings_and_a_missing_matplotlib_are_told_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(holdover.HoldoverError, match=r"its ending must be one of .*png.*svg"):
        check_drawable(tmp_path / "figure.xyz")
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    with pytest.raises(holdover.HoldoverError, match=r"drawing needs matplotlib: pip install matplotlib"):
        check_drawable(tmp_path / "figure.png")
