# `make demo` and `make test` do all their set-up: a .venv with pinned packages, nothing by hand.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test test-vllm check lint types format clean prove fuzz soak

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt scripts/setup
	@scripts/setup "$(PYTHON)" "$(VENV)"
	@touch $@

demo: $(STAMP)  ## one real conversation, prefill and decode in separate processes
	@$(BIN)/python examples/llama/demo.py

test: $(STAMP)  ## the ordinary suite, under five minutes
	@$(BIN)/python -m pytest -q -m "not check" -n 2 --dist loadgroup

.venv-vllm/.installed: integrations/vllm/scripts/setup integrations/vllm/pyproject.toml
	@integrations/vllm/scripts/setup "$(PYTHON)" .venv-vllm .cache/vllm
	@touch $@

test-vllm: .venv-vllm/.installed  ## the vLLM connector in the real engine: 10 minutes and 3 GB more
	@timeout -s INT -k 120 2400 .venv-vllm/bin/python -m pytest -q -p no:cacheprovider -c integrations/vllm/pyproject.toml integrations/vllm/tests

$(VENV)/.triton: $(STAMP)
	@scripts/setup "$(PYTHON)" "$(VENV)" triton
	@touch $@

check: $(VENV)/.triton  ## the longer suites
	@$(BIN)/python -m pytest -q -m check -n 2 --dist loadgroup

prove: $(STAMP)  ## the planner's systematic sweep; MINUTES=120 for all of it
	@$(BIN)/python scripts/prove.py --minutes $(or $(MINUTES),25)

fuzz: $(STAMP)  ## hostile frames into the codec and two nodes; FRAMES=10000000 for all of it
	@$(BIN)/python scripts/fuzz.py --frames $(or $(FRAMES),400000)

soak: $(STAMP)  ## the simulator with all faults; REQUESTS=2000000 for all of it
	@$(BIN)/python scripts/soak.py --requests $(or $(REQUESTS),20000)

lint: $(STAMP)
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(STAMP)
	@$(BIN)/mypy

format: $(STAMP)
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venv-vllm .cache build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
