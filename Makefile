# r7convert: every job has a target; plain `make` lists them.
.DEFAULT_GOAL := help
.PHONY: help demo test soak harm fuzz check fmt kernels test-gpu bench bench-codec bench-moe bench-reencode sanitize scale lock check-deps docs site wheel release-check clean

PYTHON ?= python3
VENV   ?= .venv
# One exact torch, installed first: plain `torch` fetches the CUDA build, several gigabytes.
# Where a GPU is to be used: make TORCH=torch ... (and EXTRAS=cu12,docs,dev for CUDA 12).
TORCH  ?= torch==2.13.0
EXTRAS ?= cu13,plot,docs,dev
PY     := $(VENV)/bin/python
DEMO   ?= build/demo

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --disable-pip-version-check "$(TORCH)"
	$(PY) -m pip install -q --disable-pip-version-check -e ".[$(EXTRAS)]"
	touch $@

demo: $(VENV)/.ready  ## write a small R7 checkpoint and convert it whole, on the CPU
	$(PY) -m tests.demo $(DEMO)

test: check  ## lint, types, kernels compiled without a GPU, docs, tests
	$(PY) -m pytest -n 2

CUTS ?= 600
soak: $(VENV)/.ready  ## cut every stage at random, resume, compare: SEED=N CUTS=N, ONLY='STAGE:FAULT' for one cut again
	$(PY) -m tests.soak --cuts $(CUTS) $(if $(SEED),--seed $(SEED)) $(if $(ONLY),--only '$(ONLY)') $(if $(JSON),--json $(JSON))

harm: $(VENV)/.ready  ## harm one byte of each class of bytes of each output: verify and push have to see every one
	R7_HARM=all $(PY) -m pytest -s tests/test_verify_classes.py

check: $(VENV)/.ready  ## lint, format and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

FUZZ_EXAMPLES ?= 500
FUZZ_SEED     ?= $(shell date +%s)

fuzz: $(VENV)/.ready  ## hostile inputs, FUZZ_EXAMPLES a door and kind (some minutes); what it finds is in build/hostile
	@echo "FUZZ_SEED=$(FUZZ_SEED) FUZZ_EXAMPLES=$(FUZZ_EXAMPLES)"
	R7_FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(PY) -m pytest tests/test_hostile.py tests/test_hostile_hub.py tests/test_corpus.py -s --hypothesis-seed=$(FUZZ_SEED) --timeout 3600

fmt: $(VENV)/.ready  ## format the code
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

kernels: $(VENV)/.ready  ## compile every kernel for every architecture, no GPU needed
	$(PY) -m pytest tests/test_kernels_compile.py

# Runs under the python3 that is active: a GPU machine has its own torch.
test-gpu:  ## the tests that need a GPU (they fail, not skip, where there is none)
	$(PYTHON) -m pytest tests/gpu -m gpu -p no:cacheprovider

bench: $(VENV)/.ready  ## repack against cp -r, paired in one run
	$(PY) -m tests.bench_repack

bench-codec:  ## search, encode and decode on this machine's GPU, beside exllamav3 where it is importable
	$(PYTHON) -m tests.gpu.bench_codec

bench-reencode:  ## one layer of GLM-5.2's size lifted to one K an expert, one shared expert encoded, on this machine's GPU
	$(PYTHON) -m tests.gpu.bench_reencode

bench-moe:  ## the fused routed experts on this machine's GPU, each checked before it is timed, beside exllamav3 where it is importable
	$(PYTHON) -m tests.gpu.bench_moe
	$(PYTHON) -m tests.gpu.exllamav3_moe

sanitize:  ## the fused kernels at small odd sizes under compute-sanitizer: memory, then races
	compute-sanitizer --tool memcheck --report-api-errors no --kernel-name kns=moe_ --kernel-name kns=linear_ $(PYTHON) -m tests.gpu.sanitize
	compute-sanitizer --tool racecheck --report-api-errors no --kernel-name kns=moe_ --kernel-name kns=linear_ $(PYTHON) -m tests.gpu.sanitize

scale: $(VENV)/.ready  ## all of GLM-5.2's headers through the command line: time and memory of every target (minutes)
	$(PY) -m tests.bench_scale

lock: $(VENV)/.ready  ## write requirements-dev.lock anew: every dependency of a development machine but torch, with hashes
	$(PY) -m pip install -q --disable-pip-version-check -e ".[deps]"
	mkdir -p build && echo 'torch ; sys_platform == "never"' > build/without-torch.txt
	$(PY) -m uv pip compile pyproject.toml --extra dev --extra docs --extra plot --extra cu13 --universal --python-version 3.11 --generate-hashes --upgrade \
	  --override build/without-torch.txt --no-emit-package torch --custom-compile-command "make lock" -q -o requirements-dev.lock

check-deps: $(VENV)/.ready  ## ask the advisory databases about every locked dependency; says so where none can be reached
	$(PY) -m pip install -q --disable-pip-version-check -e ".[deps]"
	$(PY) -m tests.check_deps requirements-dev.lock "$(TORCH)"

docs: $(VENV)/.ready  ## write the generated pages, diagrams and screens anew
	$(PY) -m tests.make_docs

site: $(VENV)/.ready  ## build the pages of docs/ into build/site, strictly, without a network
	$(PY) -m sphinx -W -n -q --keep-going -b html docs build/site

wheel: $(VENV)/.ready  ## build sdist and wheel into dist/
	rm -rf dist
	$(PY) -m build --no-isolation

release-check: wheel  ## is dist/ fit to be uploaded? installs the wheel into a fresh environment
	$(PY) -m tests.release_check dist build/release --torch "$(TORCH)"

clean:  ## remove what the targets made
	rm -rf $(VENV) build dist
