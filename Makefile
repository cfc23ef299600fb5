# make demo: the main job, from a bare machine to a trained tiny model.  make test: the tests.
SHELL := /bin/bash
VENV ?= .venv
PYTHON ?=
SEED ?= 0
CASES ?= 2400
# Tests marked exhaustive run only with CI=true.
TEST_MARKS ?= $(if $(CI),,not exhaustive)
# Workers often wait for servers and ranks that they started: more of them than cores.
TEST_WORKERS ?= 3
PY := $(VENV)/bin/python
export OMP_NUM_THREADS ?= 1
CXX_FILES := 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh' 'tests/*.h' 'tests/*.cpp' 'tests/*.cu'

.PHONY: help setup demo test test-quick fuzz docs gpu-acceptance lint format clean

help:
	@echo "make demo [SEED=0]  set up, make a tiny model, train it with BAPO, evaluate, write a report"
	@echo "make test           set up and run the tests; with CI=true, also the exhaustive ones"
	@echo "make test-quick     set up and run the tests that start neither servers, ranks nor a browser"
	@echo "make fuzz [CASES=2400]  bad input of every kind, drawn at random"
	@echo "make docs           set up and build the documentation's site, build/site/index.html"
	@echo "make gpu-acceptance whatever must be seen on a real GPU; without one it says so and fails"
	@echo "make setup          create $(VENV), install, compile csrc/"
	@echo "make lint           formatting, linting, types, import rules"
	@echo "make clean          remove $(VENV), runs/ and build products"

setup: $(VENV)/.complete

# The stamp is written last: an interrupted installation is made again. The extension contains the
# package's version, so that a new one compiles it again.
$(VENV)/.complete: bapo_megatron/__init__.py requirements/cpu.txt requirements/install.sh requirements/bubblewrap.sh pyproject.toml setup.py $(wildcard csrc/*.cpp csrc/*/*.h csrc/*/*.cpp csrc/*/*.cu csrc/*/*.cuh)
	@requirements/install.sh $(VENV) $(PYTHON)
	@requirements/bubblewrap.sh
	@touch $@

$(VENV)/.docs: $(VENV)/.complete requirements/docs.txt
	@$(PY) -m pip --disable-pip-version-check --quiet install --no-deps -r requirements/docs.txt
	@touch $@

demo: setup
	@examples/demo.sh $(PY) $(SEED)

test: setup $(VENV)/.docs
	@requirements/beside.sh $(VENV)
	@requirements/chromium.sh
	@$(PY) -m pytest -n $(TEST_WORKERS) --dist loadscope --no-loadscope-reorder -m "$(TEST_MARKS)" $(PYTEST_ARGS)

test-quick: setup $(VENV)/.docs
	@$(PY) -m pytest -n $(TEST_WORKERS) --dist loadscope -m "not sglang and not distributed and not slow and not browser and not exhaustive" $(PYTEST_ARGS)

fuzz: setup
	@$(PY) -m tests.fuzz.campaign --cases $(CASES) --seed $(SEED)

docs: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet
	@echo "wrote build/site/index.html"

# Not of setup: a GPU machine is installed as docs/launch.md says. PYTHON is that installation's.
gpu-acceptance:
	@$(or $(PYTHON),python) -m tests.gpu.acceptance all

lint: setup
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports
	@$(VENV)/bin/shellcheck examples/*.sh examples/*/*.sh examples/*.sbatch requirements/*.sh
	@$(VENV)/bin/clang-format --dry-run --Werror $$(git ls-files $(CXX_FILES))

format: setup
	@$(VENV)/bin/ruff format .
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/clang-format -i $$(git ls-files $(CXX_FILES))

clean:
	rm -rf $(VENV) runs build bapo_megatron/*.so *.egg-info
