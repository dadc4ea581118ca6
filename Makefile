# make run: the quickstart.  make test: linter, types, tests.  make quick: most of that, in a minute.  All set up .venv
# first, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# what we measure against, each in an environment of its own
PFL := .venv-pfl
FLOWER := .venv-flower
OPACUS := .venv-opacus

# the federation by way of Flower, whose simulation wants another Ray than ours
FLWR := .venv-flwr

.PHONY: run test quick test-federation test-flower attack-federation check setup bench bench-growth bench-ray bench-measuring bench-convolutions bench-federation bench-secagg bench-records soak soak-secagg fuzz crashes audit-faults verify-theory contrast rates data reproduce private-at-scale leaderboard clean

run: $(READY)
	$(BIN)/fednormec run

# files are handed out in the order of tests/conftest.py, what takes longest first
SPREAD := -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pytest $(SPREAD) --durations=25

# while you work: linter, types, and all tests but those that start processes or take seconds; under a minute
quick: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pytest $(SPREAD) -m 'not long' --ignore=tests/slow

# a server and clients as processes on loopback, killed and restarted: minutes
test-federation: $(READY)
	$(BIN)/pytest tests/slow/federation_processes.py

# the same, attacked in every way that docs/reliability.md lists: minutes; needs root for its full disks
attack-federation: $(READY)
	$(BIN)/pytest -s tests/slow/federation_attacks.py

# stock SuperLinks and SuperNodes, with gateways, as processes on loopback: minutes
test-flower: $(FLWR)/.ready
	$(FLWR)/bin/pytest tests/federation/test_flower.py tests/slow/flower_processes.py
	$(FLWR)/bin/pytest tests/test_private_imports.py -k stands_for

setup: $(READY)

# made anew when what is to be installed changes; constraints.txt pins the versions
$(READY): pyproject.toml constraints.txt src/fednormec/core/kernels.c src/fednormec/core/kernels.h
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else f"fednormec needs Python 3.11 or newer, this is {v.major}.{v.minor}; try: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# one round of ours, of plain PyTorch, of pfl and of Flower, in turns: half an hour; leave the machine alone meanwhile
bench: $(READY) $(PFL)/.ready $(FLOWER)/.ready
	$(BIN)/python benchmarks/rounds.py --pfl $(PFL)/bin/python --flower $(FLOWER)/bin/python

# time and memory with more clients and parameters: minutes, 8 GB of memory
bench-growth: $(READY)
	$(BIN)/python benchmarks/growth.py

# one round on one and on two workers of Ray, beside one and two threads: minutes
bench-ray: $(READY)
	$(BIN)/python benchmarks/ray_workers.py

# a private round that measures its messages, beside one that does not: a minute
bench-measuring: $(READY)
	$(BIN)/python benchmarks/measuring.py

# gradients with convolutions of our own, beside torch's: two minutes
bench-convolutions: $(READY)
	$(BIN)/python benchmarks/convolutions.py

# a federation with 500 and 2,000 clients, slow, lossy and cut links, kills, strangers: half an hour; as root for the links
bench-federation: $(READY)
	$(BIN)/python benchmarks/federation.py

# one attempt at a sum in secure aggregation: seconds and bytes with 10 to 500 clients; half an hour, leave the machine alone
bench-secagg: $(READY)
	$(BIN)/python benchmarks/secagg.py --ring --served

# sums of records' bounded gradients, beside plain gradients and Opacus: six minutes; leave the machine alone
bench-records: $(READY) $(OPACUS)/.ready
	$(BIN)/python benchmarks/records.py --opacus $(OPACUS)/bin/python

# 20,000 rounds of a private run: does anything grow?  minutes
soak: $(READY)
	$(BIN)/python tests/slow/soak.py

# 1,000 rounds of secure aggregation in which a tenth always goes wrong: is every sum, count and memory right?  minutes
soak-secagg: $(READY)
	$(BIN)/python tests/slow/soak_secagg.py

# thousands of damaged configs, data files, ledgers and checkpoints, other ones every time; and hundreds of kills: minutes
fuzz: $(READY)
	for kind in config data run; do \
	  folder=$$(mktemp -d) && $(BIN)/python tests/slow/fuzz.py $$folder $$kind 5000 $$(date +%s) && rm -r $$folder || exit 1; done

crashes: $(READY)
	for mode in 'random 300' calls; do \
	  folder=$$(mktemp -d) && $(BIN)/python tests/slow/crashes.py $$folder $$mode && rm -r $$folder || exit 1; done

# how small a planted fault the audit finds, and how often it accuses what is right: an hour
audit-faults: $(READY)
	$(BIN)/python experiments/audit-faults/audit_faults.py

# every guarantee against hundreds of random problems: minutes
verify-theory: $(READY)
	$(BIN)/python experiments/verify_theory/verify.py

# where bounding without error feedback stalls, and how fast the bounds fall: minutes each
contrast rates: $(READY)
	$(BIN)/python experiments/$@/$@.py

# real CIFAR-10 and Fashion-MNIST, once, into the user's cache
data: $(READY)
	$(BIN)/fednormec data fetch cifar10
	$(BIN)/fednormec data fetch fashion_mnist

# the paper's figures at a small scale, and what a true ε reaches: fifteen minutes, two hours; both go on where they were stopped
reproduce: data
	$(BIN)/fednormec reproduce all --scale small

private-at-scale: data
	$(BIN)/python experiments/private-at-scale/private_at_scale.py

# every method tuned alike at each ε, with the server's optimisers, and how long steps should be: three hours; goes on
# where it was stopped
leaderboard: data
	$(BIN)/fednormec data fetch movielens
	for part in leaderboard pace beyond; do $(BIN)/python experiments/leaderboard/$$part.py || exit 1; done

$(FLWR)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(FLWR)
	grep -v '^ray==' constraints.txt > $(FLWR)/constraints.txt
	$(FLWR)/bin/pip install --quiet --disable-pip-version-check -c $(FLWR)/constraints.txt -e '.[flower]' 'flwr[simulation]' hypothesis pytest
	touch $@

$(PFL)/.ready: benchmarks/peers-pfl.txt
	$(PYTHON) -m venv $(PFL)
	$(PFL)/bin/pip install --quiet --disable-pip-version-check -r benchmarks/peers-pfl.txt
	touch $@

$(FLOWER)/.ready: benchmarks/peers-flower.txt
	$(PYTHON) -m venv $(FLOWER)
	$(FLOWER)/bin/pip install --quiet --disable-pip-version-check -r benchmarks/peers-flower.txt
	touch $@

$(OPACUS)/.ready: benchmarks/peers-opacus.txt
	$(PYTHON) -m venv $(OPACUS)
	$(OPACUS)/bin/pip install --quiet --disable-pip-version-check -r benchmarks/peers-opacus.txt
	touch $@

clean:
	rm -rf $(VENV) $(PFL) $(FLOWER) $(FLWR) $(OPACUS) build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
