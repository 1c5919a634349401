# Everything sets itself up: only Python 3.11 or later, pip and make are assumed.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Tests start hundreds of processes; without byte code each of them compiles the package again.
unexport PYTHONDONTWRITEBYTECODE

TORCH ?= 2.15.0
# Of the GPU benchmark: which part, and for how long.
PART ?= machine ladder profile techniques clock parity memory
MINUTES ?= 9

.PHONY: quickstart test test-unit test-plan test-core test-torch test-long test-all torture rows check lint types docs site wheel benchmark benchmark-gpu gpu-page benchmark-peers clean

quickstart: $(READY)  ## plan and train a small model on the standard library's source, then open the report
	$(BIN)/shardwise plan recipes/quickstart.yaml
	$(BIN)/shardwise train recipes/quickstart.yaml --out runs/quickstart
	$(BIN)/shardwise generate runs/quickstart --prompt "def " --tokens 300
	@$(BIN)/python -m webbrowser -t "file://$(CURDIR)/runs/quickstart/report.html" >/dev/null 2>&1 || true
	@echo "the report: runs/quickstart/report.html"

test: $(READY)  ## the tiers unit, plan, ranks and cli
	$(BIN)/python -m pytest

test-unit: $(READY)  ## the tests that fork no ranks, run no command and plan nothing
	$(BIN)/python -m pytest -m unit

test-plan: $(READY)  ## the tests of the planner and the dry run
	$(BIN)/python -m pytest -m plan

test-core: $(READY)  ## the core's own unit tests, on a copy of the package without plugins
	$(BIN)/python -m tests.core_only

test-torch:  ## the tiers unit, plan and ranks on another release, such as TORCH=2.11.0 or TORCH=2.15.0, in .venv-torch-RELEASE
	$(PYTHON) -m venv .venv-torch-$(TORCH)
	.venv-torch-$(TORCH)/bin/python -m pip install --quiet "torch==$(TORCH)" --editable ".[dev]"
	PATH="$(CURDIR)/.venv-torch-$(TORCH)/bin:$$PATH" .venv-torch-$(TORCH)/bin/python -m pytest tests -m "unit or plan or ranks"

test-long: $(READY)  ## what the other tiers leave out, with three steps of each: 2.5 hours on 2 cores
	$(BIN)/python -m pytest -m long

test-all: $(READY)  ## all tests: also most pairs of settings, 20 steps of each, and all families
	$(BIN)/python -m pytest -m "" --parity-steps 20
	$(BIN)/python -m tests.core_only

torture: $(READY)  ## 300 kills, 30 hangs, 1,000 bit flips, 7,000 malformed files: about an hour on 2 cores
	$(BIN)/python -m tests.torture --out benchmarks/results/torture.json

rows: $(READY)  ## write tests/rows/rows.json, the combinations of settings that tests train
	$(BIN)/python -m tests.rows

check: lint types test  ## lint, types and tests

lint: $(READY)
	$(BIN)/ruff check shardwise tests benchmarks docs
	$(BIN)/ruff format --check shardwise tests benchmarks docs

types: $(READY)
	$(BIN)/mypy shardwise

docs: $(READY)  ## write the generated pages of docs/reference and the pictures of the README
	PYTHONPATH=. $(BIN)/python docs/generate.py

site: $(READY)  ## the documentation as a site with search, in site/; fails on a broken link
	$(BIN)/python -m pip install --quiet "mkdocs>=1.6,<2"
	$(BIN)/mkdocs build --strict

wheel: $(READY)  ## dist/shardwise-*.whl, with the recipes
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

benchmark: $(READY)  ## predicted against measured memory on real runs (about 25 minutes)
	$(BIN)/python benchmarks/ledger.py

benchmark-gpu: $(READY)  ## measure one CUDA device for at most 9 minutes; PART=ladder for a part, AGAIN=1 for all its rows
	$(BIN)/python benchmarks/gpu.py --minutes $(MINUTES) --only $(PART) $(if $(AGAIN),--again)

gpu-page: $(READY)  ## plan what a GPU measured, without one, and write it into docs/reference/gpu.md
	$(BIN)/python benchmarks/gpu.py --predict
	PYTHONPATH=. $(BIN)/python docs/generate.py

benchmark-peers: $(READY)  ## speed and memory against other trainers, which it installs (about half an hour)
	for peer in accelerate lightning deepspeed; do \
	  $(BIN)/python -m pip install --quiet $$peer "torch>=2.11,<2.14" || echo "$$peer does not install"; done
	$(BIN)/python benchmarks/peers.py

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "torch>=2.11,<2.14"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) runs build dist site *.egg-info
