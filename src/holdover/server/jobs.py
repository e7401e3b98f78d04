"""One job at a time, each in a process of its own, the others in a queue."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from holdover.errors import HoldoverError
from holdover.server.form import Wanted

State = Literal["waiting", "running", "done", "failed", "cancelled"]
MOST_WAITING = 8
MOST_KEPT = 20
GRACE_SECONDS = 2.0


class QueueFullError(HoldoverError):
    """As many jobs wait as may."""


def worker_command(time_limit: float) -> tuple[str, ...]:
    """The worker of this package, with that many seconds for each frontier."""
    return sys.executable, "-m", "holdover.server.worker", str(time_limit)


@dataclass
class Job:
    """One run of the worker."""

    id: str
    wanted: Wanted
    state: State = "waiting"
    stages: list[tuple[str, float]] = field(default_factory=list)  # what was begun, and when
    ended: float = 0.0
    error: str = ""
    data: dict[str, Any] | None = None
    process: asyncio.subprocess.Process | None = None


class Jobs:
    """The queue. `run` serves it until it is cancelled."""

    def __init__(self, worker: Sequence[str] = ()) -> None:
        """`worker` is the command of the process, to which the file for its data is added."""
        self.worker = tuple(worker) or worker_command(30.0)
        self.jobs: dict[str, Job] = {}
        self.waiting: list[Job] = []
        self.more = asyncio.Event()

    def add(self, wanted: Wanted) -> Job:
        """Put a job at the end of the queue.

        Raises:
            QueueFullError: too many wait.
        """
        if len(self.waiting) >= MOST_WAITING:
            raise QueueFullError(f"{MOST_WAITING} jobs wait already: cancel one, or wait for one to end")
        job = Job(secrets.token_urlsafe(9), wanted)
        self.jobs[job.id] = job
        self.waiting.append(job)
        ended = [j for j in self.jobs.values() if j.state not in ("waiting", "running")]
        for old in ended[: max(0, len(ended) - MOST_KEPT)]:
            del self.jobs[old.id]
        self.more.set()
        return job

    def cancel(self, job: Job) -> None:
        """Take it out of the queue, or end its process and all that it started."""
        if job.state == "waiting":
            self.waiting.remove(job)
        elif job.state == "running" and job.process is not None:
            _signal_all(job.process, signal.SIGTERM)
        else:
            return
        job.state, job.ended = "cancelled", time.monotonic()

    def status(self, job: Job) -> dict[str, Any]:
        """What the page shows while it waits."""
        now = job.ended or time.monotonic()
        ends = [began for _, began in job.stages[1:]] + [now]
        return {
            "id": job.id,
            "state": job.state,
            "ahead": self.waiting.index(job) + 1 if job in self.waiting else 0,
            "stages": [
                {"what": what, "seconds": round(end - began, 1)}
                for (what, began), end in zip(job.stages, ends, strict=True)
            ] if job.stages else [],
            "error": job.error,
        }  # fmt: skip

    async def run(self) -> None:
        """Serve the queue, one job after the other."""
        while True:
            self.more.clear()
            while self.waiting:
                job = self.waiting.pop(0)
                job.state = "running"
                try:
                    await self._work(job)
                finally:
                    job.process = None
            await self.more.wait()

    async def _work(self, job: Job) -> None:
        with tempfile.TemporaryDirectory(prefix="holdover-") as folder:
            output = Path(folder) / "data.json"
            job.process = process = await asyncio.create_subprocess_exec(
                *self.worker, str(output),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
            try:
                assert process.stdin is not None
                with contextlib.suppress(ConnectionError):  # it has gone already; its status says why
                    process.stdin.write(json.dumps(job.wanted.to_dict()).encode())
                    process.stdin.close()
                await self._follow(job, process)
                status = await process.wait()
            finally:
                await _ended(process)
            job.ended = time.monotonic()
            if job.state == "cancelled":
                return
            if status == 0 and output.exists():
                job.data, job.state = json.loads(output.read_text()), "done"
            else:
                job.state = "failed"
                how = f"signal {-status}" if status < 0 else f"status {status}"
                job.error = job.error or f"the process that worked on it ended with {how}"

    async def _follow(self, job: Job, process: asyncio.subprocess.Process) -> None:
        """Read the worker's progress: a line of JSON for each stage that begins, and one for an error."""
        assert process.stdout is not None
        async for line in process.stdout:
            with contextlib.suppress(ValueError):
                said = json.loads(line)
                if "stage" in said:
                    job.stages.append((str(said["stage"]), time.monotonic()))
                elif "error" in said:
                    job.error = str(said["error"])


def _signal_all(process: asyncio.subprocess.Process, number: int) -> None:
    """To the worker and what it forked: it leads a process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Whatever happened, nothing of the job runs on."""
    if process.returncode is None:
        _signal_all(process, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), GRACE_SECONDS)
    _signal_all(process, signal.SIGKILL)
    await process.wait()
