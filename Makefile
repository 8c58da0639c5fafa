# Everything runs in .venv, which is made on first use: that takes Python 3.11 or later, git, make and a C++ compiler.
# With NO_VENV=1 the interpreter PYTHON is used as it is, and nothing is installed.
PYTHON ?= python3

ifdef NO_VENV
python := $(PYTHON)
clang-format := clang-format
else
python := .venv/bin/python
clang-format := .venv/bin/clang-format
installed = .venv/$(1).installed
endif

# ninja and pip are parallel by themselves, and two pips must not work on one environment.
.NOTPARALLEL:
.PHONY: help venv build test sanitize demo bench tune lint format clean

help: ## show the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "%-8s %s\n", $$1, $$2 }' Makefile

venv: $(foreach set,build test demo bench lint,$(call installed,$(set))) ## install all requirements into .venv

build: $(call installed,build) ## build the kernel for the CPU and, where there is an nvcc, for CUDA, into build/
	$(python) tools/build.py

test: $(call installed,test) build ## build, then run all tests that this machine can run
	$(python) -m pytest

sanitize: $(call installed,test) build ## build, then run every CUDA kernel under compute-sanitizer (needs a GPU)
	$(python) tests/sanitizer_cases.py

demo: $(call installed,demo) build ## build, then fuse real models and compare: results and times
	$(python) examples/demo.py

bench: $(call installed,bench) build ## build, then measure against eager PyTorch, torch.compile and others (needs a GPU)
	$(python) benchmarks/peers.py --out build/peers

tune: $(call installed,bench) ## measure the sm_90a GEMMs and write cuda/sm90/tuning.h (needs an H100 or H200, and nvcc)
	$(python) tools/tune.py

lint: $(call installed,lint) ## check the style of all code
	$(python) -m ruff check
	$(python) -m ruff format --check
	git ls-files -co --exclude-standard '*.cpp' '*.h' '*.inl' '*.cu' '*.cuh' | xargs $(clang-format) --dry-run --Werror

format: $(call installed,lint) ## bring all code into style
	$(python) -m ruff check --fix
	$(python) -m ruff format
	git ls-files -co --exclude-standard '*.cpp' '*.h' '*.inl' '*.cu' '*.cuh' | xargs $(clang-format) -i

clean: ## remove what was built (.venv stays)
	rm -rf build .pytest_cache .ruff_cache

.venv/%.installed: requirements/%.txt $(wildcard requirements/*.txt) | .venv/bin/python
	.venv/bin/python -m pip install -r $<
	@touch $@

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'error: $(PYTHON) is missing or older than 3.11; name another: make PYTHON=python3.12' >&2; exit 1; }
	@$(PYTHON) -m venv .venv || \
	  { rm -rf .venv; echo 'error: $(PYTHON) cannot make a virtual environment (Debian, Ubuntu: install python3-venv)' >&2; exit 1; }
