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
test test-all soak: export OMP_NUM_THREADS = 1
test test-all soak: export MKL_NUM_THREADS = 1
test test-all soak: export OPENBLAS_NUM_THREADS = 1
test test-all soak: export TOKENIZERS_PARALLELISM = false
test test-all soak: export HF_HUB_OFFLINE = 1
test test-all soak: export NO_PROXY = 127.0.0.1,localhost
test test-all soak: export no_proxy = 127.0.0.1,localhost

# What runs together and what first: tests/conftest.py. Left to test-all: of the labs' proofs all but the few mutants
# that fail every check between them, most of these through the examiner, and every private form through the examiner;
# the whole compile table; soft caps with some of the windows.
test: lint
	$(RUN) pytest -n auto --dist loadscope --no-loadscope-reorder -m "not slow"

test-all: lint
	$(RUN) pytest -n auto --dist loadscope --no-loadscope-reorder

# Random load, aborts and faults for as long as you like: no text may change, nothing leak.
soak: SECONDS = 600
soak: install-test
	INFERLAB_SOAK_SECONDS=$(SECONDS) $(RUN) pytest tests/engine/test_soak.py

lint: install-test
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	.venv/bin/lint-imports --no-logo

install-test:
	@$(PYTHON) .ci/install.py test

.PHONY: help learn test test-all soak lint install-test
