"""The application: the page with its form, and the jobs behind it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from holdover.server.form import FormError, read_form
from holdover.server.guard import Guard
from holdover.server.jobs import Job, Jobs, QueueFullError
from holdover.server.page import render


def make_app(models: Sequence[str], port: int, jobs: Jobs | None = None) -> ASGIApp:
    """The guarded application.

    Args:
        models: what may be loaded, as on the command line.
        port: that the server listens on, on 127.0.0.1.
    """
    queue = jobs or Jobs()

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        serving = asyncio.create_task(queue.run())
        try:
            yield
        finally:
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving

    async def home(request: Request) -> Response:
        job = queue.jobs.get(request.query_params.get("job", ""))
        return HTMLResponse(await asyncio.to_thread(render, models, job))

    async def submit(request: Request) -> Response:
        try:
            data = json.loads(await request.body())
        except (ValueError, RecursionError):
            return JSONResponse({"errors": {"": "this is not JSON"}}, 422)
        try:
            job = queue.add(read_form(data, models))
        except FormError as error:
            return JSONResponse({"errors": error.errors}, 422)
        except QueueFullError as error:
            return JSONResponse({"errors": {"": str(error)}}, 429)
        return JSONResponse(queue.status(job), 202)

    def found(request: Request) -> Job | None:
        return queue.jobs.get(request.path_params["job"])

    async def status(request: Request) -> Response:
        job = found(request)
        return JSONResponse(queue.status(job)) if job else JSONResponse({"error": "no such job"}, 404)

    async def cancel(request: Request) -> Response:
        job = found(request)
        if job is None:
            return JSONResponse({"error": "no such job"}, 404)
        queue.cancel(job)
        return JSONResponse(queue.status(job))

    routes = [
        Route("/", home),
        Route("/jobs", submit, methods=["POST"]),
        Route("/jobs/{job}", status, methods=["GET"]),
        Route("/jobs/{job}/cancel", cancel, methods=["POST"]),
    ]
    return Guard(Starlette(routes=routes, lifespan=lifespan), port)
