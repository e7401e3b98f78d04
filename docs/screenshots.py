"""The pictures of docs/report.md: reports of three models, made here and photographed in Chromium.

    python docs/screenshots.py [NAME ...]

Needs the extras `test` and `zoo`; models have random weights, nothing is downloaded. Takes about five minutes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from playwright.sync_api import Page, sync_playwright

HERE = Path(__file__).parent
PICTURES = HERE / "pictures"


sys.path.insert(0, str(HERE.parent))


def resnet50() -> tuple[Any, ...]:
    from benchmarks import zoo

    return zoo.resnet50()


def gpt2() -> tuple[Any, ...]:
    """GPT-2 small, 12 blocks, four sequences of 512 tokens."""
    from benchmarks import zoo  # noqa: F401, which makes transformers importable beside a torchvision without its ops
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(use_cache=False))
        ids = torch.zeros(4, 512, dtype=torch.int64)
    return model, (), {"input_ids": ids, "labels": ids}


def llama() -> tuple[Any, ...]:
    """The shape of Llama 7B: 32 blocks, eight sequences of 2,048 tokens."""
    from benchmarks import zoo  # noqa: F401
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(use_cache=False))
        ids = torch.zeros(8, 2048, dtype=torch.int64)
    return model, (), {"input_ids": ids, "labels": ids}


OPTIONS = {"llama": ("--optimizer", "sgd")}  # AdamW alone would take 108 GB of the card that such a step needs


@dataclass(frozen=True)
class Picture:
    """A part of a report: a section by its id, or everything above the first one."""

    name: str
    model: str
    section: str
    scheme: str = "light"


PICTURES_MADE = (
    Picture("report-head", "gpt2", "head"),
    Picture("report-stack", "llama", "stack"),
    Picture("report-memory", "gpt2", "memory"),
    Picture("report-memory-dark", "resnet50", "memory", "dark"),
    Picture("report-frontier", "gpt2", "frontier"),
    Picture("report-life", "resnet50", "life"),
    Picture("report-life-dark", "gpt2", "life", "dark"),
)


def photograph(page: Page, picture: Picture, path: Path) -> None:
    if picture.section == "head":
        page.screenshot(path=path, clip={"x": 0, "y": 0, "width": 1280, "height": 860})
        return
    page.add_style_tag(content=".bar-top { position: static !important; }")  # sticky, it would lie over the section
    box = page.locator(f"#{picture.section}").bounding_box()
    assert box is not None
    # With the page's own margins; below the line that parts it from the section before.
    page.screenshot(
        path=path, full_page=True,
        clip={"x": 60, "y": box["y"] + 12, "width": 1160, "height": box["height"] - 12},
    )  # fmt: skip


def main(names: list[str]) -> None:
    browser_path = shutil.which(os.environ.get("CHROMIUM", "chromium"))
    if browser_path is None:
        sys.exit("no Chromium here: install it, or name one in the environment variable CHROMIUM")
    chosen = [p for p in PICTURES_MADE if not names or p.name in names]
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        for model in dict.fromkeys(p.model for p in chosen):
            report = Path(folder) / f"{model}.html"
            command = [sys.executable, "-m", "holdover", "report", f"{__file__}:{model}", "-o", str(report)]
            subprocess.run([*command, *OPTIONS.get(model, ()), "--time-limit", "20"], check=True)
            print(f"{report.name}: {report.stat().st_size:,} bytes")
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for picture in chosen:
            page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme=picture.scheme)  # type: ignore[arg-type]
            page.goto((Path(folder) / f"{picture.model}.html").as_uri())
            page.wait_for_selector("html[data-ready=yes]")
            photograph(page, picture, PICTURES / f"{picture.name}.png")
            page.close()
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1:])
