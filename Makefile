# Two commands: `make demo` and `make test`. Each sets up its own virtual environment in .venv first.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet

LOWEST := $(VENV)-lowest

# One more than CI has cores: most jobs that tests start wait for others half of the time.
PROCESSES ?= 3

.PHONY: help demo test campaign check check-lowest check-triton docs format venv clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    set up, then complete examples/prompts.jsonl with the shipped demo model"
	@echo "make test    set up, then run the tests"
	@echo "make campaign  set up, then faults, signals and damaged messages at random moments of many jobs and servers, and the GPU's measurements with tiny sizes (an hour or more)"
	@echo "make check   set up, then ruff, mypy and import-linter"
	@echo "make check-lowest  the lowest versions that setup.cfg allows, in a virtual environment of their own: tests and a job"
	@echo "make check-triton  Triton kernels, interpreted and compiled, with three versions of Triton (2.3 GB of downloads, unpacked)"
	@echo "make docs    the documentation as a site in out/site; the reference pages anew"
	@echo "make format  rewrite the code in the project's format"
	@echo "make clean   remove the virtual environment and everything that was built"

# A stamp a set of packages; it is renewed when what it was made from changes.
$(VENV)/.base: setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "FastDecode needs Python 3.10 or newer; run: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch and the rest into $(VENV): about 3 GB from PyPI, since its torch for Linux has CUDA"
	@echo "(for CPUs alone about 0.3 GB: set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu)"
	@# torch alone, and first, so that no other package's needs choose its build.
	$(PIP) install -c constraints.txt 'torch==2.13.0'
	$(PIP) install -c constraints.txt -e '.[sworker]'
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) install -c constraints.txt -e '.[sworker,test,lint]'
	@touch $@

demo: $(VENV)/.base
	@mkdir -p out
	$(BIN)/fastdecode generate --model examples/model/checkpoint --input examples/prompts.jsonl \
	    --output out/completions.jsonl --summary out/summary.json --r-workers 2 --temperature 0 --show
	@echo; echo "completions: out/completions.jsonl   summary: out/summary.json"

# Files go to so many processes, in the order of tests/conftest.py.
test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder

campaign: $(VENV)/.dev
	@mkdir -p out
	FASTDECODE_ALL_EXAMPLES=1 $(BIN)/python -m pytest -q -n $(PROCESSES) --dist loadfile --no-loadscope-reorder
	$(BIN)/python tests/campaign/campaign.py --out out/campaign.json
	PYTHON=$(BIN)/python benchmarks/gpu_first.sh --smoke --out out/gpu_first.json
	PYTHON=$(BIN)/python benchmarks/gpu_first.sh --smoke --more --out out/gpu_first_more.json

# Scripts that no test runs whole: names that are gone, and calls that can't work.
LOOSELY := --config-file= --cache-dir=.mypy_cache/loosely --ignore-missing-imports \
    --follow-imports=silent --check-untyped-defs $(addprefix --disable-error-code=, \
    arg-type assignment index misc operator return-value var-annotated)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=benchmarks:tests $(BIN)/mypy $(LOOSELY) benchmarks/*.py tests/campaign/*.py
	$(BIN)/lint-imports

# transformers, the tests' oracle, needs newer packages than the product: tests that import it are left out.
$(LOWEST)/.lowest: setup.cfg pyproject.toml constraints-lowest.txt
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip --disable-pip-version-check --quiet install -c constraints-lowest.txt \
	    -e '.[sworker,zmq]' pytest pytest-timeout hypothesis
	@touch $@

check-lowest: $(LOWEST)/.lowest
	$(LOWEST)/bin/python -m pytest tests/cpu_kernels tests/core/test_cpus.py tests/wire tests/rworker
	@mkdir -p out
	$(LOWEST)/bin/fastdecode generate --model examples/model/checkpoint --input examples/prompts.jsonl \
	    --output out/completions-lowest.jsonl --r-workers 2 --temperature 0

# Triton is large, and a CPU needs none: its versions lie beside the virtual environment.
check-triton: $(VENV)/.dev
	for version in 3.6.0 3.7.1 3.9.0; do \
	    test -d $(VENV)-triton/$$version || \
	        $(PIP) install --no-deps --target $(VENV)-triton/$$version triton==$$version || exit 1; \
	    for tests in attention test_fused.py test_triton_compiles.py; do \
	        PYTHONPATH=$(VENV)-triton/$$version $(BIN)/python -m pytest -q tests/sworker/$$tests || exit 1; \
	    done; \
	done

# A virtual environment of its own: the site's tools are no dependency of the product or its tests.
$(VENV)-docs/.docs: setup.cfg
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip --disable-pip-version-check --quiet install 'mkdocs-material>=9.5,<10'
	@touch $@

docs: $(VENV)/.base $(VENV)-docs/.docs
	$(BIN)/python docs/reference.py
	$(VENV)-docs/bin/mkdocs build --quiet

format: $(VENV)/.dev
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VENV)-triton $(LOWEST) build out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
