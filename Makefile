# Every target makes the virtual environment it needs, once, with nothing but Python and pip.

PYTHON ?= python3
VENV := .venv
LOWEST := .venv-lowest
# More arguments for pytest: make test ARGS="-k claim -x"
ARGS ?=
# Tests wait more than they compute, so there are more processes than cores. A file stays in one:
# its tests share a database. -n 0 runs them in pytest's own process.
PROCESSES ?= -n 4 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-lowest lint format types wheel bench clean

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

quickstart: $(VENV)/installed ## Run the quickstart example
	$(VENV)/bin/python examples/quickstart.py

test: $(VENV)/installed-dev ## Run the tests on every database that is found
	$(VENV)/bin/python -m pytest $(PROCESSES) $(ARGS)

# What goes through SQLAlchemy, Alembic or a driver, once each; the rest would be run twice for nothing.
LOWEST_TESTS := $(addprefix tests/test_,$(addsuffix .py,enqueue_sessions enqueue_many enqueue_notify\
	store_claim store_settle store_chores store_connections statements_moves sqltypes migrations\
	worker_start worker_outcomes payload_load))

test-lowest: $(LOWEST)/installed-dev ## Run the tests with the oldest dependencies that are allowed
	$(LOWEST)/bin/python -m pytest $(PROCESSES) -m "not campaign" $(LOWEST_TESTS) $(ARGS)

lint: $(VENV)/installed-dev ## Check style and formatting
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check

format: $(VENV)/installed-dev ## Repair style and formatting where a program can
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

types: $(VENV)/installed-dev ## Check the types with mypy and pyright
	$(VENV)/bin/mypy
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

wheel: $(VENV)/installed-dev ## Build the packages into dist/
	rm -rf dist
	$(VENV)/bin/python -m build --outdir dist

bench: $(VENV)/installed-dev ## Run the benchmarks
	$(VENV)/bin/python -m benchmarks $(ARGS)

clean: ## Remove everything that was built or installed
	rm -rf $(VENV) $(LOWEST) dist build .hypothesis .mypy_cache .pytest_cache .ruff_cache

# --- virtual environments -------------------------------------------------------------------
# An empty file in the environment says that a step was done; a newer pyproject.toml undoes it.

# pip 25.1 is the first with --group.
%/created:
	$(PYTHON) -m venv $*
	$*/bin/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	touch $@

# The psycopg extra leaves the choice of libpq to the user; the binary runs everywhere.
$(VENV)/installed: pyproject.toml | $(VENV)/created
	$(VENV)/bin/python -m pip install --quiet --editable ".[all]" "psycopg[binary]"
	touch $@

$(VENV)/installed-dev: pyproject.toml | $(VENV)/created
	$(VENV)/bin/python -m pip install --quiet --editable ".[all]" --group dev
	touch $@ $(VENV)/installed

# "name[extra]>=1.2" becomes the constraint "name==1.2".
define LOWER_BOUNDS
import re, tomllib
with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
for requirements in (project["dependencies"], *project["optional-dependencies"].values()):
    for requirement in requirements:
        if bound := re.fullmatch(r"([\w.-]+)(?:\[\w+\])?>=([\w.]+)", requirement):
            print("{}=={}".format(*bound.groups()))
endef
export LOWER_BOUNDS

$(LOWEST)/installed-dev: pyproject.toml | $(LOWEST)/created
	$(LOWEST)/bin/python -c "$$LOWER_BOUNDS" > $(LOWEST)/constraints.txt
	$(LOWEST)/bin/python -m pip install --quiet --editable ".[all]" --group dev \
		--constraint $(LOWEST)/constraints.txt
	touch $@
