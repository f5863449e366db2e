# Needs python3 >= 3.9 with venv, nothing else: tools/lanes.py makes the environments.
PYTHON ?= python3
LANES = $(PYTHON) tools/lanes.py

.PHONY: demo test test-matrix lint wheel

# The main job: a real model's out-of-memory on torch 2.6.0, and the cure.
demo:
	$(LANES) run 2.6 -- python -m torch_dcp_backport verify --plot memory.png

# torch 2.6.0 (patched) and a current torch (does nothing).
test:
	$(LANES) test current 2.6

test-matrix:
	$(LANES) test 2.4 2.5 2.7 current 2.6

lint:
	$(LANES) make 2.6 >/dev/null
	$(LANES) run lint -- ruff check .
	$(LANES) run lint -- ruff format --check .
	$(LANES) run lint -- mypy --python-executable "$$($(LANES) make 2.6)"

# Builds, checks what is inside, installs into a clean environment, and runs from outside the tree.
wheel:
	$(LANES) run lint -- python tools/check_wheel.py
