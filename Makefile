# Needs make and a Python >= 3.12 (on PATH, in pyenv, or through uv). The first run installs into
# .venv; later runs find it complete. PYTHON=... chooses another interpreter.

BIN = .venv/bin

.PHONY: help environment demo test test-slow test-exhaustive test-h200 test-chat shapes lint format types ci clean

help:
	@echo "make demo       32 prompts on the embedded model, a table and a picture of the arena"
	@echo "make test       the default test suite, about 15 minutes on 2 cores"
	@echo "make test-slow  the tests that take longer"
	@echo "make test-exhaustive  all small arenas there are, hours"
	@echo "make test-h200  compile for an H200 without one, in an environment of its own"
	@echo "make test-chat  fetch SmolLM2 (93 MB, once), ask it, and measure its perplexity"
	@echo "make shapes     kernels and model, with every array annotation checked as they run"
	@echo "make lint       ruff, and is the code formatted"
	@echo "make format     format the code"
	@echo "make types      mypy on the built wheel"
	@echo "make ci         everything that has to pass before a change lands"
	@echo "make clean      remove environments, caches and outputs"

environment:
	@.ci/environment .venv test,lint

demo: environment
	@$(BIN)/unimem demo

test: environment
	$(BIN)/python -m pytest

test-slow: environment
	XLA_FLAGS="$$XLA_FLAGS" $(BIN)/python -m pytest -m slow

test-exhaustive: environment
	$(BIN)/python -m pytest -m exhaustive

test-h200:
	.ci/h200

test-chat:
	.ci/chat

# Bad input is left out: it would meet the checker before it meets the error that it is due.
shapes: environment
	$(BIN)/python -m pytest tests/kernels -k "not refused" \
	    --jaxtyping-packages=unimem_jax.pallas_kernels,unimem_jax.draw,beartype.beartype

lint: environment
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: environment
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: environment
	.ci/types $(BIN)/python

ci:
	bash .ci/run

clean:
	rm -rf .venv* build dist out *.egg-info .pytest_cache .hypothesis .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
