# `make` without a target lists the targets. All files that it makes are in .venv and build/.

PYTHON ?= python3
CC     ?= cc
CLANG  ?= clang
AARCH64_CC ?= aarch64-linux-gnu-gcc
AARCH64_RUN ?= qemu-aarch64
SECONDS ?= 60
ROUNDS ?= 40
VENV   := .venv
BIN    := $(VENV)/bin
CPUS   := $(shell nproc)
WORKERS ?= $(shell expr $(CPUS) + 1)

CORE_C  := $(sort $(wildcard shm_layout/core/*/*.c))
PACK_C  := clients/pack/batch.c
PACK    := $(sort $(wildcard clients/pack/*.[ch]))
CORE_H  := $(sort $(wildcard shm_layout/*.h shm_layout/core/*.h shm_layout/core/*/*.h))
TESTS_C := $(sort $(wildcard tests/c/*.c))
TESTS_H := $(sort $(wildcard tests/c/*.h tests/fuzz/*.h clients/pack/*.h))
GUEST_C := $(sort $(wildcard tests/guest/*.c))
FUZZ_C  := $(sort $(filter-out tests/fuzz/main.c,$(wildcard tests/fuzz/*.c)))
CRASH_C := $(sort $(wildcard tests/crash/*.c))
STEPS_C := $(filter-out %/stores.c,$(CRASH_C))
STORES_C := $(filter-out %/step.c,$(CRASH_C))
ORDERS_C := $(sort $(wildcard tests/orders/*.c))
ORDERS_SEEN := tests/orders/futex.c tests/orders/readers.c tests/orders/rings.c tests/orders/wal.c
ORDERS_H := $(sort $(wildcard tests/orders/*.h))
CRASH_H := $(sort $(wildcard tests/crash/*.h))
BENCH_C := $(sort $(wildcard benchmarks/*/*.c))
BENCH_H := $(sort $(wildcard benchmarks/*/*.h))

# The compiler that build/machine.stamp checks also builds the extension. Warnings are errors only
# here, because an installation may use a compiler with newer warnings. All assertions are checked
# here as well.
STRICT_BUILD := CC="$(CC)" CFLAGS="$(CFLAGS) -Werror -DPG_ASSERT_ALL"
STRICT   := -std=c11 -Wall -Wextra -Werror -pthread
SANITIZE := -DPG_ASSERT_ALL -g -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all

SAN_CORE  := $(CORE_C:shm_layout/core/%.c=build/sanitize/core/%.o) $(PACK_C:clients/%.c=build/sanitize/%.o)
SAN_TESTS := $(TESTS_C:tests/c/%.c=build/sanitize/tests/%)
SAN_FUZZ  := $(FUZZ_C:tests/fuzz/%.c=build/sanitize/fuzz/%)
LIBFUZZER := $(FUZZ_C:tests/fuzz/%.c=build/fuzz/%)
AARCH64   := $(TESTS_C:tests/c/%.c=build/aarch64/tests/%)
HARNESSES := $(SAN_TESTS) $(SAN_FUZZ) build/crash/crash build/crash/stores build/orders/explore
LINT      := $(patsubst %.c,build/lint/%.o,$(CORE_C) $(PACK_C) $(TESTS_C) $(GUEST_C) $(FUZZ_C) $(CRASH_C) $(ORDERS_C) $(BENCH_C))

.DEFAULT_GOAL := help
.PHONY: help build run report check test test-all test-aarch64 crash-test soak fuzz world world-bugs world-coverage mutants lint bench-core bench-purgatory bench-watchers bench-recovery bench-place-again bench-flood bench-hostile bench-wal bench-pipeline bench-placement bench-metrics bench-idle bench-jobs bench-pending bench-slack bench-waiting bench-replay bench-compare docs bench-commands site clean
.DELETE_ON_ERROR:
# If this variable were set, each of the many daemons in the tests would compile all Python modules.
unexport PYTHONDONTWRITEBYTECODE
# Keep intermediate files between runs, so that make compiles only changed files.
.SECONDARY:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: build/core.stamp ## make .venv, install the package in it, compile the C core and all C tests
	@$(MAKE) --no-print-directory --jobs=$(CPUS) --output-sync=target $(HARNESSES)
	@$(MAKE) --silent build/thread/test_arena 2>/dev/null || echo "no ThreadSanitizer: tests/test_races.py is skipped"

run: build/core.stamp ## the main job: the flights of 2013 through the daemon (4 minutes at most)
	$(BIN)/python -m examples.flights --keep build/run

# If there are no files from `make run`, a shorter run (--day --year) creates them first.
report: build/core.stamp ## ship and audit the WALs and ledgers of make run, and write a page about them: build/report.html
	@test -d build/run/ledgers -a -d build/run/wal/year || $(BIN)/python -m examples.flights --day --year --keep build/run
	@for name in live year; do $(BIN)/purgatoryd pipeline ship --name $$name --wal-dir build/run/wal --lake build/run/lake || exit 1; done
	$(BIN)/purgatoryd pipeline report --wal-dir build/run/wal --ledger build/run/ledgers --lake build/run/lake --out build/report.html

# ---- tests ----------------------------------------------------------------------------
# docs/development.md describes the tiers. C tests, tests of Spark and all others run at the same
# time; the output of the first two appears when they end. ABOVE=test leaves out what `make test`
# contains. ARGS="tests/test_wire.py -k round" runs pytest with these arguments instead.

check: lint ## seconds: lint, C tests, models and parsing
test: ## minutes: each test that guards a promise, once; includes the tests of make check
test-all: ## a quarter of an hour: make test, and faults, containers, clusters, packaging, wide parameters
check: export HYPOTHESIS_PROFILE ?= quick
check: build/core.stamp
test test-all: build
check test test-all:
ifdef ARGS
	$(BIN)/python -m pytest $(ARGS)
else
	@mkdir -p build/tests && rm -f build/tests/*
	@$(MAKE) --no-print-directory --jobs=3 --keep-going TIER=$(@:test-%=%) \
		$(if $(ABOVE),,tests-of-c) $(if $(filter check,$@),,tests-of-spark) tests-of-others; code=$$?; \
		$(BIN)/python tests/support/costs.py build/tests/*.costs; exit $$code
endif

.PHONY: tests-of-c tests-of-spark tests-of-others
PYTEST = $(BIN)/python -m pytest --quiet --tier=$(TIER) $(ABOVE:%=--above=%) $(CPU_LIMIT:%=--cpu-limit=%) --costs=build/tests/$@.costs

AT_END = >build/tests/$@.log 2>&1; code=$$?; cat build/tests/$@.log; exit $$code

tests-of-c:
	@flock --shared build/tests.lock $(MAKE) --no-print-directory --jobs=$(CPUS) --output-sync=target $(SAN_TESTS:%=%.run) $(SAN_FUZZ:%=%.run) $(AT_END)
tests-of-spark:
	@$(PYTEST) tests/spark $(AT_END)
tests-of-others:
	@$(PYTEST) tests --ignore=tests/spark --numprocesses=$(WORKERS) --dist=loadgroup --no-loadscope-reorder

# C tests under ASan and UBSan, and each fuzz target with its corpus.
.PHONY: $(SAN_TESTS:%=%.run) $(SAN_FUZZ:%=%.run)
# For `make check`, which runs between two edits, a tenth of the simulated power cuts is enough.
build/sanitize/tests/test_group_commit.run: SHORTER = $(if $(filter check,$(TIER)),30)
$(SAN_TESTS:%=%.run): build/sanitize/tests/%.run: build/sanitize/tests/%
	@echo $< && $< $(SHORTER)
$(SAN_FUZZ:%=%.run): build/sanitize/fuzz/%.run: build/sanitize/fuzz/%
	@echo $< && $< tests/fuzz/corpus/$*/*

# Under QEMU a few of the simulated power cuts are enough.
.PHONY: $(AARCH64:%=%.run)
build/aarch64/tests/test_group_commit.run: SHORTER = 10
$(AARCH64:%=%.run): build/aarch64/tests/%.run: build/aarch64/tests/%
	@echo $< && $(AARCH64_RUN) $< $(SHORTER)
test-aarch64: ## run the C tests as aarch64 programs, with aarch64-linux-gnu-gcc and QEMU's user mode
	@$(MAKE) --no-print-directory --jobs=$(CPUS) --output-sync=target $(AARCH64:%=%.run)

# Findings stay in build/fuzz/corpus; failed cases stay in build/fuzz.
fuzz: $(LIBFUZZER:%=%.run) build/fuzz/decoders.run ## look for inputs that make the code fail: SECONDS=60 for each target, with clang

fuzzing = -max_total_time=$(SECONDS) -timeout=20 -max_len=1024 -print_final_stats=1 -verbosity=0 \
	-artifact_prefix=build/fuzz/ build/fuzz/corpus/$(1) tests/fuzz/corpus/$(1)

.PHONY: $(LIBFUZZER:%=%.run) build/fuzz/decoders.run
$(LIBFUZZER:%=%.run): build/fuzz/%.run: build/fuzz/%
	@mkdir -p build/fuzz/corpus/$*
	$< $(call fuzzing,$*)

build/fuzz/decoders.run: build $(VENV)/fuzz.stamp
	@mkdir -p build/fuzz/corpus/decoders
	$(BIN)/python tests/fuzz/guided.py $(call fuzzing,decoders)

soak: build ## kill a daemon and its workers at random for SECONDS=60, with a ledger; ARGS=--audit also audits the WAL
	PYTHONPATH=tests/support $(BIN)/python tests/crash/soak.py $(SECONDS) $(ARGS)

# ROUNDS: number of fixtures in which the harness kills each operation, for each of four shapes; ten
# times as many if the harness steps only stores. CUTS: number of seeds, with five simulated power
# cuts each.
crash-test: CUTS ?= 5000
crash-test: build ## the long tests: kills at every instruction, mutants, power cuts, a failure of every call of every function (hours)
	$(BIN)/python tests/crash/record.py crash.json build/crash/crash $(ROUNDS) 1 30
	$(BIN)/python tests/crash/record.py crash_stores.json build/crash/stores $(ROUNDS)0 1001 30
	$(BIN)/python tests/crash/mutate.py --write
	build/sanitize/tests/test_group_commit $(CUTS)
	WAL_ROUNDS=50 POWER_CUTS=20 $(BIN)/python -m pytest -q -s --timeout=0 \
		tests/test_wal_files.py tests/test_wal_daemon.py tests/test_power_cut.py
	CRASH_TEST=complete $(BIN)/python -m pytest --timeout=0 tests/test_faults.py $(ARGS)

world: SEEDS ?= $(or $(SEED),1-1000)
world: build ## run simulated worlds: SEEDS=1-1000, or until FAULTS=3000000 faults; SEED=7 replays one world, STEPS=3,17 only these steps
ifdef FAULTS
	$(BIN)/python tests/crash/record.py world.json env PYTHONPATH=tests $(BIN)/python -m world 1- --faults $(FAULTS) --json $(ARGS)
else
	PYTHONPATH=tests $(BIN)/python -m world $(SEEDS) $(if $(STEPS),--steps $(STEPS)) $(ARGS)
endif

# Find each bug of tests/world/bugs in a copy of the tree. This takes an hour or more. NAMES="..."
# selects bugs.
world-bugs: build/core.stamp ## put known bugs into a copy of the tree, and find each bug with simulated worlds, from three start seeds
ifdef NAMES
	PYTHONPATH=tests $(BIN)/python -m world.find_bugs $(ARGS) $(NAMES)
else
	$(BIN)/python tests/crash/record.py world_bugs.json env PYTHONPATH=tests $(BIN)/python -m world.find_bugs --json $(ARGS)
endif

world-coverage: SEEDS ?= 1-1200
world-coverage: build/core.stamp ## measure which lines and branches the worlds of SEEDS=1-1200 reach; writes benchmarks/results/world_coverage.json
	$(BIN)/python tests/crash/record.py world_coverage.json env PYTHONPATH=tests COVERAGE_CORE=ctrace $(BIN)/python -m world.coverage $(SEEDS)

# The first command takes an hour. The second command continues where an earlier run of it stopped.
mutants: build ## change sampled lines of the daemon and the clients, and check that tests notice each change (hours)
	PYTHONPATH=tests $(BIN)/python tests/crash/mutants.py cover
	PYTHONPATH=tests $(BIN)/python tests/crash/mutants.py try $(ARGS)

lint: build/core.stamp $(LINT) ## ruff, mypy --strict, C with every warning an error, spelling, style of sentences, layers of the core
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --strict $(wildcard tests examples benchmarks)
	$(BIN)/codespell . .ci
	$(BIN)/python .ci/style.py
	$(BIN)/python .ci/layers.py
	$(BIN)/python .ci/orders.py

bench-core: build ## measure the C core; writes benchmarks/results/core.json
	$(BIN)/python benchmarks/bench_core.py

bench-purgatory: build ## measure the purgatory; writes benchmarks/results/purgatory.json
	$(BIN)/python benchmarks/bench_purgatory.py $(ARGS)

bench-recovery: build ## measure the recovery of a killed daemon; writes benchmarks/results/recovery.json
	$(BIN)/python benchmarks/bench_recovery.py $(ARGS)

bench-place-again: build ## measure how long a daemon pauses when its arena files are removed; writes benchmarks/results/place_again.json and its table
	$(BIN)/python benchmarks/bench_place_again.py $(ARGS)

bench-flood: build ## measure the effect of a flooding namespace and of a catch-up, about 5 min; writes benchmarks/results/flood.json and its table
	$(BIN)/python benchmarks/bench_flood.py $(ARGS)

bench-hostile: build ## measure the effect of an attack on other clients; writes benchmarks/results/hostile.json
	$(BIN)/python benchmarks/bench_hostile.py $(ARGS)

bench-wal: build ## measure the WAL, and recovery from it; writes benchmarks/results/wal.json
	$(BIN)/python benchmarks/bench_wal.py $(ARGS)

bench-placement: build ## measure lateness next to busy processes; writes benchmarks/results/placement.json
	$(BIN)/python benchmarks/bench_placement.py $(ARGS)

bench-metrics: build ## measure the cost of counting and reading metrics; writes benchmarks/results/metrics.json and its table
	$(BIN)/python benchmarks/bench_metrics.py $(ARGS)

bench-replay: build ## measure live notices next to a reader of past ones, about 5 min; writes benchmarks/results/replay.json and its table
	$(BIN)/python benchmarks/bench_replay.py $(ARGS)

bench-slack: build ## measure daemon CPU per timer by slack; writes benchmarks/results/slack.json
	$(BIN)/python benchmarks/bench_slack.py $(ARGS)

bench-pending: build ## measure listing, cancelling and moving of 1,000,000 timers; writes benchmarks/results/pending.json and its table
	$(BIN)/python benchmarks/bench_pending.py $(ARGS)

bench-idle: build ## measure the cost of a daemon at rest and at work; writes benchmarks/results/idle.json
	$(BIN)/python benchmarks/bench_idle.py $(ARGS)

bench-waiting: build ## measure how late the daemon's wait ends; writes benchmarks/results/waiting.json
	$(BIN)/python benchmarks/bench_waiting.py $(ARGS)

bench-commands: build ## measure how long add, get and cancel take; writes benchmarks/results/commands.json
	$(BIN)/python benchmarks/bench_commands.py $(ARGS)

bench-pipeline: build ## measure the pipeline; writes benchmarks/results/pipeline.json
	$(BIN)/python benchmarks/bench_pipeline.py $(ARGS)

bench-compare: build ## compare with the benchmarks of another, built checkout: OTHER=DIRECTORY; writes benchmarks/results/compare.json
	$(BIN)/python benchmarks/compare.py --other $(OTHER) $(ARGS)

bench-watchers: build ## measure one key with many watchers; writes benchmarks/results/watchers.json
	$(BIN)/python benchmarks/bench_watchers.py $(ARGS)

bench-peers: build ## measure next to Redis and beanstalkd, about 15 min; writes benchmarks/results/peers.json, docs/peers.md and its plot
	$(BIN)/python benchmarks/bench_peers.py $(ARGS)

bench-jobs: build ## measure consumers next to beanstalkd, Redis streams and PostgreSQL, about 8 min; writes benchmarks/results/jobs.json and its table
	$(BIN)/python benchmarks/bench_jobs.py $(ARGS)

bench-gate: build ## fail if a key measure costs 30 % more than its baseline; ARGS=--write stores a new baseline
	$(BIN)/python benchmarks/bench_gate.py $(ARGS)

docs: build/core.stamp ## write all pages, tables and pictures of docs/ that come from the code
	$(BIN)/python tests/support/pages.py

site: $(VENV)/install.stamp ## build the pages as a site: build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir build/site

clean: ## remove all built files, including .venv
	rm -rf $(VENV) build dist *.egg-info shm_layout/*.so clients/*.so .mypy_cache .pytest_cache .ruff_cache

# ---- set-up ---------------------------------------------------------------------------

build/machine.stamp:
	@$(PYTHON) .ci/check_machine.py "$(CC)"
	@mkdir -p $(@D) && touch $@

$(VENV)/bin/python: | build/machine.stamp
	$(PYTHON) -m venv $(VENV)

# The setuptools that come with the venv may be too old to build without isolation.
$(VENV)/tools.stamp: $(VENV)/bin/python
	$(BIN)/pip install --quiet --upgrade "pip>=25.1" "setuptools>=77" "cffi>=1.17"
	@touch $@

# An editable install does not notice changed C files, so compiling is a separate step. The locks
# are for two terminals that build at the same time. The ignored warning about editable installs is
# only relevant to a folder with the name of the package; there is no such folder.
$(VENV)/install.stamp: pyproject.toml setup.py $(VENV)/tools.stamp
	$(STRICT_BUILD) PYTHONWARNINGS=ignore flock build/lock \
		$(BIN)/pip install --quiet --no-build-isolation --editable ".[bench,demo,lake,spark,jre,metrics,web]" --group dev
	@touch $@

$(VENV)/fuzz.stamp: $(VENV)/install.stamp
	$(BIN)/pip install --quiet --group fuzz
	@touch $@

build/core.stamp: $(CORE_C) $(CORE_H) $(PACK) shm_layout/build_core.py $(VENV)/install.stamp
	$(STRICT_BUILD) flock build/lock $(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

# ---- C --------------------------------------------------------------------------------

build/sanitize/core/%.o: shm_layout/core/%.c $(CORE_H)
	@mkdir -p $(@D)
	$(CC) $(STRICT) $(SANITIZE) -Ishm_layout -c -o $@ $<

build/sanitize/pack/%.o: clients/pack/%.c $(TESTS_H) $(CORE_H)
	@mkdir -p $(@D)
	$(CC) $(STRICT) $(SANITIZE) -Ishm_layout -c -o $@ $<

build/sanitize/core.a: $(SAN_CORE)
	@rm -f $@
	$(AR) -rcs $@ $^

# One object per test file, so that make compiles only the edited file.
build/sanitize/tests/%.o: tests/c/%.c $(TESTS_H) $(CORE_H)
	@mkdir -p $(@D)
	$(CC) $(STRICT) $(SANITIZE) -Ishm_layout -c -o $@ $<

build/sanitize/tests/%: build/sanitize/tests/%.o build/sanitize/core.a
	$(CC) -pthread $(SANITIZE) -o $@ $^

# The core for the tests with ThreadSanitizer. -w hides the warning that fences are not sanitized,
# which does not matter here.
build/thread/core/%.o: shm_layout/core/%.c $(CORE_H)
	@mkdir -p $(@D)
	$(CC) -std=c11 -w -DPG_ASSERT_ALL -O3 -fvisibility=hidden -fsanitize=thread -Ishm_layout -c -o $@ $<
build/thread/%: tests/c/%.c $(CORE_C:shm_layout/core/%.c=build/thread/core/%.o) $(TESTS_H) $(CORE_H)
	@mkdir -p $(@D)
	$(CC) -std=c11 -w -DPG_ASSERT_ALL -pthread -g -O1 -fsanitize=thread -Ishm_layout -o $@ $(filter %.c %.o,$^)

build/sanitize/fuzz/%: tests/fuzz/%.c tests/fuzz/main.c build/sanitize/core.a $(TESTS_H) $(CORE_H)
	@mkdir -p $(@D)
	$(CC) $(STRICT) $(SANITIZE) -Ishm_layout -o $@ $< tests/fuzz/main.c build/sanitize/core.a

build/fuzz/%: tests/fuzz/%.c $(CORE_C) $(PACK_C) $(TESTS_H) $(CORE_H)
	@mkdir -p $(@D)
	$(CLANG) $(STRICT) $(SANITIZE) -fsanitize=fuzzer -Ishm_layout -o $@ $< $(CORE_C) $(PACK_C)

# The core with the compiler flags of the extension. The harness steps its instructions.
build/crash/core/%.o: shm_layout/core/%.c $(CORE_H)
	@mkdir -p $(@D)
	$(CC) $(STRICT) -O3 -fvisibility=hidden -Ishm_layout -c -o $@ $<

build/crash/crash: $(STEPS_C) $(CORE_C:shm_layout/core/%.c=build/crash/core/%.o) $(CRASH_H) $(TESTS_H) $(CORE_H)
	$(CC) $(STRICT) -O3 -fvisibility=hidden -Ishm_layout -Itests/c -o $@ $(filter %.c %.o,$^)

# The core with a call before each store, for stores.c. -w is there for the same reason as in
# build/thread/core.
build/crash/seen/%.o: shm_layout/core/%.c $(CORE_H)
	@mkdir -p $(@D)
	$(CC) -std=c11 -w -O3 -fvisibility=hidden -fsanitize=thread -Ishm_layout -c -o $@ $<

build/crash/stores: $(STORES_C) $(CORE_C:shm_layout/core/%.c=build/crash/seen/%.o) $(CRASH_H) $(TESTS_H)
	$(CC) $(STRICT) -O3 -Ishm_layout -Itests/c -o $@ $(filter %.c %.o,$^)

# The core and the scenarios, compiled so that each load, store and fence calls the memory model of
# tests/orders. Calls of memcpy and similar functions stay calls. With -no-pie, addresses at run
# time are the addresses in the file.
ORDERS_FLAGS := -std=c11 -w -DPG_ASSERT_ALL -g -O1 -fno-builtin -fsanitize=thread -Ishm_layout -Itests/c
build/orders/core/%.o: shm_layout/core/%.c $(CORE_H)
	@mkdir -p $(@D)
	$(CC) $(ORDERS_FLAGS) -c -o $@ $<
build/orders/%.o: tests/orders/%.c $(ORDERS_H) $(TESTS_H) $(CORE_H)
	@mkdir -p $(@D)
	$(CC) $(ORDERS_FLAGS) -c -o $@ $<

ORDERS_WRAP := memcpy memmove memset memcmp eventfd_read eventfd_write pthread_create syscall assertion_failed
build/orders/explore: $(filter-out $(ORDERS_SEEN),$(ORDERS_C)) $(ORDERS_SEEN:tests/orders/%.c=build/orders/%.o) $(CORE_C:shm_layout/core/%.c=build/orders/core/%.o) $(ORDERS_H) $(TESTS_H) $(CORE_H)
	$(CC) $(STRICT) -g -O2 -no-pie -Ishm_layout -Itests/c -o $@ $(filter %.c %.o,$^) $(ORDERS_WRAP:%=-Wl,--wrap=%)

# The C tests for another processor, statically linked, for QEMU's user mode.
AARCH64_FLAGS := $(STRICT) -DPG_ASSERT_ALL -O2 -Ishm_layout
build/aarch64/core/%.o: shm_layout/core/%.c $(CORE_H)
	@mkdir -p $(@D)
	$(AARCH64_CC) $(AARCH64_FLAGS) -c -o $@ $<
build/aarch64/core.a: $(CORE_C:shm_layout/core/%.c=build/aarch64/core/%.o)
	@rm -f $@
	$(AR) -rcs $@ $^
build/aarch64/tests/%: tests/c/%.c build/aarch64/core.a $(TESTS_H) $(CORE_H)
	@mkdir -p $(@D)
	$(AARCH64_CC) $(AARCH64_FLAGS) -static -o $@ $< build/aarch64/core.a

build/lint/%.o: %.c $(CORE_H) $(TESTS_H) $(CRASH_H) $(ORDERS_H) $(BENCH_H)
	@mkdir -p $(@D)
	$(CC) $(STRICT) $(if $(filter benchmarks/%,$<),-std=gnu11) -O3 -Ishm_layout -Itests/c -c -o $@ $<
