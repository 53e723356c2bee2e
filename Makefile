.PHONY: help setup lab test notebooks html handout reset bench gpu records format
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= tools/constraints/ci.txt
# Where there is no NVIDIA driver, torch's CPU build: the usual one brings gigabytes of CUDA.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check

help:       ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/  /'
setup: $(VENV)/installed  ## a virtual environment with everything; does nothing when it is there
lab: $(VENV)/installed  ## copy the notebooks to work/ where they are missing, and open them in JupyterLab
	@exec $(PY) tools/lab.py
test: $(VENV)/installed  ## all tests: package, notebooks, browser
	$(PY) -m ruff check --quiet .
	$(PY) -m ruff format --check --quiet .
	$(PY) -m pytest
notebooks: $(VENV)/installed  ## execute the notebooks and write them back with their outputs; NB=02 for one
	$(PY) tools/notebooks.py $(NB)
html: $(VENV)/installed  ## the lessons as pages in site/, which need no kernel and no network
	$(PY) tools/pages.py
handout: $(VENV)/installed  ## print docs/handout.html to docs/handout.pdf; needs a Chromium
	$(PY) tools/handout.py
reset: $(VENV)/installed  ## NB=02: put your copy of that notebook in work/archive/ and take a fresh one
	@$(PY) tools/lab.py reset $(NB)
bench: $(VENV)/installed  ## measure the lessons: redraws, keys in Chromium, first widget, notebooks
	$(PY) benchmarks/lessons.py
gpu: $(VENV)/installed  ## the tests and notebooks where there is a GPU; fails where there is none
	@$(PY) -c "import torch; assert torch.cuda.is_available(), 'no GPU here'"
	$(PY) -m pytest
records: $(VENV)/installed  ## on a GPU: make the recordings that machines without one show
	$(PY) tools/records.py
format: $(VENV)/installed  ## the only target that rewrites code
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

# Made once: a second venv laid over it by another Python breaks it.
$(PY):
	@command -v $(PYTHON) >/dev/null || { echo "there is no $(PYTHON) here: install Python 3.11 or newer, or say make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "rawgrad needs Python 3.11 or newer, got " + sys.version.split()[0] + ": say make PYTHON=python3.11")'
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "this Python cannot make a venv: apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
$(VENV)/installed: $(PY) pyproject.toml $(CONSTRAINTS)
	@test -e /proc/driver/nvidia/version || $(PIP) install --quiet --no-deps --retries 0 --timeout 10 --index-url $(TORCH_INDEX) --constraint $(CONSTRAINTS) torch || true
	$(PIP) install --quiet --editable '.[dev]' --constraint $(CONSTRAINTS)
	@touch $@
