# Everything starts from a fresh machine with Python and make: the first target that needs it sets up .venv.
#
#   make setup        .venv with the pinned dependencies       make demo         train GPT-2 on 8 processes, compare losses
#   make test         lint, types, tests, cost of plans        make verify-all   the whole table of equal numbers
#   make lint types   the parts of it                          make bench        planning, and training beside torch's own
#   make docs         the documentation, docs/_build/html      make zoo          capture, plan, run and verify a zoo of architectures
#   make thorough     further cases of the tests               make cuda         tests that need a GPU
#   make fuzz         random graphs under random plans         make fidelity     predictions beside published measurements

PYTHON ?= python3
# Where pip looks for torch beside the default index: on Linux the default wheel carries CUDA, several gigabytes, and the index of
# PyTorch's CPU builds does not. Empty: the default.
TORCH_INDEX ?=

BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: setup lint types unit unit-operators unit-programs unit-planning cost docs test thorough demo verify-all fuzz zoo hub fidelity bench cuda clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "autopar needs Python 3.11 or later; set PYTHON")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --retries 1 $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,docs]'
	touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# Side by side: many tests keep one core busy, others wait for processes of their own. Each part is the tests of these rooms, about
# as long as the others; each process of a part imports torch, starts one pool of workers, and captures equal models once, so that
# there are few.
# Ranks that are threads or processes compute on one thread each: with more, those of torch and BLAS wait for each other busily.
PARTS := unit-operators unit-programs unit-planning
unit $(PARTS) thorough cost: export OMP_NUM_THREADS := 1
# They run on the CPU where there are GPUs, too.
unit $(PARTS) thorough cost: export CUDA_VISIBLE_DEVICES :=
unit: $(STAMP)
	$(MAKE) --jobs=3 --output-sync=target $(PARTS)

OPERATORS := operators codegen runtime explain simulator
unit-operators: $(STAMP)
	$(BIN)/python -m pytest -q $(OPERATORS:%=tests/%)

PROGRAMS := ir capture passes analysis search_space cost_models formulation pipeline plan benchmarks
USERS := docs allocate integrations elastic cuda
unit-programs: $(STAMP)
	$(BIN)/python -m pytest -q --doctest-modules autopar tests/test_*.py $(PROGRAMS:%=tests/%) $(USERS:%=tests/%)

PLANNING := planning verify fuzz memory solver
unit-planning: $(STAMP)
	$(BIN)/python -m pytest -q $(PLANNING:%=tests/%)

cost: $(STAMP)
	$(BIN)/python -m autopar.explain --check baselines/

# Warnings are errors: a link that leads nowhere, a page that no other page shows, a docstring that cannot be read.
docs: $(STAMP)
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --builder html docs docs/_build/html

# Side by side, the long ones first: beside the parts of `unit` run, one after another, mypy, the costs and Sphinx.
test: $(STAMP)
	$(MAKE) --jobs=4 --output-sync=target lint $(PARTS) types cost docs

# The cases that `make test` leaves out: of a law, or of a table of models and plans, it runs a sample.
# And the baselines that take longest to plan.
thorough: $(STAMP)
	$(BIN)/python -m pytest -q -m thorough
	$(BIN)/python -m autopar.explain --check baselines/thorough/

# What needs a GPU, with a Python whose torch has CUDA: `make cuda CUDA_PYTHON=python3`. Workers are forked: by NVML torch counts GPUs
# without CUDA, which serves no fork once it is initialised.
CUDA_PYTHON ?= $(BIN)/python
cuda:
	PYTORCH_NVML_BASED_CUDA_CHECK=1 $(CUDA_PYTHON) -m pytest -q -m gpu tests/cuda

demo: $(STAMP)
	$(BIN)/python examples/train_gpt2.py

verify-all: $(STAMP)
	$(BIN)/python benchmarks/verify_all.py

# Seeds are printed; a failure is shrunk to a script that repeats it. About two minutes.
SEED ?= 0
PAIRS ?= 250
fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz --seed $(SEED) --pairs $(PAIRS)

zoo: $(STAMP)
	$(BIN)/python examples/zoo.py

# The architectures of transformers; goes on where it was stopped (build/hub.jsonl). About an hour.
hub: $(STAMP)
	$(BIN)/python benchmarks/hub.py --save

fidelity: $(STAMP)
	$(BIN)/python -m benchmarks.fidelity --save

bench: $(STAMP)
	$(BIN)/python benchmarks/pipeline_step.py --save
	$(BIN)/python benchmarks/planning.py
	$(BIN)/python benchmarks/training.py --memory --save --variants ddp,torch-ddp,torch-ddp-whole,fsdp,torch-fsdp,megatron,torch-tp,auto,random0,random1

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis docs/_build *.egg-info
