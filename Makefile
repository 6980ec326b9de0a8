# Everything here works in a fresh clone with Python >= 3.10 and make.
#   make PYTHON=python3.12 install     another interpreter
#   make JOBS=8 test                   more test processes

PYTHON ?= python3
JOBS ?= 2
GPU_JOBS ?= 8
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# A GPU machine often brings its own torch: without .venv the system's Python runs the GPU suite.
ANY_PYTHON := $(if $(wildcard $(INSTALLED)),$(BIN)/python,$(PYTHON))
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

# Packages are installed without bytecode, which is quicker; it is written on first import, or every
# start would compile torch anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all test-shapes test-gpu test-versions release-check check format bench pages docs \
        fuzz mutation clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 12

install: $(INSTALLED)  ## create .venv with every extra that tests and command line need

# uv is several times faster than pip; where it cannot be had or fails, pip does the same.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	( $(BIN)/python -m pip install --quiet uv \
	  && $(if $(PIP_FIND_LINKS),UV_FIND_LINKS="$(PIP_FIND_LINKS)") \
	     $(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt -e '.[dev]' ) \
	|| $(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	@touch $@

demo: install  ## what LLN attention does, in two minutes: runs/demo/report.html
	$(BIN)/lln demo

test: install  ## the tests of the library, in four minutes
	HYPOTHESIS_PROFILE=quick $(PYTEST) --ignore=tests/lln_study

# The property tests are among those of `make test`, with fewer examples.
test-all: install  ## the rest: the study, more cases and sizes, whatever takes long
	$(PYTEST) -m 'slow and not gpu'
	$(PYTEST) tests/test_properties*.py tests/hf/test_hf_properties.py

# Under the checks of annotations torch.compile cannot trace, kernels cannot be read as source, and
# bad input is caught before our own messages: those tests are left out here.
test-shapes: install  ## the tests of ops and modules with every shape annotation checked
	$(PYTEST) --jaxtyping-packages=lln,beartype.beartype -k 'not compile and not refuse and not bad' \
	  --ignore=tests/ops/triton tests/ops tests/nn/test_attention.py tests/nn/test_running.py \
	  tests/nn/test_dropout.py

# Most of the time is the compilation of kernels on the CPU: many processes share the device.
test-gpu:  ## the tests that need a CUDA device
	OMP_NUM_THREADS=1 $(ANY_PYTHON) -m tests.in_shards $(GPU_JOBS) -m gpu -q

# Environments of other versions under build/versions, a part of the tests in each; many gigabytes
# where torch comes with CUDA.
test-versions: install  ## oldest, pinned and newest torch, transformers and Python: a table, results/versions.json
	$(BIN)/python -m tests.versions

release-check: install  ## wheel and sdist in empty environments, with each extra; README's examples there
	$(BIN)/python -m tests.release

check: install  ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: install  ## rewrite the files as `make check` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install  ## time and memory on this CPU, rows into runs/bench
	$(BIN)/lln bench

pages: install  ## rewrite the measured blocks of README.md and docs/ from results/, and the notebook
	$(BIN)/python -m lln_study.paper.pages.write

docs: install  ## the documentation as a site, with the API: build/docs/index.html
	$(BIN)/python -m sphinx --fail-on-warning --quiet -c docs/site docs build/docs

fuzz: install  ## the property tests with many more examples
	HYPOTHESIS_PROFILE=fuzz $(PYTEST) -m "not gpu" tests/test_properties*.py tests/hf/test_hf_properties.py

mutation: install  ## 240 small changes of the source: do the tests notice? build/mutation.jsonl
	$(BIN)/python -m tests.mutation --jobs $(JOBS)

clean:  ## remove what was generated; .venv and results/ stay
	rm -rf build dist runs .pytest_cache .ruff_cache .hypothesis *.egg-info
	find lln tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
