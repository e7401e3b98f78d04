"""`holdover serve MODEL...`."""

from __future__ import annotations

import socket
from typing import Annotated

import typer

from holdover.cli.common import fail, fails_politely, time_limit_option

ADDRESS = "127.0.0.1"


@fails_politely
def serve(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="The models that the page may load, in the forms that the other commands take; it loads no others.",
            show_default=False,
        ),
    ],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="The port; 0 for any that is free.")] = 8765,
    time_limit: Annotated[float, time_limit_option("Seconds for a frontier, about.")] = 30.0,
) -> None:
    """Serve the report page on this machine only, with a form that records and plans again."""
    from holdover.cli.model_spec import parsed

    for model in models:
        parsed(model)
    try:
        import uvicorn

        from holdover.server.app import make_app
        from holdover.server.jobs import Jobs, worker_command
    except ModuleNotFoundError as error:
        fail(f"{error.name} is not installed here: pip install starlette uvicorn")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((ADDRESS, port))
        except OSError as error:
            fail(f"cannot listen on {ADDRESS}:{port}: {error.strerror or error}; choose another --port, or 0 for any")
        bound = listening.getsockname()[1]
        typer.echo(f"http://{ADDRESS}:{bound}/  (Ctrl-C ends it)")
        app = make_app(list(dict.fromkeys(models)), bound, Jobs(worker_command(time_limit)))
        config = uvicorn.Config(app, log_level="warning", server_header=False)
        uvicorn.Server(config).run(sockets=[listening])
