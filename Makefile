# Two commands do everything from nothing: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo test test-gpu test-cluster test-web campaign lint types bench docs clean

help:
	@echo "make demo   install, fit a real table and a 2-D set; report, figure and model in out/demo/"
	@echo "make test   install, then ruff, import-linter, mypy and pytest"
	@echo "make test-gpu  what only a GPU shows; on a bare machine with PyTorch it installs nothing"
	@echo "make test-cluster  two processes fit, two workers of Ray score as one process does; results/scale/"
	@echo "make campaign N=1000 SEED=0 JOBS=2  random tables, damage, kills and threads; a table of verdicts"
	@echo "make bench  run the benchmarks of speed and memory and write docs/tables/speed.md"
	@echo "make docs   build the documentation into site/, its notebooks run"
	@echo "make test-web  open every page of it and that of 'selfnorm explore' in Chromium; screenshots in out/web/"
	@echo "make clean  remove the virtual environment and everything generated"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet 'pip>=25.1'  # knows dependency groups
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[all]' --group dev
	@touch $(READY)

# Small tables are quickest on one thread.
demo: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python examples/demo.py out/demo

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(READY)
	$(BIN)/mypy

test: lint types
	$(BIN)/pytest -n 2

test-gpu:
	PYTHONPATH=src $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m tests.gpu

test-cluster: $(READY)
	$(BIN)/python -m pip install --quiet 'ray[data]>=2.40'
	$(BIN)/python benchmarks/scale.py cluster --rows 1e6

N ?= 1000
SEED ?= 0
JOBS ?= 1
campaign: $(READY)
	$(BIN)/python -m tests.campaign $(N) $(SEED) --jobs $(JOBS)

bench: $(READY)
	$(BIN)/python -m pip install --quiet -c constraints.txt --group bench
	$(BIN)/python benchmarks/steps.py overhead
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python benchmarks/steps.py many
	$(BIN)/python benchmarks/memory.py
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
	  $(BIN)/python benchmarks/steps.py gpu; \
	else echo "no GPU: steps.py gpu is left out"; fi
	$(BIN)/python docs/generate.py

docs: $(READY)
	$(BIN)/python -m pip install --quiet -c constraints.txt --group docs
	rm -rf site docs/reference/generated
	OMP_NUM_THREADS=1 $(BIN)/sphinx-build --fail-on-warning --keep-going --quiet -d out/doctrees docs site
	@echo "Open site/index.html"

# Chromium of the system where there is one, else Debian's package, else playwright's own.
test-web: docs
	$(BIN)/python -m pip install --quiet -c constraints.txt --group web
	@command -v chromium chromium-browser google-chrome >/dev/null \
	  || (apt-get update -qq && apt-get install -y -qq chromium >/dev/null) \
	  || $(BIN)/playwright install chromium
	$(BIN)/python -m tests.web site out/web

clean:
	rm -rf $(VENV) out site jupyter_execute docs/reference/generated dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
