# `make run` trains end to end, `make test` checks everything; both work on a fresh machine with Python >= 3.10.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONFIG ?= deploy/configs/quickstart.yaml
PROTO := $(BIN)/python -m grpc_tools.protoc -I services/pb=proto --python_out=. --pyi_out=. --grpc_python_out=. proto/streamrl.proto

.PHONY: venv run test lint proto clean

venv: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml deploy/constraints-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 10) <= sys.version_info[:2] <= (3, 13) else f"error: Python 3.10 to 3.13 is needed, $(PYTHON) is {sys.version.split()[0]}; give another: make PYTHON=...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' -c deploy/constraints-cpu.txt
	@touch $@

run: venv
	@$(BIN)/streamrl run $(CONFIG)

test: lint
	@$(BIN)/python -m pytest -q

lint: venv
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { echo "error: run .venv/bin/ruff format ." >&2; exit 1; }
	@$(BIN)/mypy --no-error-summary

proto: venv
	@$(PROTO)

clean:
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
