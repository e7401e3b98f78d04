# Everything here needs Python 3.11 and make, nothing else: each target makes .venv and fills it when it must.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test lint docs dev clean

demo: $(VENV)/.core
	$(BIN)/holdover demo

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict

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

$(VENV)/.lint: $(VENV)/.core
	$(PIP) $(TORCH) -e '.[lint]'
	touch $@

$(VENV)/.docs: $(VENV)/.core
	$(PIP) $(TORCH) -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) site dist
