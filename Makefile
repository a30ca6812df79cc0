# Everything is set up by whichever target you call first: `make demo` or `make test` on a fresh clone just works.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
DATA   ?= data/weather-32x64
RUNS   ?= runs
NAME   ?= default
TORCH  ?=

.PHONY: help env demo test core lint lab doctor docs clean

help:
	@echo "make demo    make a small atmosphere, train a forecast model on it, score and draw its forecasts (minutes)"
	@echo "make test    run the tests          make lint    check style and types"
	@echo "make core    run only the tests of the mathematics: models, parallelism, the step (under two minutes)"
	@echo "make lab     start JupyterLab       make doctor  say what this machine has"
	@echo "             TORCH=cpu: install PyTorch for CPUs (0.8 GB), if .venv has none yet; without it pip's, on Linux several GB"
	@echo "make docs    build the site of guides, lessons and library into site/html; ANSWERS=1: with answers, site/answers"
	@echo "make env     set up $(VENV) for tests only      make clean   remove $(VENV) and caches; runs and data stay"

# what lessons need, then what tests need besides; each is installed once, and again when the pins change. With TORCH=cpu,
# uv installs PyTorch first, because it knows where each build of PyTorch is; pip then keeps that build
env: $(VENV)/.ready
$(VENV)/.lab: WHAT = the course with JupyterLab
$(VENV)/.lab: EXTRA = lab
$(VENV)/.ready: WHAT = the course with its tests
$(VENV)/.ready: EXTRA = dev
$(VENV)/.lab $(VENV)/.ready: pyproject.toml constraints.txt
	@echo "== Setting up $(VENV): $(WHAT), in the versions of constraints.txt (once, a few minutes)"
	@$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 14) else "Python 3.11, 3.12 or 3.13 is needed, this is " + sys.version.split()[0] + ": run make with PYTHON=python3.12, say")'
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH),$(BIN)/python -m pip install -c constraints.txt uv)
	$(if $(TORCH),$(BIN)/uv pip install --python $(BIN)/python --torch-backend=$(TORCH) -c constraints.txt torch)
	$(BIN)/python -m pip install -c constraints.txt -e '.[$(EXTRA)]'
	@touch $(VENV)/.lab $@
	@echo "== $(VENV) is ready: make demo, make lab; $(BIN)/course --help says what else there is"

demo: $(VENV)/.lab
	@echo "== 1/4 Making an atmosphere: course data weather path=$(DATA)"
	$(BIN)/course data weather path=$(DATA)
	@echo "== 2/4 Training a forecast model on it: course train vit-demo"
	$(BIN)/course train vit-demo data.path=$(DATA) log.dir=$(RUNS) log.name=$(NAME)
	@echo "== 3/4 Scoring it on a year it has not seen: course evaluate"
	$(BIN)/course evaluate $(RUNS)/vit-demo/$(NAME)
	@echo "== 4/4 Cutting it over two processes: do two steps give the parameters of one process?"
	$(BIN)/course verify vit-demo parallel.tp=2 train.steps=2

test: env
	@echo "== Running the tests (those marked slow run in .ci/run)"
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadgroup

CORE := tests/models tests/parallel tests/training/test_step.py tests/test_rooms.py
core: env
	@echo "== Running the tests of the mathematics: mappings, models, every kind of parallelism, the step"
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadgroup $(CORE)

lint: env
	$(BIN)/ruff check .
	$(BIN)/mypy

lab: $(VENV)/.lab
	@echo "== Starting JupyterLab on this machine; open the address with the token that it prints"
	$(BIN)/jupyter lab --ip=127.0.0.1 --no-browser --ServerApp.root_dir="$(CURDIR)" \
		--LabApp.app_settings_dir="$(CURDIR)/course/lab/jupyterlab" \
		--LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb $(if $(filter 0,$(shell id -u)),--allow-root)

doctor: env
	$(BIN)/course doctor

SITE := $(if $(filter 1,$(ANSWERS)),answers,html)
docs: env
	@echo "== Building the site, in minutes: open site/$(SITE)/index.html then"
	$(BIN)/python -m sphinx -c docs -W --keep-going -q -j auto -t $(SITE) -d site/doctrees/$(SITE) . site/$(SITE)

clean:
	rm -rf $(VENV) build dist site docs/api *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
