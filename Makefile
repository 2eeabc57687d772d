# Many Ranks. `make help` lists the targets. Needs GNU make 4 and Python 3.10 to 3.13; everything else goes into .venv.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules
.DEFAULT_GOAL := help

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHONUNBUFFERED := 1

# make book STRICT=1          warnings are errors
# make test PYTEST_ARGS=...   passed on to pytest
# make refresh NB=...         one notebook, by number or name; also for export
# make serve PORT=8000
STRICT ?=
PYTEST_ARGS ?=
NB ?=
PORT ?= 8000
JOBS ?= 2
CELL_TIMEOUT := 120

.PHONY: help
help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# ------------------------------------------------------------------------------------------------ set-up

.PHONY: setup
setup: $(STAMP)  ## create .venv with the pinned packages and manyranks (editable)

$(STAMP): requirements.txt pyproject.toml
	@if [ ! -x $(PY) ]; then
		found=
		for oldest in 11 10; do  # 3.10 if there is nothing newer: the book's theme has no current release for it
			for candidate in $${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
				if "$$candidate" -c "import sys; sys.exit(not (3, $$oldest) <= sys.version_info[:2] <= (3, 13))" \
					2>/dev/null; then
					found=$$candidate
					break 2
				fi
			done
		done
		if [ -z "$$found" ]; then
			echo "Many Ranks needs Python 3.10, 3.11, 3.12 or 3.13; found $$(python3 --version 2>&1 || echo none)." >&2
			echo "Install one, or name it: make setup PYTHON=/path/to/python3.12" >&2
			exit 1
		fi
		echo "Creating $(VENV) with $$("$$found" --version)"
		if ! "$$found" -m venv $(VENV); then
			rm -rf $(VENV)
			echo "Python's venv module is not complete; on Debian and Ubuntu: apt-get install python3-venv" >&2
			exit 1
		fi
	fi
	echo "Installing the pinned packages (a few minutes the first time)"
	$(PY) -m pip install --requirement requirements.txt
	$(PY) -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# ------------------------------------------------------------------------------------------------ the book

.PHONY: book
book: setup  ## build the book into _build/html (incremental)
	@$(PY) tools/assets.py
	$(PY) tools/build.py $(if $(STRICT),--strict)

.PHONY: pdf
pdf: book  ## print the whole book into _build/html/many-ranks.pdf (needs Chromium)
	@$(PY) tools/pdf.py

.PHONY: serve
serve: book  ## build, then serve the book on this machine
	@echo "http://localhost:$(PORT)  (Ctrl-C ends it)"
	$(PY) -m http.server $(PORT) --bind localhost --directory _build/html

.PHONY: export
export: setup  ## write manyranks/<concept>.py from the chapters' exported cells
	@$(PY) tools/export.py $(NB)

.PHONY: refresh
refresh: setup  ## run the chapters and store their outputs
	@$(PY) tools/refresh.py $(NB)

.PHONY: student
student: setup  ## copies of the chapters without solutions, in _build/student
	@$(PY) tools/student.py

# ------------------------------------------------------------------------------------------------ tests

# Both suites run even if the first fails. pytest's status 5 means that nothing was there to collect.
.PHONY: test
test: book  ## build the book, then run every test: notebooks, package, labs, grader, site
	@status=0
	echo "Every notebook again, compared with its stored outputs"
	if compgen -G 'chapters/*.ipynb' >/dev/null; then
		$(PY) -m pytest chapters --nbval --nbval-current-env --nbval-sanitize-with=tests/nbval_sanitize.cfg \
			--nbval-cell-timeout=$(CELL_TIMEOUT) -n $(JOBS) --dist loadfile $(PYTEST_ARGS) || status=$$?
	fi
	echo "The package, the labs and the grader; beside them the built site and Colab's rehearsal, printed afterwards"
	beside="tests/site tests/test_colab.py"
	$(PY) -m pytest $$beside --durations=10 $(PYTEST_ARGS) >_build/site_tests.log 2>&1 & site=$$!
	$(PY) -m pytest tests $${beside//tests/--ignore=tests} --durations=10 $(PYTEST_ARGS) || status=$$?
	wait $$site || status=$$?
	cat _build/site_tests.log
	exit $$status

.PHONY: test-fast
test-fast: setup  ## the tests that need neither the built book nor much time
	@$(PY) -m pytest tests --ignore=tests/site -m "not slow" $(PYTEST_ARGS)

.PHONY: bench
bench: setup  ## run the benchmarks
	@$(PY) -m benchmarks
	$(PY) -m benchmarks.site

.PHONY: lint
lint: setup  ## ruff's rules, on Python files and notebooks
	@$(PY) -m ruff check .

# ------------------------------------------------------------------------------------------------ upkeep

# CUDA's own packages stay out: pip adds those that the machine's torch wheel asks for, and a CPU wheel asks for none.
.PHONY: lock
lock: setup  ## resolve requirements.in into requirements.txt (needs uv on the PATH)
	@command -v uv >/dev/null || { echo "make lock needs uv: pip install uv" >&2; exit 1; }
	{
		echo "# Made by \`make lock\` from requirements.in; Python 3.10 to 3.13, Linux and macOS."
		uv pip compile requirements.in --universal --python-version 3.10 --no-header --no-annotate --quiet \
			| grep -vE '^(cuda-|nvidia-|triton)'
		echo "-e .  # the package itself, from this checkout"
	} > requirements.txt.new
	mv requirements.txt.new requirements.txt

.PHONY: clean
clean:  ## remove everything that was built (not .venv)
	@rm -rf _build build manyranks.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
