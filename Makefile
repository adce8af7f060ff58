# Works with GNU make 3.81, the one macOS ships: no .ONESHELL, no grouped targets, no != assignments.

MIN_PYTHON := 3.11
comma      := ,
NEW_ENOUGH := import sys; sys.exit(sys.version_info < ($(subst .,$(comma),$(MIN_PYTHON))))
VENV       ?= .venv
BIN        := $(VENV)/bin
PY         := $(BIN)/python

# Linux needs MLX's CPU backend and a fast BLAS from pip; on macOS mlx brings its own.
# With an NVIDIA GPU:  make setup EXTRAS=dev && .venv/bin/pip install 'mlx[cuda13]'
ifeq ($(shell uname -s),Linux)
EXTRAS      ?= cpu,dev
CHECK_EXTRA := [cpu]
else
EXTRAS      ?= dev
CHECK_EXTRA :=
endif

# One stamp per set of extras, so that asking for others installs them.
STAMP := $(VENV)/.ready-$(EXTRAS)

# What `make` alone does.
.DEFAULT_GOAL := help

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

PEERS    := benchmarks/peers
KVPRESS  := build/peers-kvpress
VELOX    := build/peers-velox

.PHONY: help setup demo test soak lint format bench bench-serve needles models sweep peers build check-wheel clean

help: ## this list
	@echo "make TARGET, where TARGET is one of"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' Makefile
	@echo "PYTHON=python3.13 picks the interpreter for $(VENV); by default the first one >= $(MIN_PYTHON) that is found."

setup: $(STAMP) ## create .venv and install the package in it (a second call does nothing)

$(STAMP): pyproject.toml
	@set -eu; \
	if $(PY) -m pip --version >/dev/null 2>&1; then \
	  echo "using $(VENV) as it is"; \
	else \
	  py="$(PYTHON)"; \
	  if [ -z "$$py" ]; then \
	    for candidate in python3 python python3.13 python3.12 python3.11 python3.14; do \
	      if $$candidate -c '$(NEW_ENOUGH)' >/dev/null 2>&1; then py=$$candidate; break; fi; \
	    done; \
	  fi; \
	  if [ -z "$$py" ]; then \
	    echo "error: no Python >= $(MIN_PYTHON) found. Install one, or name it: make setup PYTHON=/path/to/python3" >&2; exit 1; \
	  fi; \
	  if ! "$$py" -c '$(NEW_ENOUGH)'; then \
	    echo "error: PYTHON=$$py is older than $(MIN_PYTHON) or does not start." >&2; exit 1; \
	  fi; \
	  if ! "$$py" -c 'import ensurepip, venv' >/dev/null 2>&1; then \
	    echo "error: $$py cannot create virtual environments: its venv or ensurepip module is missing." >&2; \
	    echo "       On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; \
	  fi; \
	  echo "creating $(VENV) with $$py"; \
	  "$$py" -m venv --clear $(VENV); \
	  $(PY) -m pip install --quiet --upgrade pip; \
	fi; \
	echo "installing kvkeep[$(EXTRAS)] (the first time, about 450 MB to download on Linux)"; \
	$(PY) -m pip install --quiet -e '.[$(EXTRAS)]'; \
	touch $@

demo: setup ## ask the real model about a long document, with the exact cache and with a quarter of its rows
	$(BIN)/kvkeep generate --model demo --compare --kv-budget 25% --max-tokens 32 --prompt - < examples/harbour_log.txt

test: setup ## every test but those marked slow
	$(PY) -m pytest

soak: setup ## hundreds of requests to a server of a tiny model, and what is left of them
	$(PY) -m pytest -m slow tests/test_serve_soak.py

lint: setup ## ruff, ruff format --check, pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(PY)

format: setup ## let ruff mend and format what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## the benchmarks, as ratios with their spread
	$(PY) benchmarks/run.py

bench-serve: setup ## eight streams at once through kvkeep serve, against mlx_lm.server and the bound (about ten minutes)
	$(PY) benchmarks/serving.py

needles: setup ## facts found in long prompts with few rows kept, by policy and budget (about an hour)
	$(PY) benchmarks/needles.py

models: setup ## write docs/models.md anew: what eviction does on each model type of mlx-lm
	$(PY) tests/models_table.py

sweep: setup ## every model type under every policy and store (about half an hour)
	$(PY) -m pytest tests/test_zoo.py -m ""
peers: setup $(KVPRESS)/.ready $(VELOX)/.ready ## beside kvpress and veloxquant-mlx, each in an environment of its own (about two hours)
	$(PY) $(PEERS)/peers.py --kvpress $(KVPRESS)/bin/python --velox $(VELOX)/bin/python $(PEERS_FLAGS)

build/peers-%/.ready: $(PEERS)/requirements-%.txt | setup
	$(PY) -m venv --clear build/peers-$*
	build/peers-$*/bin/python -m pip install --quiet -r $<
	touch $@

build: setup ## the wheel, in dist/
	rm -rf dist
	$(PY) -m build --wheel

# -I and env -u: neither PYTHONPATH nor the working directory may lend the tree's own sources to the check.
check-wheel: build ## install the wheel into a clean environment, import it, run the command
	rm -rf build/wheel-venv
	$(PY) -m venv build/wheel-venv
	build/wheel-venv/bin/python -m pip install --quiet "$$(ls dist/kvkeep-*.whl)$(CHECK_EXTRA)"
	build/wheel-venv/bin/python -m pip check
	cd build && wheel-venv/bin/python -I -c "import kvkeep; print('kvkeep', kvkeep.__version__, 'from', kvkeep.__file__)"
	test -f build/wheel-venv/lib/python3*/site-packages/kvkeep/py.typed
	test -f build/wheel-venv/lib/python3*/site-packages/kvkeep/server/pages/page.html
	test -f build/wheel-venv/lib/python3*/site-packages/kvkeep/inspecting/inspect.html
	cd build && env -u PYTHONPATH wheel-venv/bin/kvkeep --help

clean: ## remove the environment and what was built
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
