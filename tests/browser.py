"""A real, headless Chromium for the tests of pages, and a record of what a page does in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from playwright.sync_api import Browser, Page, sync_playwright


@dataclass
class Seen:
    """A page, what its console said, and what it asked for."""

    page: Page
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@contextmanager
def chromium() -> Iterator[Browser]:
    name = os.environ.get("CHROMIUM", "chromium")
    path = shutil.which(name)
    if path is None:
        pytest.fail(
            f"There is no {name!r} here, and the page is tested in one: apt-get install chromium (make test does "
            "so as root), or name one in the environment variable CHROMIUM.",
            pytrace=False,
        )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


def watched(browser: Browser, *, scheme: str = "light", width: int = 1280) -> Seen:
    """A new page, watched."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.set_default_timeout(15_000)
    seen = Seen(page)
    page.on("console", lambda m: seen.errors.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: seen.errors.append(str(e)))
    page.on("request", lambda r: seen.requests.append(r.url))
    return seen
