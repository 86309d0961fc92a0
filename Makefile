# Every target makes the environment first; a second call finds it ready.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# The core, and whatever stands in plugins/ or integrations/ with a pyproject.toml of its own: nothing here names one.
DISTRIBUTIONS := core $(patsubst %/pyproject.toml,%,$(sort $(wildcard plugins/*/pyproject.toml integrations/*/pyproject.toml)))
STAMP  := $(VENV)/.installed
# GNU OpenMP spins between small operations and slows shared machines many times over.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: setup demo test test-slow check format bench tables snapshot wheels clean

setup: $(STAMP)

$(STAMP): Makefile requirements-dev.txt $(DISTRIBUTIONS:%=%/pyproject.toml)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' requirements-dev.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps "$$(sed -n 's/^# no-deps: //p' requirements-dev.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation $(DISTRIBUTIONS:%=-e %)
	touch $@

demo: $(STAMP)
	$(BIN)/mm-plugin demo --model qwen2_vl --out out/demo.png

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# `make bench ROUNDS=1` runs every row once: whether it still works, not how fast it is.
bench: $(STAMP)
	$(BIN)/python -m benchmarks $(if $(ROUNDS),--rounds $(ROUNDS))

tables: $(STAMP)
	$(BIN)/python -m mm_plugin_transformers_auto.table docs/fallback-models.md

# Rewrites what tests/test_snapshot.py compares with, for a change that is meant to change output.
snapshot: $(STAMP)
	$(BIN)/python tests/make_snapshot.py

wheels: $(STAMP)
	$(BIN)/python tests/check_wheels.py

clean:
	rm -rf $(VENV) dist out
