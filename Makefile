# make setup   install what is missing (Debian packages, uv, virtual environment, eBPF objects); safe to repeat
# make demo    the main job, shown with packets
# make test    everything: types, lint, unit tests, real packets
# make lock    resolve the dependencies anew into requirements.lock
.DEFAULT_GOAL := help
.PHONY: help setup demo test lint lock clean
PYTHON ?= python3
VENV := .venv
UV := build/tools/bin/uv

help:
	@sed -n 's/^# //p' Makefile

setup:
	@sh setup.sh

demo: setup
	$(VENV)/bin/fairlead demo

lint: setup
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/ruff check
	$(VENV)/bin/mypy

test: lint
	$(VENV)/bin/pytest

lock: setup
	$(UV) pip compile pyproject.toml --group dev --universal --generate-hashes --no-header --python-version 3.11 --upgrade -o requirements.lock

clean:
	rm -rf build .venv src/fairlead/objects
