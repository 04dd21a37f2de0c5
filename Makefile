# `make train` and `make test` work on a fresh machine that has Python >= 3.11, make and git.
PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
# Four tests at a time, each with a Slurm of its own, on two CPUs: most of a story is waiting.
ABREAST := -n 4 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help train test test-all check coverage box bench bench-record bench-compare gpu docs fuzz soak soak-local lock clean

help:  ## this list
	@grep -E '^[a-z.]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 12

# --- environments, from lock files with hashes

.venv: .venv/ready  ## what training needs
.venv/ready: requirements.lock requirements-uv.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --require-hashes -r requirements-uv.lock
	$(BIN)/uv pip install -q --python $(BIN)/python --require-hashes -r requirements.lock
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps -e .
	@touch $@

.venv/ready-dev: .venv/ready requirements-dev.lock
	$(BIN)/uv pip install -q --python $(BIN)/python --require-hashes -r requirements-dev.lock
	@# Whoever cannot write bytecode here (the box's unprivileged users) would compile torch again in each rank. Of the
	@# packages that no rank imports, some hold files for another Python.
	$(BIN)/python -m compileall -qq -j 0 -x '/(transformers|mypy|pip|pygments|setuptools|sqlalchemy|tests)/' .venv/lib || true
	@touch $@

# An environment of its own with the oldest torch, from a lock file of its own. What tests need of the newest is left out.
.venv-torch-%/ready: requirements-torch-%.lock .venv/ready
	test -x $(@D)/bin/python || $(PYTHON) -m venv --without-pip $(@D)
	$(BIN)/uv pip install -q --python $(@D)/bin/python --require-hashes -r $<
	$(BIN)/uv pip install -q --python $(@D)/bin/python --no-deps -e .
	@touch $@

# The site's builder has an environment of its own too: what it needs is no business of training.
.venv-docs/ready: requirements-docs.lock .venv/ready
	test -x $(@D)/bin/python || $(PYTHON) -m venv --without-pip $(@D)
	$(BIN)/uv pip install -q --python $(@D)/bin/python --require-hashes -r $<
	@touch $@

# --- what people do

train: .venv/ready  ## train on handwritten digits with two DDP ranks, on Slurm where there is sbatch, else right here
	@$(BIN)/toolkit submit configs/digits_ddp.yaml --follow

# What meets torch: the group, the store, checkpoints, and runs that are stopped and killed and end with the same bits.
# Without a GPU torch 2.6 shards no weights, and its CUDA opens no stand-in for one.
WITH_OLD_TORCH := tests/unit/ranks tests/unit/checkpoint/test_export.py tests/unit/train/test_optim.py \
	tests/unit/train/test_gpu_settings.py tests/unit/config/test_torch_version.py tests/dist/test_custom.py \
	tests/dist/test_own_scripts.py tests/dist/test_data_parallel.py -k "not fsdp and not gpus_alone"
ifdef TORCH
test: .venv-torch-$(TORCH)/ready
	$(<D)/bin/python -m pytest -n 2 --dist worksteal -m "not (soak or slurm)" $(WITH_OLD_TORCH)
else
test: .venv/ready-dev  ## the suites without processes, and each promise once with ranks and a real Slurm, within 8 minutes. TORCH=2.6: what meets torch, on that
	$(PYTEST) $(ABREAST) -m "smoke or not (soak or dist or slurm)"
endif

test-all: .venv/ready-dev  ## every suite, of the long ones a sample, with a real Slurm in a box where that can be had
	$(PYTEST) $(ABREAST) -m "not soak" $(if $(COVERAGE),$(MEASURE))

check: .venv/ready-dev  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/basedpyright --level error

coverage: .venv/ready-dev  ## the unit suite, and how much of the package it runs; fails below the floor
	$(PYTEST) $(ABREAST) -m "not (soak or dist or slurm)" tests/unit tests/plugins tests/house $(MEASURE)
MEASURE := --cov=toolkit --cov-report=term --cov-fail-under=80

box: .venv/ready-dev  ## a Slurm cluster on this machine (root on Debian or Ubuntu), with a shell on its login node
	@$(BIN)/python -m tests.box shell

docs: .venv-docs/ready  ## docs/ as a site that needs no server, build/site/index.html; fails at a link that leads nowhere
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet --config-file docs/mkdocs/mkdocs.yml

NAMES ?=
bench: .venv/ready-dev  ## speed as ratios, in one run, each beside the field's own ways: loop, saves, data order, images, restart, start-up, MPI, pipelines, slow links; and how each mechanism grows with the size of a run
	$(BIN)/python -m tests.bench.everything $(if $(PEERS),--peers $(PEERS)) $(NAMES)

bench-record: .venv/ready-dev  ## the same on a quiet machine, kept: docs/benchmarks/*.json, the pages' tables and pictures. Some: NAMES="loop steps"
	$(BIN)/python -m tests.bench.everything --keep $(if $(PEERS),--peers $(PEERS)) $(NAMES)

# Each test has a rank for each GPU, up to four: with several GPUs fewer tests at a time.
GPU_ABREAST ?= $(shell n=$$(nvidia-smi -L 2>/dev/null | wc -l); test $$n -gt 1 && echo 2 || echo 6)
gpu: .venv/ready-dev  ## what only a GPU can show, on one machine within 40 minutes: correctness and speed, written to gpu-figures.json and .md
	rm -f gpu-figures.json gpu-figures.md
	TOOLKIT_GPU_FIGURES=gpu-figures $(PYTEST) -n $(GPU_ABREAST) --dist worksteal -m "not alone" tests/gpu; correct=$$?; \
	TOOLKIT_GPU_FIGURES=gpu-figures $(PYTEST) -m alone tests/gpu && exit $$correct

bench-compare: .venv/ready-dev  ## measure again what docs/benchmarks/ holds: ratios and counts more than 5 % beyond the spread. Some: NAMES="loop steps"
	$(BIN)/python -m tests.bench.compare $(NAMES)

fuzz: .venv/ready-dev  ## thousands of odd inputs, with a count of what became of them. Again: TOOLKIT_FUZZ_SEED=N make fuzz
	$(PYTEST) tests/house/fuzz $(HOURS) -m soak -rP --show-capture=no -s

STORIES ?= tests/slurm
BOXES := 22.05-plain 22.05-strict 24.11-plain 24.11-strict
HOURS := -o faulthandler_timeout=0
soak: soak-local $(BOXES:%=soak-%)  ## the long suites, on every Slurm version and profile: hours. A part: soak-24.11-strict STORIES=tests/slurm/test_stop.py
soak-local: .venv/ready-dev
	$(PYTEST) $(ABREAST) $(HOURS) -m "(soak or sample) and not slurm"
soak-%: .venv/ready-dev
	TOOLKIT_BOX_SLURM=$(word 1,$(subst -, ,$*)) TOOLKIT_BOX_PROFILE=$(word 2,$(subst -, ,$*)) $(PYTEST) $(ABREAST) $(HOURS) -m slurm $(STORIES)

lock: .venv/ready  ## resolve the lock files again
	echo "uv" | $(BIN)/uv pip compile - $(LOCK) -o requirements-uv.lock
	$(BIN)/uv pip compile pyproject.toml --extra images --universal $(LOCK) -o requirements.lock
	$(BIN)/uv pip compile pyproject.toml --extra dev --extra images --extra mpi --extra integrations --extra shards --extra optuna --extra web --universal $(LOCK) -c requirements.lock -o requirements-dev.lock
	printf 'torch==2.6.*\ntorchvision\npytest\npytest-xdist\nhypothesis\n' | $(BIN)/uv pip compile pyproject.toml - --python-platform x86_64-manylinux_2_28 $(LOCK) -o requirements-torch-2.6.lock
	echo "mkdocs-material" | $(BIN)/uv pip compile - --universal $(LOCK) -o requirements-docs.lock
LOCK := --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate -q --upgrade

clean:  ## everything that can be made again; runs/ and data/ stay
	rm -rf .venv .venv-torch-* .venv-docs .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
