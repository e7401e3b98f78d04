"""The report page with the form above it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files

from jinja2 import Environment

from holdover.cost.devices import all_cards
from holdover.report.html.page import fill, render_page
from holdover.server.form import LIBRARIES, Wanted
from holdover.server.jobs import Job
from holdover.trace.step import OPTIMIZERS, PRECISIONS


def render(models: Sequence[str], job: Job | None) -> str:
    """The page: the form alone, or with what a job that is done has found."""
    wanted = job.wanted if job is not None else Wanted(models[0])
    form = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(_asset("form.html")).render(
        models=models, wanted=wanted, precisions=list(PRECISIONS), optimizers=sorted(OPTIMIZERS),
        devices=[name for name, known in all_cards().items() if known.capability is not None],
        following=job.id if job is not None and job.state in ("waiting", "running") else "",
    )  # fmt: skip
    script = f"const LIBRARIES = {json.dumps(LIBRARIES)};\n{_asset('form.js')}"
    extra = {"above": form, "form_script": script, "served": True}
    if job is not None and job.data is not None:
        return render_page(job.data, **extra)
    return fill(title="holdover", **extra)


def _asset(name: str) -> str:
    return files("holdover.server").joinpath(name).read_text()
