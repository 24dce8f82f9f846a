# `make demo` and `make test` set up .venv by themselves; a second call reuses it.

PYTHON ?= python3
BIN := .venv/bin
DEMO_ROOT ?= runs

# modules are compiled once, not in each of the hundreds of processes of a run of the tests
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test long flaky soak check bench commands drills sweeps slurm screenshots gpu gpus gpu-wheels clean

demo: .venv/.ready
	$(BIN)/springtide train --recipe demo --run.root $(DEMO_ROOT) --demo

test: .venv/.ready check
	$(BIN)/python -m pytest -n 2 tests/architecture tests/unit tests/distributed tests/benchmarks
	$(BIN)/python -m pytest tests/elastic

# what `make test` leaves out of its first half: more sizes, layouts, recipes and optimizers of the same tests, 15 minutes
long: .venv/.ready
	$(BIN)/python -m pytest -n 2 --full -m full tests/unit tests/distributed tests/benchmarks

# the tests of real processes, ten times on busy cores: hours; a second call goes on where the first was
flaky: .venv/.ready
	$(BIN)/python tests/flaky.py

# twenty thousand schedules of faults in simulated time; a hundred thousand changed files; ten minutes without the object store,
# twice two minutes without Ray's head: an hour and a half
soak: .venv/.ready
	cd tests/programs && ../../$(BIN)/python -m simulation --seeds 0 20000 --jobs 2
	cd tests/programs && ../../$(BIN)/python -m fuzz --seeds 0 100000 --jobs 2
	cd tests/programs && ../../$(BIN)/python -m fuzz --seeds 0 4000 --table
	$(BIN)/python tests/programs/store_away.py 600
	$(BIN)/python tests/programs/lost_head.py 120

# what needs no process and no minute: style, types, and who may import whom
check: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/architecture/test_layers.py
	$(BIN)/python tests/architecture/long_code.py

bench: .venv/.ready .venv-peers
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

# the commands of README and docs, every run trained to its end; `make test` trains one of them and resolves the others
commands: .venv/.ready
	$(BIN)/python -m pytest --full tests/elastic/test_commands_of_the_pages.py

# each drill in full, a fault at each fault point, storms, and what is told of a run with five faults: an hour; `make test` runs one drill
drills: .venv/.ready
	for scenario in kill copies drain regrow hang all resize; do $(BIN)/springtide drill --scenario $$scenario || exit 1; done
	for notice in 30 120; do $(BIN)/springtide drill --scenario drain --notice $$notice || exit 1; done
	cd tests/programs && ../../$(BIN)/python -m fault_points cross
	for seed in 1 2 3; do (cd tests/programs && ../../$(BIN)/python -m fault_points storm --seed $$seed) || exit 1; done
	cd tests/programs && ../../$(BIN)/python five_faults.py

# a sweep of sixteen trials that loses six nodes and its driver; what `make test` leaves out of its second half: a population
# that loses its driver, a run that loses its driver with all workers, the demo, the notebook of fine-tuning, killed runs of an adapter, of pairs and of a mixture, the
# benchmark of sweeps, the golden runs
sweeps: .venv/.ready
	$(BIN)/python tests/programs/swept.py 16 6 60
	$(BIN)/python -m pytest --full -m full tests/elastic

# jobs on a real Slurm of this machine: preempted, requeued, ended: half an hour; needs slurmctld, slurmd and munged on the path
# (Debian: slurmctld slurmd slurm-client munge), and root
slurm: .venv/.ready
	$(BIN)/python -m pytest --full tests/elastic/test_slurm.py

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
	rm -rf .venv .venv-peers .pytest_cache .mypy_cache .ruff_cache .hypothesis .flaky

# torch first and pinned: an unpinned one would bring gigabytes of CUDA packages
.venv/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "springtide needs Python >= 3.11; set PYTHON=... (found: $$($(PYTHON) --version))"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv (once, a few minutes)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@
