.PHONY: help setup lab present test notebooks html handout reset bench kit gpu records format lane-colab lane-colab-cpu
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= tools/constraints/ci.txt
# Where there is no NVIDIA driver, torch's CPU build: the usual one brings gigabytes of CUDA.
export TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PY := $(VENV)/bin/python
COLAB := tools/constraints/colab.txt
# Every cell, both editions, and the tests of what a cell calls. Less: that Triton can be hidden, where a lane has it or has it not.
LANE := notebooks tests/test_notebooks.py tests/test_exercises.py tests/test_widgets.py tests/test_runtime.py -k 'not without_triton_every'

help:       ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/  /'
setup: $(VENV)/installed  ## a virtual environment with everything; does nothing when it is there
lab: $(VENV)/installed  ## copy the notebooks to work/ where they are missing, and open them in JupyterLab
	@exec $(PY) tools/lab.py
present: $(VENV)/installed  ## the same for a projector: one notebook and nothing beside it
	@exec $(PY) tools/lab.py present
test: $(VENV)/installed  ## all tests: package, notebooks, browser
	$(PY) -m ruff check --quiet .
	$(PY) -m ruff format --check --quiet .
	$(PY) -m pytest --numprocesses=auto --dist=loadfile
notebooks: $(VENV)/installed  ## execute the notebooks and write them back with their outputs; NB=02 for one
	$(PY) tools/notebooks.py $(NB)
html: $(VENV)/installed  ## the lessons as pages in site/, which need no kernel and no network
	$(PY) tools/pages.py
handout: $(VENV)/installed  ## print docs/handout.html to docs/handout.pdf; needs a Chromium
	$(PY) tools/handout.py
reset: $(VENV)/installed  ## NB=02: put your copy of that notebook in work/archive/ and take a fresh one
	@$(PY) tools/lab.py reset $(NB)
bench: $(VENV)/installed  ## measure the lessons: redraws, keys in Chromium, first widget, notebooks, memory
	$(PY) benchmarks/lessons.py
	$(PY) benchmarks/memory.py
lane-colab: .venv-colab/installed  ## the notebooks, with the same outputs, by the versions that Colab ships
	$(<D)/bin/python -m pytest $(LANE)
lane-colab-cpu: .venv-colab-cpu/installed  ## the same without Triton, as Colab has it without a GPU
	$(<D)/bin/python -m pytest $(LANE)
kit: $(VENV)/installed  ## wheels, source, notebooks and pages in kit/, for a room without a network
	$(PY) tools/kit.py $(CONSTRAINTS)
gpu: $(VENV)/installed  ## the tests and notebooks where there is a GPU; fails where there is none
	@$(PY) -c "import torch; assert torch.cuda.is_available(), 'no GPU here'"
	$(PY) -m pytest
records: $(VENV)/installed  ## on a GPU: make the recordings that machines without one show
	$(PY) tools/records.py
format: $(VENV)/installed  ## the only target that rewrites code
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

# Made once: a second venv laid over it by another Python breaks it.
%/bin/python:
	@command -v $(PYTHON) >/dev/null || { echo "there is no $(PYTHON) here: install Python 3.11 or newer, or say make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "rawgrad needs Python 3.11 or newer, got " + sys.version.split()[0] + ": say make PYTHON=python3.11")'
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "this Python cannot make a venv: apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv $*
$(VENV)/installed: $(PY) pyproject.toml $(CONSTRAINTS)
	@tools/install.sh $(PY) --constraint $(CONSTRAINTS) --editable '.[dev]'
	@touch $@
.venv-colab/installed: .venv-colab/bin/python pyproject.toml $(COLAB)
	@tools/install.sh .venv-colab/bin/python --constraint $(COLAB) --requirement $(COLAB) --editable .
	@touch $@
# A copy of links, in a second and without disk, and Triton taken out of it.
.venv-colab-cpu/installed: .venv-colab/installed
	@rm -rf $(@D)
	@cp -al $(<D) $(@D)
	@rm $@
	@$(@D)/bin/python -m pip --disable-pip-version-check uninstall --quiet --yes triton
	@touch $@
