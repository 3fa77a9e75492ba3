# Every target does its own set-up in .venv; PYTHON=/path/to/python3.12 picks the interpreter.

PY := .venv/bin/python
# What `make demo` and `make test` pass on, for example: make demo ARGS="--max_tokens=200", make test PYTEST_ARGS="-k pointer".
ARGS ?=
PYTEST_ARGS ?=

.PHONY: help demo test lint types pytest long aot format clean setup-run setup-test setup-aot
.NOTPARALLEL:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' Makefile

demo: setup-run ## decode text with the embedded model (ARGS="..." reaches the example)
	@$(PY) examples/decode_qwen_like.py $(ARGS)

test: lint types pytest ## lint, types, tests: what CI runs before make aot (PYTEST_ARGS="..." reaches pytest)

lint: setup-test ## ruff: rules and format
	@echo "Linting"
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

types: setup-test ## mypy
	@echo "Checking types"
	@$(PY) -m mypy

# On a CPU unless the caller says otherwise: what a test needs of an accelerator, it says itself.
pytest: setup-test ## the tests alone, two at a time
	@echo "Running the tests"
	@JAX_PLATFORMS="$${JAX_PLATFORMS-cpu}" $(PY) -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)

long: setup-test ## the tests that take longest: a soak, crashes, every model through the decode loops (several minutes)
	@echo "Running the long tests"
	@JAX_PLATFORMS="$${JAX_PLATFORMS-cpu}" $(PY) -m pytest -n 2 --dist worksteal -m long $(PYTEST_ARGS)

# The compiler's Python packages are kept out of .venv: where jax sees its CUDA plugin it wants a GPU and all of CUDA.
aot: setup-aot ## compile the GPU kernels for an H200, no GPU needed, and check what they take
	@echo "Compiling the GPU kernels"
	@JAX_PLATFORMS=cpu PYTHONPATH=.venv/aot $(PY) -m pytest -n 2 --dist worksteal -m aot tests/test_aot.py tests/test_aot_readouts.py $(PYTEST_ARGS)

format: setup-test ## rewrite the sources in the house's format
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

clean: ## delete .venv and caches (.data and .runs stay)
	@rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

setup-run setup-test setup-aot: setup-%:
	@.ci/setup $*
