# `make` alone says what there is.

venv := .venv
python := $(venv)/bin/python
installed := $(venv)/installed
versions := .venv-versions
# The environment of `make test` where it is there, else a small one of its own.
demo := $(if $(wildcard $(installed)),$(venv),.venv-demo)
# Where there is no PyTorch: the tested one, for CPUs alone unless pip was told where to look.
torch = $(shell python3 -c 'import torch' 2>&- || { echo --constraint .ci/constraints.txt; \
	python3 -m pip config list | grep -q index-url || echo --extra-index-url https://download.pytorch.org/whl/cpu; })

# Thousands of processes start; each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

# The table in launchers/README.md: a file, and the command that writes it.
row := ^\| \[([a-z_]+\.sh)\].*`distman (launch .*)` \|$$

.PHONY: help demo check test gpu test-versions wheels lint docs launchers man clean

help:  ## Say what there is.
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

demo: $(demo)/installed  ## Train a small model on two processes.
	$(demo)/bin/distman run -n 2 docs/examples/digits.py
	@echo "That was docs/examples/digits.py on two processes, started by distman run."
	@echo "To go on: . $(demo)/bin/activate, then distman run -n 2 YOUR_SCRIPT.py."
	@echo "The same file, unchanged, runs with python, torchrun, mpirun or mpiexec, and srun."

check: lint  ## Check the style, and run the unit tests.
	$(python) -m pytest -m unit --numprocesses=2 --dist=worksteal

test: $(installed)  ## Check the style, build the documentation, run all tests.
	$(MAKE) --jobs=2 --output-sync lint docs  # each keeps one core busy
	$(python) -m pytest --numprocesses=4 --dist=worksteal

test-versions:  ## Run the tests that need no launcher with every torch, or those in ARGUMENTS.
	python3 -m tests.versions $(ARGUMENTS)

gpu:  ## Run what needs GPUs, and write a report on it, gpu-report.md.
	$(if $(wildcard $(python)),$(python),python3) -m tests.gpu_report

wheels:  ## Build the distributions in dist/, and test the wheel with each Python and the newest torch.
	.ci/wheels

lint: $(installed)  ## Check formatting, style, types, layers and spelling.
	$(venv)/bin/ruff check
	$(venv)/bin/ruff format --check
	$(venv)/bin/mypy
	$(venv)/bin/lint-imports --no-logo
	$(venv)/bin/codespell

docs: $(installed)  ## Build the documentation in docs/_build; a warning is an error.
	test ! -e docs/conf.py || $(python) -m sphinx -W --keep-going -q -b html docs docs/_build

launchers: $(installed)  ## Write the job scripts in launchers/ again.
	cd launchers && sed -nE 's/$(row)/\2 --force --output \1/p' README.md | xargs -L 1 ../$(venv)/bin/distman

man: $(installed)  ## Write the manual page docs/distman.1 again.
	$(python) -m tests.cli.man_page > docs/distman.1

clean:  ## Remove everything that was built or installed.
	rm -rf $(venv) .venv-demo $(versions) .venv-wheels build dist docs/_build *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

.venv-demo/installed: setup.cfg
	@echo "Installing what the demo needs into .venv-demo: scikit-learn, NumPy, and PyTorch, unless it is installed already."
	@echo "PyTorch for CPUs has 200 MB, and 3 GB where only the build for GPUs can be had."
	python3 -m venv --system-site-packages .venv-demo
	.venv-demo/bin/python -m pip install $(torch) --editable . scikit-learn
	touch $@

$(installed): setup.cfg pyproject.toml .ci/constraints.txt
	test -x $(python) || python3 -m venv $(venv)
	$(python) -m pip install --quiet --constraint .ci/constraints.txt --editable '.[dev]'
	touch $@
