# Needs python3 (>= 3.11, with venv) and make; everything else is installed into .venv. Every target may be run again.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
CASES ?=
# Files of tests that run side by side. Groups have several processes, and wait for a third of their time.
JOBS ?= 3

PY := $(VENV)/bin/python
PROTO_VENV := $(VENV)-proto
CONTROL_VENV := $(VENV)-control
VLLM_VENV := $(VENV)-vllm
UV_VENV := $(VENV)-uv
DOCS_VENV := $(VENV)-docs
RELEASE_VENV := $(VENV)-release
PIP := -m pip --disable-pip-version-check --quiet
# setuptools warns that an editable installation finds this folder's packages, which is the point of it.
EDITABLE := PYTHONWARNINGS=ignore $(PY) $(PIP) install --editable

# An installation is renewed when what it was built from changes: dependencies, the build, the native source.
BUILT_FROM := pyproject.toml build_backend.py ep_kernels/transports/build.py $(wildcard ep_kernels/transports/*/native/* ep_kernels/network/native/* services/crossdock/protocol/native/*)
KEY := $(shell cat $(BUILT_FROM) 2>/dev/null | cksum | cut -d ' ' -f 1)
CONTROL_KEY := $(shell cat $(BUILT_FROM) $$(find services -name '*.py') 2>/dev/null | cksum | cut -d ' ' -f 1)
DEMO := $(VENV)/installed-demo-$(KEY)
DEV := $(VENV)/installed-dev-$(KEY)
RELEASE := $(RELEASE_VENV)/installed-$(shell cksum <deploy/release-requirements.txt | cut -d ' ' -f 1)
PROTO := $(PROTO_VENV)/installed-1.76.0
UV := $(UV_VENV)/installed-0.13.9
DOCS := $(DOCS_VENV)/installed-$(shell cksum <deploy/site/requirements.txt | cut -d ' ' -f 1)
CONTROL := $(CONTROL_VENV)/installed-$(CONTROL_KEY)
# The vLLM whose classes run in the tests, and the newest, of which only the Python part is needed.
VLLM_VERSION := 0.26.0
VLLM_NEWEST := 0.33.0
VLLM := $(VLLM_VENV)/installed-$(VLLM_VERSION)-$(shell cat $(BUILT_FROM) tests/vllm/requirements.txt 2>/dev/null | cksum | cut -d ' ' -f 1)
NEWEST := $(VLLM_VENV)/newest-$(VLLM_NEWEST)
# Engines of which the tests run a few modules of the wheel, without its dependencies and compiled libraries.
SGLANG := $(VENV)-engines/sglang-0.5.23
MEGATRON := $(VENV)-engines/megatron-core-0.16.1
DEEPSPEED := $(VENV)-engines/deepspeed-0.19.8

VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"$$/\1/p' services/crossdock/__init__.py)
IMAGE_FLAGS := --build-arg VERSION=$(VERSION) --build-arg REVISION=$(shell git rev-parse HEAD 2>/dev/null || echo unknown) $(ARGS)

.DEFAULT_GOAL := help
.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*\#\# .*/\1/p' $(MAKEFILE_LIST))

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do \
	  printf '%-20s %s\n' "$$name" "$$text"; done

demo: $(DEMO) ## Install, then serve three small models here and compare them with plain transformers
	$(VENV)/bin/crossdock demo $(ARGS)

test: $(DEV) ## Run every test that this machine can run (ARGS="-k name" to choose)
	$(PY) -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-bare: ## Both commands of the README in bare roots of Debian 12 and 13 (root, debootstrap; an hour; ARGS="--suite trixie")
	$(PYTHON) -m tests.bare --jobs $(JOBS) $(ARGS)

test-gpu: $(DEV) ## On a machine with GPUs: every test that needs one; NODES=2: groups of two hosts, the network between
	$(PY) -m tests.gpu.everything $(if $(NODES),--nodes $(NODES)) $(ARGS)

test-hosts: $(DEV) ## Groups over several hosts: the contract suite in every split, by every provider (ARGS="-k tcp-halves")
	$(PY) -m pytest -q tests/transports --over-hosts full $(ARGS)

test-families: $(DEV) ## Every MoE family of the installed transformers: equal tokens with its experts served (minutes)
	$(PY) -m pytest -q tests/services/test_families.py --all-families $(ARGS)

test-layer: $(DEV) ## A layer of DeepSeek-V3 in fp8, 256 experts of 7168 x 2048, served by 4 ranks here (23 GB of memory and disk)
	$(PY) -m pytest -q -s tests/services/test_fp8_layer.py --whole-layer $(ARGS)

test-rxe: $(DEV) ## RDMA in a QEMU guest with Soft-RoCE: bytes, faults, yardsticks of verbs and libfabric (ARGS="-k bytes")
	$(PY) -m pytest -q -rs tests/rxe --rxe --rxe-out docs/results/$$(date +%F)-rxe $(ARGS)

test-vllm: $(VLLM) $(NEWEST)/vllm ## Real vLLM on the CPU: the plugin, and MoE layers over our transport (downloads 3 GB)
	$(VLLM_VENV)/bin/python -m pytest -q tests/vllm $(ARGS)
	PYTHONPATH=$(abspath $(NEWEST)) $(VLLM_VENV)/bin/python -m pytest -q tests/vllm $(ARGS)

test-sglang: $(DEV) $(SGLANG) ## SGLang's own dispatchers on the CPU over our deep_ep (downloads 39 MB)
	PYTHONPATH=$(abspath $(SGLANG)) $(PY) -m pytest -q tests/sglang $(ARGS)

test-megatron: $(DEV) $(MEGATRON) ## Megatron's flex dispatcher on the CPU over our deep_ep, forward and backward (downloads 3 MB)
	PYTHONPATH=$(abspath $(MEGATRON)) $(PY) -m pytest -q tests/megatron $(ARGS)

test-deepspeed: $(DEV) $(DEEPSPEED) ## DeepSpeed's ZeRO-3 on the CPU with our all-gathers: its own losses, bit by bit (downloads 3 MB)
	PYTHONPATH=$(abspath $(DEEPSPEED)) $(PY) -m pytest -q tests/deepspeed $(ARGS)

sanitize: $(DEV) ## On a machine with a GPU: compute-sanitizer's four tools over every kernel (ARGS="racecheck" for one)
	$(PY) -m tests.gpu.sanitize $(ARGS)

check: lint types proto-check house ## Lint, types, generated files, house rules

lint: $(DEV) ## ruff: rules and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(DEV) ## mypy, strict
	$(PY) -m mypy --num-workers auto

model: $(DEV) ## Search every order of events of small groups with two disturbances (minutes)
	$(PY) -m tests.unit.test_group_model $(ARGS)

house: $(DEV) ## The house rules: layers, environment, budgets, public names, generated files
	$(PY) -m pytest -q tests/house

proto: $(PROTO) ## Generate services/crossdock/protocol/v1 from protos/
	$(PROTO_VENV)/bin/python protos/generate.py

proto-check: $(PROTO) ## Fail if services/crossdock/protocol/v1 is not what protos/ generates
	$(PROTO_VENV)/bin/python protos/generate.py --check

editor: $(DEV) ## Headers that clangd reads the kernels with; git ignores them
	$(PY) -m tests.house.generate --editor

schema: $(DEV) ## Generate the chart's values.schema.json and the metrics table from the types
	$(PY) -m tests.house.generate

docs: $(DOCS) ## Build the site of the documents into build/docs; dead links and anchors fail
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --config-file deploy/site/mkdocs.yaml $(ARGS)

control-alone: $(CONTROL) ## Install the control plane by itself, without torch, and run it
	$(CONTROL_VENV)/bin/python tests/deploy/control_alone.py

constraints: $(UV) ## Renew the pinned dependencies of the container images, with hashes, in deploy/constraints
	@for part in control worker; do \
	  $(UV_VENV)/bin/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-header \
	    --no-annotate --extra $$part $$([ $$part = control ] || echo --extra otlp) --output-file deploy/constraints/$$part.txt pyproject.toml || exit 1; done

test-deploy: $(DEV) ## The chart against a real API server and kubelet, our images as containers and pods (builds both; root)
	-$(PY) -m tests.deploy.bed.tools
	-$(PY) -m tests.deploy.bed.images
	$(PY) -m pytest -q -rs -p no:cacheprovider -o timeout=1200 $(filter-out %__init__.py %conftest.py,$(wildcard tests/deploy/live/*.py)) $(ARGS)

# Without Go the definitions are not fetched: what needs them skips, and says so.
recipes: $(DEV) ## Render every recipe, and check it against the definitions of the types that it uses (Go fetches them)
	-$(PY) -m tests.deploy.bed.tools leaderworkersets.crd.yaml llminferenceservices.crd.yaml
	$(PY) -m pytest -q -rs -p no:cacheprovider tests/deploy/test_recipes.py $(ARGS)

bench-cpu: $(DEMO) ## Measure the cpu transport against gloo; table, csv and run.json
	$(PY) -m benchmarks.run --device cpu --out docs/results/$$(date +%F)-cpux4 $(ARGS)

bench-control: $(DEV) ## Measure the control plane with 8 to 2,048 simulated workers; csv and run.json (some minutes)
	$(PY) -m benchmarks.control --out docs/results/$$(date +%F)-control $(ARGS)

bench-placement: $(DEV) ## How evenly experts are placed on zipf loads, beside greedy and EPLB; csv and run.json
	$(PY) -m benchmarks.placement --out docs/results/$$(date +%F)-placement $(ARGS)

bench-resume: $(DEV) ## How long clients wait when a worker is killed and when experts move; csv and run.json
	$(PY) -m benchmarks.resume --out docs/results/$$(date +%F)-resume $(ARGS)

bench-peers: $(DEV) ## How fast experts are read from other workers, and how soon a group serves with two more; csv and run.json
	$(PY) -m benchmarks.peers --out docs/results/$$(date +%F)-experts-from-peers $(ARGS)

bench-service: $(DEV) ## Measure the expert service beside its experts in one process and a bare gRPC echo; csv and run.json
	$(PY) -m benchmarks.service --out docs/results/$$(date +%F)-service $(ARGS)

bench-network: $(DEV) ## Measure ring, proxy and providers on the loop-back device, and gloo beside them; table, csv and run.json
	$(PY) -m benchmarks.network --out docs/results/$$(date +%F)-network $(ARGS)

bench-scale: $(DEV) ## Forecast dispatch and combine of 8 to 512 GPUs, in one hop and two, by arithmetic; csv, run.json, plots
	$(PY) -m benchmarks.scale --out docs/results/$$(date +%F)-scale $(ARGS)

chaos: $(DEV) ## Kill, stop and cut off control planes and workers at random under load (3 minutes; ARGS="--seconds 600")
	$(PY) -m tests.chaos --out docs/results/$$(date +%F)-chaos $(ARGS)

test-elastic: $(DEV) ## Groups that grow and shrink under load, then under kill -9, every layout told by its bits (1 minute; ARGS="--seconds 300")
	$(PY) -m tests.elastic $(ARGS)

attack: $(DEV) ## Attack a real group, plain and with mTLS, while a client compares every answer (5 minutes; ARGS="--short")
	$(PY) -m tests.attack --out docs/results/$$(date +%F)-attack $(ARGS)

test-observability: $(DEV) ## A real Prometheus scrapes a real group of 8; each fault must raise its alert, and no alert may fire without one (15 minutes; Go)
	$(PY) -m tests.observability --out docs/results/$$(date +%F)-observability $(ARGS)
	$(PY) -m tests.observability --hosts 2 --ranks 4 --calm 60 --out docs/results/$$(date +%F)-observability-hosts $(ARGS)

bench-overhead: $(DEV) ## What latency records cost an operation: with and without, in turn (ARGS="--device cuda" on a GPU)
	$(PY) -m tests.observability.overhead --out docs/results/$$(date +%F)-overhead $(ARGS)

soak: $(DEV) ## Kills, reconnects and moves for minutes; the processes that stay may not grow (ARGS="--minutes 10")
	$(PY) -m tests.soak $(ARGS)

BENCH_MOE = benchmarks.run --device cuda $(if $(CASES),--cases $(CASES))
BENCH_ONE = $(if $(filter collectives,$(CASES)),benchmarks.gpu.collective_tables,$(BENCH_MOE))
BENCH_GPU = $(if $(NODES),benchmarks.gpu.nodes --nodes $(NODES),$(BENCH_ONE))
bench-gpu: $(DEV) ## Measure the nvlink transport and NCCL on the GPUs here; csv, plots (CASES=ll, ht or collectives; NODES=2: as two hosts)
	@$(PY) -c 'import sys, torch; sys.exit(not torch.cuda.device_count() and "make bench-gpu: needs NVIDIA GPUs, this machine has none")'
	NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 CUBLAS_WORKSPACE_CONFIG=:4096:8 \
	  $(PY) -m torch.distributed.run --standalone \
	  --nproc-per-node $$($(PY) -c 'import torch; print(torch.cuda.device_count())') \
	  -m $(BENCH_GPU) --note NCCL_NVLS_ENABLE=0 $(ARGS)

# PYTHON: of an environment that has vLLM and Crossdock.
bench-vllm: ## On 2 or more GPUs: step times of vLLM's MoE backends, ours and its own (ARGS="--tokens mixtral": do they say the same?)
	$(PYTHON) -m benchmarks.vllm --out docs/results/$$(date +%F)-vllm $(ARGS)

native: $(DEMO) ## Compile the native libraries of the transports in place
	$(PY) build_backend.py

kernels: $(DEV) ## Compile every CUDA kernel without a GPU; table of resources, fails on spills (ARGS="--arch sm_120a")
	$(PY) -m benchmarks.kernels $(ARGS)

wheel: $(DEV) ## Build the wheel with the common kernels compiled in, into dist/
	$(PY) -m ep_kernels.tools.kernels --ship
	$(PY) $(PIP) wheel --no-deps --wheel-dir dist .
	@ls -l dist/*.whl

dist: $(DEV) ## Everything that a release consists of, into dist/: wheel, sdist, chart, the images' context; tried out by installing
	$(PY) -m ep_kernels.tools.kernels --ship
	$(PY) deploy/dist.py dist

release-check: $(DEV) $(RELEASE) ## All of a release of this commit but its publication, from a clean clone, into dist/ (ARGS="--without bare")
	rm -rf build/release
	git clone --quiet --no-hardlinks . build/release
	cd build/release && $(abspath $(PY)) -m deploy.release $(abspath dist) --tools $(abspath $(RELEASE_VENV))/bin $(ARGS)

venv: $(DEV) ## Install everything for development into .venv

image: ## Build the container images crossdock-control and crossdock-worker
	docker build --target control $(IMAGE_FLAGS) --tag crossdock-control --tag crossdock-control:$(VERSION) .
	docker build --target worker $(IMAGE_FLAGS) --tag crossdock-worker --tag crossdock-worker:$(VERSION) .

clean: ## Remove the virtual environments, caches and built files
	rm -rf $(VENV) $(PROTO_VENV) $(CONTROL_VENV) $(VLLM_VENV) $(UV_VENV) $(DOCS_VENV) $(RELEASE_VENV) $(VENV)-engines build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -rf crossdock.egg-info services/crossdock.egg-info
	rm -rf ep_kernels/cubins
	find benchmarks ep_kernels -name '*.so' -delete

$(VENV)/bin/python $(PROTO_VENV)/bin/python $(CONTROL_VENV)/bin/python $(VLLM_VENV)/bin/python $(UV_VENV)/bin/python $(DOCS_VENV)/bin/python $(RELEASE_VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "python3: expected >= 3.11, got " + sys.version)'
	@echo "making $(@:/bin/python=)"
	$(PYTHON) -m venv $(@:/bin/python=)
	$@ $(PIP) install --upgrade pip

$(DEMO): | $(PY)
	@echo "installing crossdock[demo] into $(VENV) (the first time downloads torch; some minutes)"
	$(EDITABLE) '.[demo]'
	@rm -f $(VENV)/installed-demo-*
	@touch $@

$(DEV): | $(PY)
	@echo "installing crossdock[dev] into $(VENV) (the first time downloads torch; some minutes)"
	$(EDITABLE) '.[dev]'
	@rm -f $(VENV)/installed-*
	@touch $@ $(DEMO)

$(PROTO): | $(PROTO_VENV)/bin/python
	$(PROTO_VENV)/bin/python $(PIP) install 'grpcio-tools==1.76.0'
	@touch $@

$(UV): | $(UV_VENV)/bin/python
	$(UV_VENV)/bin/python $(PIP) install 'uv==0.13.9'
	@touch $@

$(DOCS): | $(DOCS_VENV)/bin/python
	$(DOCS_VENV)/bin/python $(PIP) install --requirement deploy/site/requirements.txt
	@rm -f $(DOCS_VENV)/installed-*
	@touch $@

$(RELEASE): | $(RELEASE_VENV)/bin/python
	$(RELEASE_VENV)/bin/python $(PIP) install --requirement deploy/release-requirements.txt
	@rm -f $(RELEASE_VENV)/installed-*
	@touch $@

$(CONTROL): | $(CONTROL_VENV)/bin/python
	@rm -rf $(CONTROL_VENV)/installed-* $(CONTROL_VENV)/wheels
	$(CONTROL_VENV)/bin/python $(PIP) wheel --no-deps --wheel-dir $(CONTROL_VENV)/wheels .
	$(CONTROL_VENV)/bin/python $(PIP) install --force-reinstall --no-deps $(CONTROL_VENV)/wheels/*.whl
	$(CONTROL_VENV)/bin/python $(PIP) install "$$(ls $(CONTROL_VENV)/wheels/*.whl)[control]"
	@touch $@

$(VLLM): | $(VLLM_VENV)/bin/python
	@echo "installing vLLM $(VLLM_VERSION) into $(VLLM_VENV) (6 GB; some minutes)"
	$(VLLM_VENV)/bin/python $(PIP) install --requirement tests/vllm/requirements.txt
	$(VLLM_VENV)/bin/python $(PIP) install --no-deps 'vllm==$(VLLM_VERSION)'
	rm -rf crossdock.egg-info
	PYTHONWARNINGS=ignore $(VLLM_VENV)/bin/python $(PIP) install --editable .
	@rm -f $(VLLM_VENV)/installed-*
	@touch $@

$(NEWEST)/vllm: | $(VLLM)
	@echo "unpacking vLLM $(VLLM_NEWEST) into $(NEWEST), without its libraries"
	$(VLLM_VENV)/bin/python $(PIP) download --no-deps --dest $(NEWEST) 'vllm==$(VLLM_NEWEST)'
	$(VLLM_VENV)/bin/python tests/vllm/unpack.py $(NEWEST)

# What `import deepspeed` needs beside torch and what torch brings; its own compiled parts are not built.
$(DEEPSPEED): | $(DEV)
	@rm -rf $@ $@-part
	DS_BUILD_OPS=0 $(PY) $(PIP) install --no-deps --target $@-part $(subst -0,==0,$(notdir $@)) einops hjson msgpack ninja psutil py-cpuinfo
	@mv $@-part $@

$(SGLANG) $(MEGATRON): | $(DEV)
	@rm -rf $@ $@-part
	$(PY) $(PIP) download --no-deps --dest $@-part $$(echo $(notdir $@) | sed 's/-\([0-9]\)/==\1/')
	$(PY) tests/vllm/unpack.py $@-part
	@mv $@-part $@
