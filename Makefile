# Starts from nothing but Python >= 3.11 and make. `make` alone lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help venv run test test-unit test-all audit chaos fuzz mutants bench race proven lint dashboard dist clean

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)
VENV ?= .venv
# Used only where pip finds no CPU build of torch and the machine has no NVIDIA GPU; set it to an index you trust.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
# Optional dependencies to install; EXTRAS= installs what a run needs and no more.
EXTRAS ?= dev
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Each process that a run starts would compile all of elastic again.
unexport PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS ?= 1
export RAY_USAGE_STATS_ENABLED ?= 0

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/'

venv: $(STAMP)  ## create the virtual environment (once)

$(STAMP): pyproject.toml constraints.txt deploy/install.sh
	@PYTHON="$(PYTHON)" VENV="$(VENV)" TORCH_CPU_INDEX="$(TORCH_CPU_INDEX)" EXTRAS="$(EXTRAS)" bash deploy/install.sh
	@touch $@

run: $(STAMP)  ## the main job on this machine: real text, several Ray nodes, drills
	$(BIN)/elastic run jobs/quickstart

test: $(STAMP)  ## what CI runs: lint, unit and end-to-end tests (14 minutes on two quick cores, 45 on slow ones)
	@$(BIN)/python tests/tiers.py lint unit e2e $(if $(RECORD),--record)

test-unit: $(STAMP)  ## tests that need neither Ray nor another process (about 3 minutes)
	@$(BIN)/python tests/tiers.py unit $(if $(RECORD),--record)

test-all: $(STAMP)  ## everything there is; writes what it saw into docs/proven.md
	@$(BIN)/python tests/tiers.py lint unit e2e whole --record

audit: $(STAMP)  ## secrets in the repository, and known vulnerabilities of pinned packages (says so where PyPI cannot be reached)
	@$(BIN)/python -m pytest -q -rs -n0 -m "" tests/test_supply.py

lint: $(STAMP)  ## ruff, mypy --strict, import contracts
	@$(BIN)/python tests/tiers.py lint

fuzz: $(STAMP)  ## N wrong inputs for each reader of files and messages (N=100000: some 20 minutes; ONLY='lease journal')
	@$(BIN)/python tests/fuzz/run.py --n $(or $(N),10000) $(if $(ONLY),--only $(ONLY))

mutants: $(STAMP)  ## seed some 190 faults one by one and see which test notices each (half an hour)
	@$(BIN)/python tests/mutants/run.py

chaos: $(STAMP)  ## random jobs under random faults (SEED=n RUNS=k MINUTES=m of each; ENGINE=virtual, markets or processes)
	@failed=; for engine in $(or $(ENGINE),virtual markets processes); do $(BIN)/python tests/chaos.py --engine $$engine $(if $(SEED),--seed $(SEED)) $(if $(RUNS),--runs $(RUNS)) $(if $(MINUTES),--minutes $(MINUTES)) || failed=1; done; [ -z "$$failed" ]

bench: $(STAMP)  ## the benchmarks (hours; `--smoke` of each takes seconds)
	@failed=; for bench in planner owners overhead copies reshard checkpoint recovery unequal sickness; do echo "tests/bench/$$bench.py"; $(BIN)/python tests/bench/$$bench.py --json || failed=1; done; [ -z "$$failed" ]

race: $(STAMP)  ## race against Ray Train, torchrun and a restarted script (about 25 minutes; draws race.png)
	$(BIN)/python tests/bench/race.py --png race.png

proven: $(STAMP)  ## certify this machine with and without Ray (10 minutes), then write docs/proven.md
	@failed=; for how in "" --no-ray; do $(BIN)/elastic certify --minutes 5 $$how --out docs/certified || failed=1; done; $(BIN)/python -m elastic.certify.proven; [ -z "$$failed" ]

dashboard:  ## build the page of `elastic dashboard` anew (needs Node.js 20)
	cd elastic/observe/dashboard/page && npm ci && npm run build

dist: $(STAMP)  ## the wheel and the versions that its tests ran with, for repositories of your own
	rm -rf build dist
	$(BIN)/python -m pip wheel -q --no-deps -w dist .
	cp constraints.txt dist/
	@ls dist

clean:  ## remove the virtual environment
	rm -rf $(VENV)
