# Everything here needs Python 3.11 and make, nothing else: each target makes .venv and fills it when it must.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test lint docs screenshots browser dev clean

demo: $(VENV)/.core
	$(BIN)/holdover demo

test: $(VENV)/.test browser
	$(BIN)/python -m pytest -n 2

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict

# Draws the pictures of docs/report.md anew, from reports made here.
screenshots: $(VENV)/.test browser
	$(BIN)/python docs/screenshots.py

dev: $(VENV)/.test $(VENV)/.lint $(VENV)/.docs

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The stamps record what was installed. torch goes into the same command as what depends on it, or pip may pick another.
$(VENV)/.core: $(BIN)/python pyproject.toml Makefile
	$(PIP) $(TORCH) -e .
	touch $@

$(VENV)/.test: $(VENV)/.core
	$(PIP) $(TORCH) -e '.[test,zoo,plots]'
	touch $@

# The report page is tested in Debian's Chromium, or the one that CHROMIUM names. Where root may install it, it is.
browser:
	@command -v "$${CHROMIUM:-chromium}" >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq chromium; } || \
	  echo "no Chromium here: the tests of the report page will fail; install it, or name one in CHROMIUM" >&2

$(VENV)/.lint: $(VENV)/.core
	$(PIP) $(TORCH) -e '.[lint]'
	touch $@

$(VENV)/.docs: $(VENV)/.core
	$(PIP) $(TORCH) -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) site dist
