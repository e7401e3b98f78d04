"""Hostile requests: from other origins, under other names, in other forms, too large; none reaches the application."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from holdover.server.app import make_app
from holdover.server.guard import HEADERS
from holdover.server.jobs import Jobs

PORT = 8765
OWN = f"http://127.0.0.1:{PORT}"
JSON = {"content-type": "application/json"}
GOOD = json.dumps({"model": "timm:resnet18"})


def ask(
    method: str, path: str, headers: Mapping[str, str] | None = None, content: str | bytes | None = None,
    jobs: Jobs | None = None,
) -> httpx.Response:  # fmt: skip
    """One request to an application whose queue nobody serves."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=make_app(["timm:resnet18"], PORT, jobs or Jobs()))
        async with httpx.AsyncClient(transport=transport, base_url=OWN) as client:
            return await client.request(method, path, headers=headers, content=content)

    return asyncio.run(send())


def test_its_own_page_may_do_everything() -> None:
    jobs = Jobs()
    same = {"origin": OWN, "sec-fetch-site": "same-origin", **JSON}
    assert ask("GET", "/", {"sec-fetch-site": "none"}, jobs=jobs).status_code == 200
    answer = ask("POST", "/jobs", same, GOOD, jobs)
    assert answer.status_code == 202
    job = answer.json()["id"]
    assert ask("GET", f"/jobs/{job}", same, jobs=jobs).json()["state"] == "waiting"
    assert ask("POST", f"/jobs/{job}/cancel", same, "{}", jobs).json()["state"] == "cancelled"


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},  # DNS rebinding: the name is the attacker's, the address ours
        {"host": f"evil.example:{PORT}"},
        {"host": f"127.0.0.1.evil.example:{PORT}"},
        {"host": "127.0.0.1:80"},
        {"host": f"0.0.0.0:{PORT}"},
        {"host": ""},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": f"https://127.0.0.1:{PORT}"},
        {"origin": "http://127.0.0.1:1"},
        {"origin": f"{OWN}.evil.example"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": OWN, "sec-fetch-site": "cross-site"},
    ],
    ids=lambda headers: "-".join(f"{k}={v}" for k, v in headers.items()),
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_requests_from_elsewhere_are_refused(method: str, headers: dict[str, str]) -> None:
    jobs = Jobs()
    path, content = ("/", None) if method == "GET" else ("/jobs", GOOD)
    answer = ask(method, path, {**JSON, **headers}, content, jobs)
    assert answer.status_code == 403
    assert answer.text.startswith("refused: ")
    assert jobs.jobs == {}


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""]
)
def test_what_a_page_of_another_origin_can_send_unasked_is_refused(kind: str) -> None:
    jobs = Jobs()
    assert ask("POST", "/jobs", {"content-type": kind}, GOOD, jobs).status_code == 415
    assert jobs.jobs == {}


def test_large_and_endless_bodies_are_refused() -> None:
    assert ask("POST", "/jobs", JSON, b"x" * 20_000).status_code == 413
    assert ask("POST", "/jobs", {**JSON, "content-length": "-1"}, b"x").status_code == 413
    assert ask("POST", "/jobs", {**JSON, "transfer-encoding": "chunked"}, b"x").status_code == 413


@pytest.mark.parametrize("body", ["", "{", "[" * 10_000, "\xff", "7", "null", "[]"], ids=range(7))
def test_broken_bodies_get_a_message(body: str) -> None:
    answer = ask("POST", "/jobs", JSON, body.encode("latin-1"))
    assert answer.status_code == 422
    assert answer.json()["errors"][""]


def test_paths_lead_nowhere_else() -> None:
    for path in ("/jobs/../../etc/passwd", "/jobs/x", "/static/x", "/%2e%2e/etc/passwd", "/jobs/%00"):
        assert ask("GET", path).status_code == 404
    assert ask("DELETE", "/jobs/x", JSON).status_code == 405
    assert ask("GET", "/?job=<script>alert(1)</script>").status_code == 200
    assert "alert(1)" not in ask("GET", "/?job=<script>alert(1)</script>").text


def test_every_answer_carries_the_headers() -> None:
    for answer in (ask("GET", "/"), ask("GET", "/jobs/x"), ask("GET", "/", {"origin": "null"})):
        for name, value in HEADERS.items():
            assert answer.headers[name] == value
        assert "access-control-allow-origin" not in answer.headers


def test_a_websocket_is_not_answered() -> None:
    sent: list[Any] = []

    async def nothing() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    app = make_app(["timm:resnet18"], PORT, Jobs())
    asyncio.run(app({"type": "websocket", "path": "/", "headers": []}, nothing, send))  # type: ignore[arg-type]
    assert sent == []
