# Every target does its own set-up: a virtual environment in .venv, made once and remade when the pins change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo demo-seeds test lint clean

demo: $(READY)
	$(BIN)/veritune demo

# The demonstration with three seeds; finished runs are kept, and the table is printed from the run folders.
demo-seeds: $(READY)
	for seed in 0 1 2; do \
	    test -d runs/demo-seed$$seed/checkpoints/step-000060 || { rm -rf runs/demo-seed$$seed; \
	    $(BIN)/veritune demo --seed $$seed --run runs/demo-seed$$seed || exit; }; \
	done
	$(BIN)/veritune report runs/demo-seed0 runs/demo-seed1 runs/demo-seed2 --output runs/demo-seeds

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV)

# torch is installed by its exact pin first, so that pip does not look for a newer build that satisfies the range.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet $$(grep '^torch==' constraints.txt)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)
