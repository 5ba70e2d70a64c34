# `make demo` and `make test` set up all they need: Python 3.11 and a C compiler are enough.
#
# Packages come from pip's configured index. To take CPU wheels of torch from elsewhere, set
# PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS, as for any pip.

PYTHON ?= python3.11
VENV ?= .venv
VLLM ?= 0.33.0
OLDER ?= 2f151d8
PYTHONS ?= 3.12 3.13
MATRIX ?= 0.32.0 0.33.0
OTHER ?= 0.32.0
LONG_TOKENS ?= 2500
SHOW ?=
ATTACK_OUT ?= attack-report
SOAK_SECONDS ?= 28800
SEED ?= 1
CHAOS_REQUESTS ?= 2000
FAULTS ?=
CHAOS_OUT ?= chaos-report
PYTEST_ARGS ?=
BENCH_OUT ?= build/bench
CANARY_ARGS ?=
BIN := $(VENV)/bin
# Where it is set, every process compiles all of torch and vLLM that it imports: ten seconds each.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/python -m pytest --durations=25 --durations-min=1
# Neighbours share a process and so what they import and compile; who is done takes from the other.
NEIGHBOURS := -n 2 --dist worksteal
# Files side by side, those that take longest first: what a file's tests share, they share in one
# process. One more than there are cores, as these tests also wait.
FILES := -n 3 --dist loadfile --no-loadscope-reorder
# What computes only takes what servers leave, which wait for a third of the time.
AFTER := nice -n 2
BEGAN := $(shell date +%s)
REPORTS := build/servers.xml build/pure.xml

.PHONY: demo test servers pure checked nightly wheels unit contract cpu long chaos soak attack bench fuzz mutants lint docs env digests canary mixed rolling test-matrix stress-shm \
	qemu sanitize clean help

help: ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

demo: env ## vllm-commext serve with a pretrained model, beside one server: KV cache handed over, an engine killed, one drained; SHOW=1 leaves it running
	$(BIN)/python -m tests.kit.demo $(if $(filter-out 0,$(SHOW)),--show)

test: env ## Tests with real servers and a short chaos run; lint, unit and contract tests while those wait; three to thirteen minutes on two cores
	@rm -f $(REPORTS)
	@$(BIN)/python -m tests.kit.forked $(MAKE) --jobs 3 servers pure checked; status=$$?; \
		$(BIN)/python tools/test_times.py $(BEGAN) $(REPORTS); exit $$status

servers: env
	$(PYTEST) $(FILES) --junitxml $(word 1,$(REPORTS)) tests/cpu tests/chaos $(PYTEST_ARGS)

pure: env
	$(AFTER) $(PYTEST) $(NEIGHBOURS) --junitxml $(word 2,$(REPORTS)) tests/unit tests/contract $(PYTEST_ARGS)

checked: env
	$(AFTER) $(MAKE) lint

unit: env ## Tests that need no vLLM
	$(PYTEST) $(NEIGHBOURS) tests/unit $(PYTEST_ARGS)

contract: env ## Tests against the installed vLLM, without a model
	$(PYTEST) $(NEIGHBOURS) tests/contract $(PYTEST_ARGS)

cpu: env ## Tests with real servers on CPUs
	$(PYTEST) $(FILES) tests/cpu $(PYTEST_ARGS)

long: env ## Tests that `make test` has no time for, property tests with more examples, each server started from nothing
	COMMEXT_TEST_LONG=1 $(PYTEST) $(NEIGHBOURS) tests/unit tests/contract -m "long or hypothesis" $(PYTEST_ARGS)
	COMMEXT_TEST_LONG=1 COMMEXT_TEST_FORK=0 $(PYTEST) tests/cpu -m long $(PYTEST_ARGS)

nightly: env ## Everything that runs here and takes hours: the demo, long, chaos, attack, fuzz, mutants, other vLLMs, stress, sanitizers, wheels
	$(MAKE) demo
	$(MAKE) long chaos attack fuzz mutants test-matrix mixed rolling stress-shm sanitize wheels
	if command -v qemu-aarch64 > /dev/null; then $(MAKE) qemu; else echo "make qemu left out: no qemu-aarch64"; fi

bench: env ## The benchmarks that need no GPU, short; reports in BENCH_OUT=build/bench
	$(BIN)/python benchmarks/shm_queue.py --quick --variants ours vllm --out $(BENCH_OUT)/shm_queue
	$(BIN)/python benchmarks/cpu_collectives.py --quick --out $(BENCH_OUT)/cpu_collectives
	$(BIN)/python benchmarks/nixl_connector.py --quick --out $(BENCH_OUT)/nixl_connector
	$(BIN)/python benchmarks/proxy.py --rounds 1 --seconds 3
	$(BIN)/python benchmarks/serve.py --quick --out $(BENCH_OUT)/serve

chaos: env ## Long chaos run with a report; SEED=1 CHAOS_REQUESTS=2000 FAULTS=N CHAOS_OUT=chaos-report
	COMMEXT_TEST_LONG=1 COMMEXT_INTERRUPTS=200 $(PYTEST) tests/chaos -m long
	$(BIN)/python -m tests.chaos --seed $(SEED) --requests $(CHAOS_REQUESTS) \
		$(if $(FAULTS),--faults $(FAULTS)) --talks --out $(CHAOS_OUT)

soak: env ## Hours at one request a second with a fault every few minutes; samples go on in benchmarks/results/soak.jsonl; SOAK_SECONDS=28800
	$(BIN)/python -m tools.soak --seconds $(SOAK_SECONDS)

attack: env ## Attacks on the real proxy and on side channels, each judged by what others notice; ATTACK_OUT=attack-report
	$(BIN)/python -m tests.attack --out $(ATTACK_OUT)

fuzz: env ## A million side-channel frames and 100,000 notifications of garbage; SEED=1
	$(BIN)/python -m tests.chaos.fuzzing --seed $(SEED)

mutants: env ## Flipped operators and constants that the unit tests notice, 60 a target; SEED=1
	$(BIN)/python tools/mutants.py --sample 60 --seed $(SEED)

lint: env ## ruff, pyright, who may import whom, budgets of tools/budgets.toml, README's sentences, pictures
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tools/budgets.py
	$(BIN)/python tools/sentences.py README.md
	$(BIN)/python tools/generate_docs.py --check

docs: env ## Write the tables and pictures of docs/, and the operator's alert rules
	$(BIN)/python tools/generate_docs.py

env: ## The environment for everything above, in .venv
	@$(PYTHON) tools/cpu_env.py $(VENV) --vllm $(VLLM)

test-matrix: $(MATRIX:%=contract-%) ## Contract tests on each supported vLLM, one environment each

pythons: env $(PYTHONS:%=python-%) ## Unit and contract tests on each of PYTHONS='3.12 3.13', one environment each; what the last has compiled on PYTHON, too
	.venv-python$(lastword $(PYTHONS))/bin/python setup.py -q build_ext --inplace --force
	$(PYTEST) $(NEIGHBOURS) tests/unit/shm $(PYTEST_ARGS)

python-%:
	@python$* tools/cpu_env.py .venv-python$* --vllm $(VLLM)
	.venv-python$*/bin/python -m pytest -n 2 --dist worksteal tests/unit tests/contract $(PYTEST_ARGS)

contract-%:
	@$(PYTHON) tools/cpu_env.py .venv-$* --vllm $*
	.venv-$*/bin/python -m pytest tests/contract $(PYTEST_ARGS)

wheels: ## The sdist and the manylinux wheel in dist/, reproducible, proven in clean environments; needs no .venv
	$(PYTHON) tools/make_wheels.py

mixed: env ## KV cache read between servers of VLLM and of OTHER=0.32.0, both ways
	@$(PYTHON) tools/cpu_env.py .venv-$(OTHER) --vllm $(OTHER)
	COMMEXT_TEST_LONG=1 COMMEXT_TEST_FORK=0 COMMEXT_TEST_OTHER_PYTHON=$(CURDIR)/.venv-$(OTHER)/bin/python \
		$(PYTEST) tests/cpu/test_mixed_versions.py $(PYTEST_ARGS)

rolling: env ## Four engines under load upgraded one by one and rolled back: from OTHER=0.32.0 to VLLM, from OLDER to this state; LONG_TOKENS=2500 an answer that a drain meets
	@$(PYTHON) tools/cpu_env.py .venv-$(OTHER) --vllm $(OTHER)
	$(BIN)/python tools/older_release.py $(VENV) .older-$(OLDER) --commit $(OLDER)
	COMMEXT_TEST_LONG=1 COMMEXT_TEST_OTHER_PYTHON=$(CURDIR)/.venv-$(OTHER)/bin/python \
		COMMEXT_TEST_OLDER=$(CURDIR)/.older-$(OLDER) COMMEXT_TEST_LONG_TOKENS=$(LONG_TOKENS) \
		$(PYTEST) tests/cpu/test_rolling.py $(PYTEST_ARGS)

digests: env ## Write the digests of what parts depend on in each tested vLLM
	$(BIN)/python tools/known_sources.py

canary: env ## What the newest vLLM, NIXL, FlashInfer and torch on the index cost; CANARY_ARGS='--quick'
	$(BIN)/python tools/canary.py $(CANARY_ARGS)

stress-shm: env ## The message queue: 10 million messages, signals and stops, 500 deaths; some minutes
	$(BIN)/python tests/unit/shm/stress_traffic.py --messages 10000000
	$(BIN)/python tests/unit/shm/stress_traffic.py --messages 4000000 --torment 5000
	$(BIN)/python tests/unit/shm/stress_deaths.py --rounds 500

qemu: env ## The queue's core for AArch64, cross-built and run under qemu; apt-get install gcc-aarch64-linux-gnu qemu-user
	@command -v aarch64-linux-gnu-gcc > /dev/null && command -v qemu-aarch64 > /dev/null || \
		{ echo "expected Debian's gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user"; exit 1; }
	COMMEXT_TEST_LONG=1 COMMEXT_RING_RECORDS=100000 $(PYTEST) tests/unit/shm/test_ring_native.py -k aarch64 $(PYTEST_ARGS)

sanitize: env ## The native queue's core under ThreadSanitizer, AddressSanitizer and UBSan, for long
	COMMEXT_TEST_LONG=1 COMMEXT_RING_RECORDS=500000 $(PYTEST) tests/unit/shm/test_ring_native.py -k "not aarch64" $(PYTEST_ARGS)

clean: ## Remove the environments and what tests and tools left
	rm -rf .venv .venv-* .older-* build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
