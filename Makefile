# setup, demo, test, lint and clean are for everyone; test-cluster, chaos, requirements, picture and results for who works on podtune
PYTHON ?=
VENV := .venv
BIN := $(VENV)/bin
DEMO_DIR ?= demo
DEMO_ARGS ?=

# Where a machine forbids byte code (PYTHONDONTWRITEBYTECODE), every start of a program would compile torch, transformers
# and trl again: 13 s in place of 5
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo test test-cluster test-gpu chaos lint clean requirements picture results

setup:
	@if [ -n "$(PYTHON)" ]; then py="$(PYTHON)"; else \
	  for py in python3.11 python3.12 python3.13 python3; do \
	    $$py -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12), (3, 13)))' 2>/dev/null && break; py=; done; fi; \
	if [ -z "$$py" ]; then echo "make setup: needs Python 3.11, 3.12 or 3.13 on PATH (or PYTHON=/path/to/python)" >&2; exit 69; fi; \
	$$py scripts/setup_venv.py $(VENV)

demo: setup
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python scripts/demo.py --output $(DEMO_DIR) $(DEMO_ARGS)

# A file's tests share what they start, so that files are what is dealt out, in the order of tests/conftest.py
test: setup
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=25

test-cluster: setup
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest tests/cluster/real -m cluster -v

test-gpu: setup
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest tests/gpu -m gpu -v $(GPU_ARGS)

# 200 kills and 20,000 damaged files in about six minutes on two cores; PODTUNE_CHAOS_SEED=2 for others
chaos: setup
	@PATH="$(CURDIR)/$(BIN):$$PATH" PODTUNE_CHAOS_KILLS=$${PODTUNE_CHAOS_KILLS:-200} \
	  PODTUNE_CHAOS_CASES=$${PODTUNE_CHAOS_CASES:-20000} $(BIN)/python -m pytest tests/chaos -v --timeout 3600

lint: setup
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh scripts/lint.sh

requirements: setup
	$(BIN)/uv pip compile --universal --python-version 3.11 --all-extras --generate-hashes --no-emit-index-url \
	  --no-annotate --custom-compile-command "make requirements" $(UPGRADE) -o requirements.txt pyproject.toml

picture: setup
	@$(BIN)/python scripts/compare_picture.py $(DEMO_DIR)

# Measured outside docs/, so that the commit in the records is of a clean checkout
results: setup
	@rm -rf work/smoke-cpu
	@PATH="$(CURDIR)/$(BIN):$$PATH" podtune bench run --preset smoke --output work/smoke-cpu
	@rm -rf docs/results/smoke-cpu
	@for file in $$(cd work/smoke-cpu && find . -name run.json -o -name sweep.json); do \
	  install -D -m 644 work/smoke-cpu/$$file docs/results/smoke-cpu/$$file || exit; done
	@$(BIN)/podtune bench report docs/results/smoke-cpu
	@rm docs/results/smoke-cpu/report.html

clean:
	rm -rf $(DEMO_DIR) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -type d -prune -exec rm -rf {} +
	@if [ "$(ALL)" = 1 ]; then rm -rf $(VENV); fi
