# make demo: the main job, from a bare machine to a trained tiny model.  make test: the tests.
SHELL := /bin/bash
VENV ?= .venv
PYTHON ?=
SEED ?= 0
# Workers often wait for servers and ranks that they started: more of them than cores.
TEST_WORKERS ?= 3
PY := $(VENV)/bin/python
# The client understands this version as well; tests start its server from a folder of its own.
OLDER_SGLANG := 0.5.20
OLDER_SGLANG_DIR := $(VENV)/sglang-$(OLDER_SGLANG)
export OMP_NUM_THREADS ?= 1
CXX_FILES := 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh' 'tests/*.h' 'tests/*.cpp' 'tests/*.cu'

.PHONY: help setup demo test lint format clean

help:
	@echo "make demo [SEED=0]  set up, make a tiny model, train it with BAPO, evaluate, draw figures"
	@echo "make test           set up and run the tests"
	@echo "make setup          create $(VENV), install, compile csrc/"
	@echo "make lint           formatting, linting, types, import rules"
	@echo "make clean          remove $(VENV), runs/ and build products"

setup: $(VENV)/.complete

# The stamp is written last: an interrupted installation is made again.
$(VENV)/.complete: requirements/cpu.txt requirements/install.sh pyproject.toml setup.py $(wildcard csrc/*.cpp csrc/*/*.h csrc/*/*.cpp csrc/*/*.cu csrc/*/*.cuh)
	@requirements/install.sh $(VENV) $(PYTHON)
	@touch $@

$(OLDER_SGLANG_DIR)/.complete: $(VENV)/.complete
	@$(PY) -m pip --disable-pip-version-check --quiet install --no-deps --upgrade \
		--target $(@D) sglang==$(OLDER_SGLANG)
	@touch $@

demo: setup
	@examples/demo.sh $(PY) $(SEED)

test: setup $(OLDER_SGLANG_DIR)/.complete
	@BAPO_TEST_SGLANG_0_5_20=$(OLDER_SGLANG_DIR) $(PY) -m pytest -n $(TEST_WORKERS) --dist loadscope --no-loadscope-reorder $(PYTEST_ARGS)

lint: setup
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports
	@$(VENV)/bin/shellcheck examples/*.sh examples/*.sbatch requirements/*.sh
	@$(VENV)/bin/clang-format --dry-run --Werror $$(git ls-files $(CXX_FILES))

format: setup
	@$(VENV)/bin/ruff format .
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/clang-format -i $$(git ls-files $(CXX_FILES))

clean:
	rm -rf $(VENV) runs build bapo_megatron/*.so *.egg-info
