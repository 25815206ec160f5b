# What a learner and a contributor type. README.md has the commands behind each target for those without make.
# PYTHON=python3.12 chooses the interpreter; TORCH_INDEX=URL where torch comes from (a CPU build, for example).
PYTHON ?= python3
RUN := .venv/bin/python -P -m

help:
	@echo "make learn     install into .venv, check the machine, open the course in JupyterLab"
	@echo "make test      lint, types, arrows, tests"
	@echo "make test-all  the same with the slow tests"

learn:
	@$(PYTHON) .ci/install.py learn
	.venv/bin/inferlab doctor
	@.venv/bin/inferlab learn

# One thread per worker: torch would otherwise start as many per process as there are cores.
test test-all: export OMP_NUM_THREADS = 1
test test-all: export MKL_NUM_THREADS = 1
test test-all: export OPENBLAS_NUM_THREADS = 1
test test-all: export TOKENIZERS_PARALLELISM = false
test test-all: export HF_HUB_OFFLINE = 1
test test-all: export NO_PROXY = 127.0.0.1,localhost
test test-all: export no_proxy = 127.0.0.1,localhost

test: lint
	$(RUN) pytest -n auto -m "not slow"

test-all: lint
	$(RUN) pytest -n auto

lint: install-test
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	.venv/bin/lint-imports --no-logo

install-test:
	@$(PYTHON) .ci/install.py test

.PHONY: help learn test test-all lint install-test
