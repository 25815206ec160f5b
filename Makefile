# What a learner and a contributor type. README.md has the commands behind each target for those without make.
# PYTHON=python3.12 chooses the interpreter; TORCH_INDEX=URL where torch comes from (a CPU build, for example).
PYTHON ?= python3
RUN := .venv/bin/python -P -m
SELECT := .venv/bin/python -P tests/selection.py

help:
	@echo "make learn            install into .venv, check the machine, open the course in JupyterLab"
	@echo "make test-quick       lint, types, arrows, and tests of what changed: what to run while working"
	@echo "make test LAB=05      all tests of a lab; make test CHAPTER=03: of a chapter"
	@echo "make test             lint, types, arrows, tests"
	@echo "make test-all         the same with the slow tests"

learn:
	@$(PYTHON) .ci/install.py learn
	.venv/bin/inferlab doctor
	@.venv/bin/inferlab learn

# One thread per worker: torch would otherwise start as many per process as there are cores.
test test-quick test-all soak: export OMP_NUM_THREADS = 1
test test-quick test-all soak: export MKL_NUM_THREADS = 1
test test-quick test-all soak: export OPENBLAS_NUM_THREADS = 1
test test-quick test-all soak: export TOKENIZERS_PARALLELISM = false
test test-quick test-all soak: export HF_HUB_OFFLINE = 1
test test-quick test-all soak: export NO_PROXY = 127.0.0.1,localhost
test test-quick test-all soak: export no_proxy = 127.0.0.1,localhost

# What runs together and what first: tests/conftest.py. What is left to test-all, which also records what it proved of
# the labs: tests/README.md.
ifneq ($(and $(LAB),$(CHAPTER)),)
$(error LAB or CHAPTER, not both)
endif
ifneq ($(LAB),)
test: install-test
	$(SELECT) lab "$(LAB)"
else ifneq ($(CHAPTER),)
test: install-test
	$(SELECT) chapter "$(CHAPTER)"
else
test: export INFERLAB_SAMPLE = 1
test: lint
	@$(SELECT) begin
	$(RUN) pytest -n auto --dist loadscope --no-loadscope-reorder -m "not slow"
	@$(SELECT) green
endif

test-all: export INFERLAB_RECORD = 1
test-all: lint
	@$(SELECT) begin
	$(RUN) pytest -n auto --dist loadscope --no-loadscope-reorder
	@$(SELECT) green

# Aims at 90 seconds: what changed since the last commit that `make test` recorded as green (tests/selection.py).
test-quick: install-test
	@$(SELECT) quick

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

.PHONY: help learn test test-quick test-all soak lint install-test
