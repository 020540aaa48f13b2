# Everything that a person or the CI runs. Needs: Python 3.11 or later with venv, git, make.
# The first run of a target sets up .venv; later runs start at once, until pyproject.toml changes.
#
#   make demo     a 4-host slice on this machine: Keras, data parallel, on 16 devices
#   make demo-ray the same on four nodes of a real Ray cluster on this machine
#   make test     unit and contract tests, and one test of the whole system for each promise and each way to use it
#   make test-all    every test                              (some of them: make test-all ARGS="-k gang -x")
#   make test-repeat N=10   make test N times, every second time beside two busy processes; lists what ever failed
#   make messages tests/system/messages.txt: an instance of each message, from the tests that raise it
#   make test-cluster KUBECONFIG=…  the tests of clusters on the one of its current context (see CONTRIBUTING.md)
#   make test-cloudpickle   the tests of pickling with the oldest cloudpickle that kinetic accepts
#   make test-ray the tests of the Ray backend, on a cluster of their own or on RAY_ADDRESS=http://…
#   make check    lint, format, types, import contracts, the figures in ARCHITECTURE.md
#   make docs     this project's site, in site/; what is wrong in it is an error
#   make bench    what things cost, next to a floor measured in the same run
#   make clean    remove everything that make made

SHELL := /bin/sh
# Where it is set, each of the many processes that the tests start would compile again what it imports.
unexport PYTHONDONTWRITEBYTECODE
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo demo-ray test test-all test-repeat messages test-cluster test-cloudpickle test-ray check check-style check-types check-types-of-macos docs bench clean

VENV := .venv
COMMA := ,
BIN := $(VENV)/bin
NEEDS := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))
# Run each candidate: a name on the PATH may be a stub of a version manager that only prints an error.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	if "$$p" -c '$(NEEDS)' >/dev/null 2>&1; then echo "$$p"; break; fi; done)

# One installation at a time, also with `make -j` and with two makes in two terminals: pip does not lock a venv itself.
LOCKED := $(shell command -v flock >/dev/null 2>&1 && echo flock $(VENV)/.lock)
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq

# What is imported is compiled then: to compile all modules takes as long as to install them.
# $(call install,what for,requirements,stamp): install, unless a make beside this one did so while we waited for the lock, or the
# stamp of a target that needs all this and more is there.
define install
@$(LOCKED) sh -euc '\
	if [ $@ -nt pyproject.toml ]; then exit 0; fi; \
	if [ $(or $(3),$@) -nt pyproject.toml ]; then touch $@; exit 0; fi; \
	echo "setting up $(VENV) for $(1) (once; takes minutes where packages must be downloaded)"; \
	$(PIP) install --no-compile $(2); touch $@'
endef

help:
	@sed -n 's/^#   make/make/p' Makefile

# .venv is made in place and never cleared, so that one that somebody set up by hand is kept.
$(VENV)/.stamp-venv:
	@"$(PYTHON)" -c '$(NEEDS)' 2>/dev/null || { \
		echo "error: no Python 3.11 or later with venv: tried $(if $(PYTHON),$(PYTHON),python3.11 python3.12 python3.13 python3)." >&2; \
		echo "       Debian and Ubuntu: apt install python3 python3-venv. To name another: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@mkdir -p $(VENV)
	@$(LOCKED) sh -euc 'if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then "$(PYTHON)" -m venv $(VENV); fi; touch $@'

$(VENV)/.stamp-demo: pyproject.toml | $(VENV)/.stamp-venv
	$(call install,the demo,--editable ".[jax]" scikit-learn,$(VENV)/.stamp-test)

$(VENV)/.stamp-test: pyproject.toml | $(VENV)/.stamp-venv
	$(call install,tests and checks,--editable ".[jax$(COMMA)dev$(COMMA)tpu-compile]")

$(VENV)/.stamp-docs: pyproject.toml | $(VENV)/.stamp-venv
	$(call install,the documentation,--editable ".[docs]")

demo: $(VENV)/.stamp-demo
	@$(BIN)/python examples/keras_data_parallel.py

demo-ray: $(VENV)/.stamp-test
	@PYTHONPATH=tests $(BIN)/python -m doubles.ray_demo examples/keras_data_parallel.py

# Else each of the processes that share the tests would compile all of them.
$(VENV)/.stamp-compiled: | $(VENV)/.stamp-test
	@for part in unit "contract tests/system"; do \
		$(BIN)/python -m pytest --collect-only -q tests/$$part >/dev/null & done; wait; touch $@

# Most tests wait for processes: more of them at once than there are processors keep these busy.
TEST_ARGS = $(or $(ARGS),-n 5 --dist worksteal)
# Where JAX has started, forks warn: its tests have a pytest of their own.
WITH_JAX = tests/with_jax -n 2 --dist loadfile
test: $(VENV)/$(if $(ARGS),.stamp-test,.stamp-compiled)
	@$(BIN)/python -m pytest -m "not long and not release" $(TEST_ARGS)
	@$(if $(ARGS),,$(BIN)/python -m pytest $(WITH_JAX))

test-all: $(VENV)/$(if $(ARGS),.stamp-test,.stamp-compiled)
	@$(BIN)/python -m pytest $(TEST_ARGS)
	@$(if $(ARGS),,$(BIN)/python -m pytest $(WITH_JAX))

N ?= 10
test-repeat: $(VENV)/.stamp-test
	@$(BIN)/python tests/repeat.py $(N) -m "not long and not release" $(TEST_ARGS)

messages: $(VENV)/.stamp-test
	@$(BIN)/python tests/messages.py --record $(TEST_ARGS)

test-cluster: $(VENV)/.stamp-test
	@[ -n "$(KUBECONFIG)" ] || { echo "error: which cluster? make test-cluster KUBECONFIG=/path/to/kubeconfig" >&2; exit 2; }
	@KINETIC_TEST_KUBECONFIG="$(KUBECONFIG)" $(BIN)/python -m pytest -m kubernetes tests/system $(ARGS)

test-ray: $(VENV)/.stamp-test
	@KINETIC_TEST_RAY_ADDRESS="$(RAY_ADDRESS)" $(BIN)/python -m pytest -m ray $(ARGS)

# The newest cloudpickle is the one of .venv.
OLDEST_CLOUDPICKLE := $(VENV)/oldest-cloudpickle/site-packages
test-cloudpickle: $(VENV)/.stamp-test
	@[ -d $(OLDEST_CLOUDPICKLE)/cloudpickle ] || $(PIP) install --no-deps --target $(OLDEST_CLOUDPICKLE) 'cloudpickle==3.0.*'
	@PYTHONPATH="$(CURDIR)/$(OLDEST_CLOUDPICKLE)" $(BIN)/python -m pytest tests/unit/test_pickl*.py tests/unit/test_payload*.py $(ARGS)

# What runs beside the caller, and what it shares with hosts, also runs on macOS. What is followed into is not told about.
AS_ON_A_MAC := --platform darwin --cache-dir .mypy_cache/darwin --follow-imports silent \
	--exclude '^kinetic/(_host|_backends/local|runner)/'

check: check-style check-types check-types-of-macos

check-style: $(VENV)/.stamp-test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports
	@$(BIN)/python tests/lines.py

check-types: $(VENV)/.stamp-test
	@$(BIN)/mypy

check-types-of-macos: $(VENV)/.stamp-test
	@$(BIN)/mypy $(AS_ON_A_MAC)

# Not with --quiet: it hides warnings from --strict as well. The variable silences an announcement of the theme.
docs: $(VENV)/.stamp-docs
	@log=$$(NO_MKDOCS_2_WARNING=true $(BIN)/python -m mkdocs build --strict 2>&1) || { echo "$$log" >&2; exit 1; }
	@echo "site/index.html is the documentation"

# benchmarks/run.py, where there is one, runs the others and knows how to compare them.
bench: $(VENV)/.stamp-test
	@if [ -e benchmarks/run.py ]; then $(BIN)/python benchmarks/run.py $(ARGS); else \
		for script in benchmarks/*.py; do [ -e "$$script" ] || continue; echo "== $$script"; $(BIN)/python "$$script" || exit; done; fi

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find kinetic tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
