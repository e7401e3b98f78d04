"""`holdover serve` as people use it: the process, its page in Chromium, and pages of other origins that attack it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, expect
from tests.browser import chromium, watched

from holdover.report.html.page import read_page

FACTORIES = """
import time
from pathlib import Path
import torch
from torch import nn

Path(__file__).with_name("imported").touch()

def make():
    blocks = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)]
    return nn.Sequential(*blocks), (torch.ones(512, 16),)

def slow():
    time.sleep(60)

def fails():
    raise ValueError("no such luck")
"""

FACTORY_NAMES = ("make", "slow", "fails")


@dataclass(frozen=True)
class Server:
    address: str
    folder: Path
    process: subprocess.Popen[str]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serve")
    (folder / "models.py").write_text(FACTORIES)
    (folder / "other.py").write_text(FACTORIES.replace("imported", "other-imported"))
    models = [f"models.py:{name}" for name in FACTORY_NAMES]
    process = subprocess.Popen(
        [sys.executable, "-m", "holdover", "serve", "--port", "0", "--time-limit", "2", *models],
        stdout=subprocess.PIPE, text=True, cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")},
    )  # fmt: skip
    assert process.stdout is not None
    address = process.stdout.readline().split()[0].rstrip("/")
    with httpx.Client() as client:
        for _ in range(100):
            try:
                client.get(address + "/")
                break
            except httpx.ConnectError:
                continue
    yield Server(address, folder, process)
    process.send_signal(signal.SIGINT)
    process.wait(20)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


def test_it_listens_on_this_machine_only(server: Server) -> None:
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", server.address)
    port = int(server.address.rpartition(":")[2])
    inodes = [
        line.split()[1].partition(":")[0]
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and int(line.split()[1].partition(":")[2], 16) == port
    ]
    assert inodes == ["0100007F"]  # 127.0.0.1
    with socket.socket() as other, pytest.raises(OSError, match="refused"):
        other.connect(("127.0.0.2", port))


def test_no_model_is_imported_before_it_is_asked_for(server: Server) -> None:
    assert not (server.folder / "imported").exists()


def test_a_page_cannot_make_it_import_a_file(server: Server) -> None:
    for name in ("other.py:make", "./models.py:make", "models.py:other", "os:system"):
        answer = httpx.post(server.address + "/jobs", json={"model": name})
        assert answer.status_code == 422
        assert answer.json()["errors"]["model"].startswith("not among the models named on the command line: models.py:")
    assert not (server.folder / "other-imported").exists()


def test_a_bad_form_gives_a_message_at_the_field(server: Server, browser: Browser) -> None:
    seen = watched(browser)
    page = seen.page
    page.goto(server.address)
    page.get_by_label("Budget").fill("16gb")
    page.get_by_role("button", name="Record and plan").click()
    expect(page.locator("#field-budget + .field-error")).to_contain_text("'16gb' can be read in two ways")
    expect(page.get_by_label("Budget")).to_be_focused()
    assert page.get_by_label("Budget").get_attribute("aria-describedby") == "error-budget"
    page.get_by_label("Model").select_option("models.py:fails")
    page.get_by_label("Budget").fill("90%")
    page.get_by_role("button", name="Record and plan").click()
    expect(page.locator("#error-form")).to_contain_text("raised ValueError: no such luck", timeout=60_000)
    expect(page.locator("#field-budget + .field-error")).to_have_count(0)
    page.close()


def test_cancel_works(server: Server, browser: Browser) -> None:
    seen = watched(browser)
    page = seen.page
    page.goto(server.address)
    page.get_by_label("Model").select_option("models.py:slow")
    page.get_by_role("button", name="Record and plan").click()
    expect(page.locator("#progress")).to_contain_text("building models.py:slow", timeout=60_000)
    expect(page.get_by_role("button", name="Record and plan")).to_be_disabled()
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#progress")).to_have_text("cancelled")
    expect(page.get_by_role("button", name="Record and plan")).to_be_enabled()
    assert seen.errors == []
    page.close()


def test_a_job_ends_as_a_page(server: Server, browser: Browser) -> None:
    seen = watched(browser)
    page = seen.page
    page.goto(server.address)
    assert page.get_by_label("Batch size").is_disabled()  # the factory's own
    page.get_by_label("Optimizer").select_option("sgd")
    page.get_by_label("Budget").fill("100%")
    page.get_by_role("button", name="Record and plan").click()
    page.wait_for_url("**/?job=*", timeout=120_000)
    page.wait_for_selector("html[data-ready=yes]")
    data = read_page(httpx.get(page.url).text)
    assert (data["model"], data["optimizer"], data["chosen"]) == ("Sequential", "SGD", 0)
    assert page.locator("[data-figure=peak_bytes]").get_attribute("data-bytes") == str(data["peak_bytes"])
    assert page.get_by_label("Optimizer", exact=True).input_value() == "sgd"
    assert all(url.startswith((server.address, "data:")) for url in seen.requests)
    assert seen.errors == []
    page.close()


def test_a_page_of_another_origin_gets_nothing(server: Server, browser: Browser, tmp_path: Path) -> None:
    """A real browser, a real page from elsewhere: what it may send is refused, what it may not is not sent."""
    evil = tmp_path / "evil.html"
    evil.write_text("<!doctype html><title>evil</title>")
    seen = watched(browser)
    page = seen.page
    page.goto(evil.as_uri())
    before = httpx.get(server.address + "/").text
    for kind in ("text/plain", "application/json"):
        page.evaluate(
            """([url, type]) => fetch(url, {method: "POST", mode: type === "text/plain" ? "no-cors" : "cors",
                 headers: {"Content-Type": type}, body: '{"model": "models.py:slow"}'}).catch(() => null)""",
            [server.address + "/jobs", kind],
        )
    read = page.evaluate("(url) => fetch(url).then((r) => r.text()).catch(() => 'nothing')", server.address + "/")
    assert read == "nothing"
    page.set_content(f'<iframe src="{server.address}/"></iframe>')
    page.wait_for_timeout(300)
    assert all("Record and plan" not in (frame.content() or "") for frame in page.frames[1:])
    assert httpx.get(server.address + "/").text == before
    page.close()


def test_a_port_that_is_taken_is_said(server: Server) -> None:
    port = server.address.rpartition(":")[2]
    done = subprocess.run(
        [sys.executable, "-m", "holdover", "serve", "--port", port, "timm:resnet18"],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in done.stderr
