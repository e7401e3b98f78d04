"""The queue: one job at a time, in order; what ends one, and that nothing of it runs on."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from holdover.server.form import Wanted
from holdover.server.jobs import MOST_WAITING, Job, Jobs, QueueFullError

WORKER = """
import json, os, subprocess, sys, time
wanted = json.load(sys.stdin)
folder, what = os.environ["MARKS"], wanted["model"]
def say(**message): print(json.dumps(message), flush=True)
say(stage="starting")
print("not json")
open(f"{folder}/{what}.began", "w").write(str(time.time()))
if what == "sleeps":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    open(f"{folder}/child", "w").write(str(child.pid))
    say(stage="sleeping")
    time.sleep(60)
if what == "fails":
    say(error="it does not work")
    sys.exit(1)
if what == "dies":
    os.kill(os.getpid(), 9)
time.sleep(0.05)
open(f"{folder}/{what}.ended", "w").write(str(time.time()))
json.dump({"model": what}, open(sys.argv[1], "w"))
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """A worker that does what its model is called."""
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    monkeypatch.setenv("MARKS", str(tmp_path))
    return sys.executable, str(path)


def serve(worker: tuple[str, ...], act: Callable[[Jobs], Awaitable[None]]) -> None:
    async def main() -> None:
        jobs = Jobs(worker)
        serving = asyncio.create_task(jobs.run())
        await act(jobs)
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving

    asyncio.run(asyncio.wait_for(main(), 60))


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_one_at_a_time_in_order(worker: tuple[str, ...], tmp_path: Path) -> None:
    async def act(jobs: Jobs) -> None:
        added = [jobs.add(Wanted(name)) for name in ("a", "b", "c")]
        assert [jobs.status(j)["ahead"] for j in added] == [1, 2, 3]
        await until(lambda: all(j.state == "done" for j in added))
        assert [j.data for j in added] == [{"model": name} for name in "abc"]
        assert [s["what"] for s in jobs.status(added[0])["stages"]] == ["starting"]

    serve(worker, act)
    times = [float((tmp_path / f"{n}.{what}").read_text()) for n in "abc" for what in ("began", "ended")]
    assert times == sorted(times)


def test_cancelling_ends_the_job_and_all_that_it_started(worker: tuple[str, ...], tmp_path: Path) -> None:
    async def act(jobs: Jobs) -> None:
        first, second, third = (jobs.add(Wanted(name)) for name in ("sleeps", "b", "c"))
        await until(lambda: len(first.stages) == 2)
        assert first.process is not None
        pids = [first.process.pid, int((tmp_path / "child").read_text())]
        assert all(map(is_alive, pids))
        jobs.cancel(second)
        jobs.cancel(first)
        await until(lambda: third.state == "done")
        assert (first.state, second.state, first.data) == ("cancelled", "cancelled", None)
        await until(lambda: not any(map(is_alive, pids)))
        jobs.cancel(third)
        assert third.state == "done"

    serve(worker, act)
    assert not (tmp_path / "b.began").exists()


def test_a_job_that_fails_says_why_and_the_next_one_runs(worker: tuple[str, ...]) -> None:
    async def act(jobs: Jobs) -> None:
        fails, dies, after = (jobs.add(Wanted(name)) for name in ("fails", "dies", "a"))
        await until(lambda: after.state == "done")
        assert (fails.state, fails.error) == ("failed", "it does not work")
        assert (dies.state, dies.error) == ("failed", "the process that worked on it ended with signal 9")

    serve(worker, act)


def test_the_end_of_the_server_is_the_end_of_its_job(worker: tuple[str, ...], tmp_path: Path) -> None:
    async def act(jobs: Jobs) -> None:
        job = jobs.add(Wanted("sleeps"))
        await until(lambda: len(job.stages) == 2)

    serve(worker, act)
    assert not is_alive(int((tmp_path / "child").read_text()))


def test_the_queue_has_an_end_and_old_jobs_are_forgotten() -> None:
    jobs = Jobs(("false",))
    for _ in range(MOST_WAITING):
        jobs.add(Wanted("a"))
    with pytest.raises(QueueFullError, match="8 jobs wait already"):
        jobs.add(Wanted("a"))
    done: list[Job] = []
    for _ in range(50):
        for job in list(jobs.waiting):
            jobs.cancel(job)
        done.append(jobs.add(Wanted("a")))
    assert len(jobs.jobs) < 25
    assert done[-1].id in jobs.jobs
    assert done[0].id not in jobs.jobs
