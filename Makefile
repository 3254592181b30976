# Bare `make` lists the targets. All work happens in .venv and build/, both made here.

PYTHON ?= python3
CC     ?= cc
VENV   := .venv
BIN    := $(VENV)/bin

CORE_C  := $(sort $(wildcard shm_layout/*.c))
CORE_H  := $(sort $(wildcard shm_layout/*.h))
TESTS_C := $(sort $(wildcard tests/c/*.c))
TESTS_H := $(sort $(wildcard tests/c/*.h))
BENCH_C := $(sort $(wildcard benchmarks/*/*.c))
BENCH_H := $(sort $(wildcard benchmarks/*/*.h))

# The compiler that was checked builds the extension too. Only here is a warning an error:
# who installs the package may have a compiler with newer warnings.
STRICT_BUILD := CC="$(CC)" CFLAGS="$(CFLAGS) -Werror"
STRICT   := -std=c11 -Wall -Wextra -Werror
SANITIZE := -g -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all

SAN_CORE  := $(CORE_C:shm_layout/%.c=build/sanitize/%.o)
SAN_TESTS := $(TESTS_C:tests/c/%.c=build/sanitize/tests/%)
LINT      := $(CORE_C:%.c=build/lint/%.o) $(TESTS_C:%.c=build/lint/%.o) $(BENCH_C:%.c=build/lint/%.o)

.DEFAULT_GOAL := help
.PHONY: help build run test test-c test-python lint bench-core bench-purgatory docs clean
.DELETE_ON_ERROR:
# Kept between runs, so that only what changed is compiled again.
.SECONDARY:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: build/core.stamp ## make .venv, install the package in it, compile the C core

run: build ## the main job: the flights of 2013 through the daemon (4 minutes at most)
	$(BIN)/python -m examples.flights

test: test-c test-python ## C tests under ASan and UBSan, then all Python tests

test-c: $(SAN_TESTS) ## C tests alone
	@for t in $^; do echo "$$t"; $$t || exit 1; done

test-python: build ## Python tests alone; ARGS="..." goes to pytest
	$(BIN)/python -m pytest $(ARGS)

lint: build $(LINT) ## ruff, mypy --strict, and the C with every warning an error
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --strict $(wildcard tests examples benchmarks)

bench-core: build ## measure the C core; writes benchmarks/results/core.json
	$(BIN)/python benchmarks/bench_core.py

bench-purgatory: build ## measure the purgatory; writes benchmarks/results/purgatory.json
	$(BIN)/python benchmarks/bench_purgatory.py $(ARGS)

docs: build ## write docs/cli.md and the tables of docs/protocol.md from the code
	$(BIN)/python -m purgatoryd.cli.reference > build/cli.md && mv build/cli.md docs/cli.md
	$(BIN)/python -m purgatoryd.shm_layout.reference docs/protocol.md

clean: ## remove all that was built, .venv included
	rm -rf $(VENV) build dist *.egg-info shm_layout/*.so .mypy_cache .pytest_cache .ruff_cache

# ---- set-up ---------------------------------------------------------------------------

build/machine.stamp:
	@$(PYTHON) .ci/check_machine.py "$(CC)"
	@mkdir -p $(@D) && touch $@

$(VENV)/bin/python: | build/machine.stamp
	$(PYTHON) -m venv $(VENV)

# The venv's own setuptools may be too old to build without isolation.
$(VENV)/tools.stamp: $(VENV)/bin/python
	$(BIN)/pip install --quiet --upgrade "pip>=25.1" "setuptools>=77" "cffi>=1.17"
	@touch $@

# An editable install does not notice changed C, so compiling is a step of its own. The
# locks are for two terminals that build at once. The warning about editable installs is
# for folders named as the package; there is none.
$(VENV)/install.stamp: pyproject.toml setup.py $(VENV)/tools.stamp
	$(STRICT_BUILD) PYTHONWARNINGS=ignore flock build/lock \
		$(BIN)/pip install --quiet --no-build-isolation --editable ".[demo]" --group dev
	@touch $@

build/core.stamp: $(CORE_C) $(CORE_H) shm_layout/build_core.py $(VENV)/install.stamp
	$(STRICT_BUILD) flock build/lock $(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

# ---- C --------------------------------------------------------------------------------

build/sanitize/%.o: shm_layout/%.c $(CORE_H)
	@mkdir -p $(@D)
	$(CC) $(STRICT) $(SANITIZE) -c -o $@ $<

build/sanitize/core.a: $(SAN_CORE)
	@rm -f $@
	$(AR) -rcs $@ $^

build/sanitize/tests/%: tests/c/%.c build/sanitize/core.a $(TESTS_H) $(CORE_H)
	@mkdir -p $(@D)
	$(CC) $(STRICT) $(SANITIZE) -Ishm_layout -o $@ $< build/sanitize/core.a

build/lint/%.o: %.c $(CORE_H) $(TESTS_H) $(BENCH_H)
	@mkdir -p $(@D)
	$(CC) $(STRICT) $(if $(filter benchmarks/%,$<),-std=gnu11) -O3 -Ishm_layout -c -o $@ $<
