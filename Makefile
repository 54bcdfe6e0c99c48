# make demo   sets everything up and trains SmolLM2-135M on the bundled data
# make test   sets everything up and runs the checks that CI runs
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2

.PHONY: help setup demo test test-long clean

help:
	@echo "make demo       set up, then train SmolLM2-135M on the bundled data"
	@echo "make test       set up, then lint, type check and test (what CI runs)"
	@echo "make test-long  the long harnesses"
	@echo "make clean      remove caches and the virtual environment (runs/ stays)"

setup:
	@$(PYTHON) scripts/setup.py --venv $(VENV)

demo: setup
	@$(BIN)/fitune train examples/demo.yaml
	@echo "to use the fitune command: source $(BIN)/activate"

test:
	@$(PYTHON) scripts/setup.py --venv $(VENV) --extras dev
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -n $(WORKERS) -m "not long"

test-long:
	@$(PYTHON) scripts/setup.py --venv $(VENV) --extras dev
	$(BIN)/pytest -m long

clean:
	rm -rf $(VENV) $(VENV).lock build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
