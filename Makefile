# What a learner and a contributor type. README.md has the commands behind each target for those without make.
# PYTHON=python3.12 chooses the interpreter; TORCH_INDEX=URL where torch comes from (a CPU build, for example).
PYTHON ?= python3
RUN := .venv/bin/python -P -m
TESTS := .venv/bin/python -P tests/selection/run.py

help:
	@echo "make learn            install into .venv, check the machine, open the course in JupyterLab"
	@echo "make test-quick       lint, types, arrows, and tests of what changed: what to run while working"
	@echo "make test LAB=05      all tests of a lab; make test CHAPTER=03: of a chapter"
	@echo "make test             lint, types, arrows; tests of what changed, short ones, and a tenth of the others"
	@echo "make test-all         all tests, also the slow ones; goes on where it was killed"

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

# What runs, by what each test needed when it was last recorded: tests/README.md.
ifneq ($(and $(LAB),$(CHAPTER)),)
$(error LAB or CHAPTER, not both)
endif
ifneq ($(LAB),)
test: install-test
	@$(TESTS) lab "$(LAB)"
else ifneq ($(CHAPTER),)
test: install-test
	@$(TESTS) chapter "$(CHAPTER)"
else
test: lint
	@$(TESTS) test
endif

test-all: lint
	@$(TESTS) all

# 90 seconds.
test-quick: install-test
	@$(TESTS) quick

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
