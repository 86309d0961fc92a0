# Every target first makes the environment; a second call finds it ready.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
DISTRIBUTIONS := core plugins/qwen2_vl plugins/qwen2_5_vl plugins/deepseek_vl2 plugins/transformers_auto
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
	$(BIN)/python -m pytest -n 2 --dist loadfile

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

bench: $(STAMP)
	$(BIN)/python -m benchmarks

tables: $(STAMP)
	$(BIN)/python -m mm_plugin_transformers_auto.table docs/fallback-models.md

# Writes anew what tests/test_snapshot.py compares with, where a change of output is meant.
snapshot: $(STAMP)
	$(BIN)/python tests/make_snapshot.py

wheels: $(STAMP)
	$(BIN)/python tests/check_wheels.py

clean:
	rm -rf $(VENV) dist out
