# `make demo` and `make test` set up .venv by themselves; a second call reuses it.

PYTHON ?= python3
BIN := .venv/bin
DEMO_ROOT ?= runs

# modules are compiled once, not in each of the hundreds of processes of a run of the tests
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test long check bench screenshots gpu gpus gpu-wheels clean

demo: .venv/.ready
	$(BIN)/springtide train --recipe demo --run.root $(DEMO_ROOT) --demo

test: .venv/.ready check
	$(BIN)/python -m pytest --times -n 2 --ignore tests/architecture/test_layers.py tests/architecture tests/unit tests/distributed tests/benchmarks
	$(BIN)/python -m pytest --times tests/elastic

# what is too long for `make test`, an hour at most each: `make long` lists the subjects, `make long SUBJECT=drills` runs one
long: .venv/.ready
	@$(BIN)/python tests/long.py $(SUBJECT)

# in less than a minute: style, types, and who may import whom
check: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/architecture/test_layers.py
	$(BIN)/python tests/architecture/long_code.py

bench: .venv/.ready .venv-peers
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/step_overhead.py
	$(BIN)/python benchmarks/prepare.py
	$(BIN)/python benchmarks/prepare_growth.py
	$(BIN)/python benchmarks/stream.py
	$(BIN)/python benchmarks/layouts.py
	$(BIN)/python benchmarks/growth.py
	$(BIN)/python benchmarks/plan.py
	$(BIN)/python benchmarks/throughput.py
	$(BIN)/python benchmarks/finetune.py
	$(BIN)/python benchmarks/continual.py
	$(BIN)/python benchmarks/distill.py
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/recovery.py
	$(BIN)/python benchmarks/goodput.py --traces "$(TRACES)"
	$(BIN)/python benchmarks/drilled.py --traces "$(TRACES)"
	$(BIN)/python benchmarks/sweep.py --traces "$(TRACES)"

# the pictures of docs/how-to/monitor.md, of a real run; needs Chromium on the path or in $CHROMIUM
screenshots: .venv/.ready
	cd tests/programs && ../../$(BIN)/python screenshots.py

# one GPU, in stages of at most 150 seconds, without Ray: benchmarks/gpu/README.md. A later call goes on where this one stopped.
# GPU="--quick" runs every stage on tiny shapes anywhere
GPU_PYTHON ?= $(if $(wildcard .venv/.ready),$(BIN)/python,$(PYTHON))
GPU_SECONDS ?= 570

gpu:
	$(GPU_PYTHON) benchmarks/gpu/wheels.py --install
	$(GPU_PYTHON) benchmarks/gpu --json --seconds $(GPU_SECONDS) $(GPU)

# two to eight GPUs of one machine: one page to paste into an issue
gpus: .venv/.ready
	$(BIN)/python benchmarks/gpu/several.py $(GPUS)

# what a machine with torch and no network needs for it
gpu-wheels:
	$(GPU_PYTHON) benchmarks/gpu/wheels.py $(WHEELS)

# whom the benchmarks compare with: their dependencies and ours exclude each other
.venv-peers: benchmarks/peers.txt
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$@/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	touch $@

clean:
	rm -rf .venv .venv-peers .pytest_cache .mypy_cache .ruff_cache .hypothesis .long

# torch first and pinned: an unpinned one would bring gigabytes of CUDA packages
.venv/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "springtide needs Python >= 3.11; set PYTHON=... (found: $$($(PYTHON) --version))"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv (once, a few minutes)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@
