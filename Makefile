# Everything starts from a fresh machine with Python and make: the first target that needs it sets up .venv.
#
#   make setup        .venv with the pinned dependencies       make demo         train GPT-2 on 8 processes, compare losses
#   make test         lint, types, tests, cost of plans        make verify-all   the whole table of equal numbers
#   make lint types   the parts of it                          make bench        planning, and training beside torch's own
#                                                              make zoo          capture, plan, run and verify a zoo of architectures

PYTHON ?= python3
# Where pip looks for torch beside the default index: on Linux the default wheel carries CUDA, several gigabytes, and the index of
# PyTorch's CPU builds does not. Empty: the default.
TORCH_INDEX ?=

BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: setup lint types unit unit-stages unit-a-to-l unit-m-to-p unit-q-to-z cost test demo verify-all zoo bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "autopar needs Python 3.11 or later; set PYTHON")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --retries 1 $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

lint: $(STAMP)
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

# Side by side: many tests keep one core busy, others wait for processes of their own.
PARTS := unit-stages unit-a-to-l unit-m-to-p unit-q-to-z
unit: $(STAMP)
	$(MAKE) --jobs=4 --output-sync=target $(PARTS)

unit-stages: $(STAMP)
	$(BIN)/python -m pytest -q $(wildcard tests/*/)

unit-a-to-l: $(STAMP)
	$(BIN)/python -m pytest -q $(wildcard tests/test_[a-l]*.py)

unit-m-to-p: $(STAMP)
	$(BIN)/python -m pytest -q $(wildcard tests/test_[m-p]*.py)

unit-q-to-z: $(STAMP)
	$(BIN)/python -m pytest -q $(wildcard tests/test_[q-z]*.py)

cost: $(STAMP)
	$(BIN)/python -m autopar.explain --check baselines/

test: lint types unit cost

demo: $(STAMP)
	$(BIN)/python examples/train_gpt2.py

verify-all: $(STAMP)
	$(BIN)/python benchmarks/verify_all.py

zoo: $(STAMP)
	$(BIN)/python examples/zoo.py

bench: $(STAMP)
	$(BIN)/python benchmarks/planning.py
	$(BIN)/python benchmarks/training.py --memory --save --variants ddp,torch-ddp,torch-ddp-whole,fsdp,torch-fsdp,megatron,torch-tp,auto,random0,random1

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
