# make train | test | lint | bench | gate | gpu | versions | clean        (each makes .venv first if it is missing)
#
#   PYTHON=python3.12   the interpreter .venv is made from
#   TORCH=torch==2.14.1 the torch that is installed when there is none; a torch >= 2.10 that is there is taken as it is
#   NATIVE=optional     go on without the native modules when there is no compiler
#   RESULTS=folder      where `make gpu` leaves its rows and its log (default: bench/results)

PYTHON ?= python3
TORCH ?= torch==2.13.0
NATIVE ?= required
RESULTS ?= bench/results
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
NATIVE_OPTION := $(if $(filter required,$(NATIVE)),--config-settings=--global-option=--require-native)
NATIVE_SOURCES := setup.py CMakeLists.txt $(shell find csrc -type f)
# One pytest process per core; tests/conftest.py divides torch's threads among them. One that crashes ends the run: with
# another in its place pytest-xdist can wait for ever for the tests that went down with it.
PYTEST := $(PY) -m pytest -n auto --maxprocesses=8 --dist loadgroup --max-worker-restart=0

# The oldest Triton that is supported, beside the one that torch has pinned: a folder that PYTHONPATH puts first. Its
# interpreter needs an older numpy, too. Where there are no wheels of it, nothing is tested on it.
OLD_TRITON := 3.6.0
OLD_TRITON_FOLDER := $(VENV)/triton-$(OLD_TRITON)
OLD_TRITON_EXISTS := ; python_version < "3.15" and platform_system == "Linux" and (platform_machine == "x86_64" or platform_machine == "aarch64")
TRITON_CODE := tests/compiled/test_triton_machine_code.py tests/compiled/test_triton_planted_faults.py \
	tests/compiled/test_attention_machine_code.py
ON_OLD_TRITON := PYTHONPATH='$(abspath $(OLD_TRITON_FOLDER))' $(PYTEST) --triton $(OLD_TRITON)

.DEFAULT_GOAL := help
.PHONY: help train test lint bench gate gpu versions clean

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

train: $(VENV)/.native
	$(PY) examples/train_gpt.py

# Compiled and interpreted kernels do not share a process (tests/triton_session.py). All sessions run, whichever fails.
test: $(VENV)/.native $(OLD_TRITON_FOLDER)/.installed
	@status=0; set -x; \
	TRITON_INTERPRET=0 $(PYTEST) tests || status=1; \
	TRITON_INTERPRET=1 $(PYTEST) tests/interpreted || status=1; \
	if [ -d '$(OLD_TRITON_FOLDER)/triton' ]; then \
	    TRITON_INTERPRET=1 $(ON_OLD_TRITON) -m 'not newest' tests/interpreted || status=1; \
	    TRITON_INTERPRET=0 $(ON_OLD_TRITON) -m 'not newest' $(TRITON_CODE) || status=1; \
	fi; \
	exit $$status

lint: $(VENV)/.lint
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright
	$(VENV)/bin/clang-format --dry-run -Werror $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

bench: $(VENV)/.native
	$(PY) -m halfstep bench

gate: $(VENV)/.native
	$(PY) tests/gate.py

gpu: $(VENV)/.native
	$(PY) tests/gpu_run.py '$(RESULTS)'

versions: $(VENV)/.native
	$(PY) tests/versions.py

clean:
	rm -rf $(VENV) build dist runs python/*.egg-info python/halfstep/*.so python/halfstep/_build_info.*.json \
	    .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A base interpreter that brings a usable torch (a GPU machine's image, often several GB) lends it to .venv.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	    || { echo "halfstep needs Python 3.10 or newer; name one with make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	    || { echo "this Python has no venv module (Debian, Ubuntu: apt install python3-venv python3-dev)" >&2; exit 1; }
	$(PYTHON) -m venv $$($(PYTHON) tests/torch_version.py >/dev/null 2>&1 && echo --system-site-packages) $(VENV)
	@if $(PYTHON) tests/torch_version.py >/dev/null 2>&1; then $(PYTHON) tests/lend_packages.py $(VENV); fi

# Torch before everything else: a CUDA build of torch brings its own triton, and only the lack of one adds another.
$(VENV)/.deps: pyproject.toml | $(VENV)/bin/python
	$(PY) -c 'import torch' 2>/dev/null || $(PIP) install '$(TORCH)'
	$(PY) tests/torch_version.py
	$(PIP) install 'setuptools>=77' wheel 'pybind11>=2.13' 'cmake>=3.22' ninja
	$(PIP) install --no-build-isolation $(NATIVE_OPTION) --editable '.[test]'
	@touch $@

# No stamp without a module (NATIVE=optional): the next call looks for a compiler again.
$(VENV)/.native: $(VENV)/.deps $(NATIVE_SOURCES)
	$(PIP) install --quiet --no-build-isolation --no-deps $(NATIVE_OPTION) --editable .
	@if ls python/halfstep/_cpu.*.so >/dev/null 2>&1; then touch $@; else $(PY) -m halfstep doctor; fi

$(OLD_TRITON_FOLDER)/.installed: | $(VENV)/.deps
	rm -rf '$(OLD_TRITON_FOLDER)'
	mkdir -p '$(OLD_TRITON_FOLDER)'
	$(PIP) install --quiet --no-deps --only-binary=:all: --target '$(OLD_TRITON_FOLDER)' \
	    'triton==$(OLD_TRITON)$(OLD_TRITON_EXISTS)' 'numpy<2.4$(OLD_TRITON_EXISTS)'
	@touch $@

$(VENV)/.lint: $(VENV)/.deps
	$(PIP) install --quiet --no-build-isolation $(NATIVE_OPTION) --editable '.[test,lint]'
	@touch $@
