# `make demo`, `make chat` and `make test` are all the set-up there is; they share .venv.
# A stamp file in .venv marks what is installed, so that the second call is quick.
# pip is quiet, so each step that takes long says what it does, and the disk space that it takes
# (`du -sm .venv` after it, with CPython 3.11 and torch for the CPU).

PYTHON ?= python3
VENV   := .venv
# By pip, or by uv where .venv has it (make uv): a tenth of the processor time.
INSTALL := $(VENV)/bin/python tools/install.py

MODELS := $(VENV)/bin/python tools/fetch_models.py

.PHONY: demo chat site uv test test-all quick rest coverage real emulated cluster lint lint-all style types types-all types-elsewhere format release-check notebooks clean

demo: $(VENV)/.stamp-package
	$(VENV)/bin/treadle run --stats --temp 0.4 --repeat-penalty 1.2 --seed 7 "def read_text(path):"
	@echo
	@echo "next, talk with a real model (0.1 GB): make chat. A page, and a server: $(VENV)/bin/treadle serve"

# As the model's card has it, but for the penalty: without one this file's answers run in circles.
chat: $(VENV)/.stamp-package
	@model=$$($(MODELS) smollm2) && \
	exec $(VENV)/bin/treadle chat --temp 0.2 --top-p 0.9 --repeat-penalty 1.1 "$$model"

# The documents as a site, in build/site: read from there without a server and without a network.
# A warning is an error. mkdocs runs from the sources, so their reference is of this checkout.
site: $(VENV)/.stamp-site
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict --quiet
	@echo "open build/site/index.html"

# A process more than cores, but no more than four: tests wait for servers and for emulators, and each
# process takes a gigabyte.
PROCESSES := $(shell $(PYTHON) -c "import os; print(min(4, (os.cpu_count() or 1) + 1))")
# Bytecode is kept, also where the shell says otherwise: tests start many processes, and each would
# compile all of treadle.
PYTEST := PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python -m pytest -n $(PROCESSES) --dist worksteal

# The quick tier (tests/tiers.py): minutes, without torch, a browser or Ray. The type checker, which
# uses one core, runs beside the linters, then beside the tests. With COVERAGE=1, as in .ci/run, lines
# are counted too.
test: $(VENV)/.stamp-test
	@$(MAKE) --no-print-directory -j 2 style types $(if $(COVERAGE),coverage,quick)

quick: $(VENV)/.stamp-test
	TREADLE_TESTS=quick $(PYTEST)

# The rest of the tests, and the types of other systems and of the oldest Python. pip, which uses one
# core, installs what the tests need while the other systems are checked.
test-all: $(VENV)/.stamp-test
	@$(MAKE) --no-print-directory -j 2 rest types-all

rest: $(VENV)/.stamp-dev
	@echo "real models for tests/real, 450 MB once, outside of this folder"
	@$(MODELS) || echo "not fetched: tests/real is skipped, or fails under CI=true"
	TREADLE_TESTS=rest $(PYTEST)

# Whole models, and every kernel test, on emulated CPUs of other kinds, one after the other: hours.
# Every tower and decoder of pictures and sounds on every instruction set of this machine, too.
emulated: $(VENV)/.stamp-dev
	$(VENV)/bin/python tools/fetch_emulators.py --roots
	TREADLE_EMULATED=all $(VENV)/bin/python -m pytest tests/emulated tests/isa/test_emission.py tests/media/test_every_row.py
	$(VENV)/bin/python -m tests.emulated

# Models on a Ray of this machine, in two and four processes, killed and gone on with: minutes.
cluster: $(VENV)/.stamp-dev
	TREADLE_CLUSTER=1 $(VENV)/bin/python -m pytest tests/distributed/cluster

# What takes long on real models: every window of text, token by token, whole contexts: minutes.
real: $(VENV)/.stamp-dev
	$(MODELS)
	TREADLE_REAL=1 $(VENV)/bin/python -m pytest tests/real

# The lines of each package that the quick tier runs, 85 % of each or more: at most an eighth longer than the
# tier alone. Every Python of the run imports tools/count_lines/sitecustomize.py.
LINES := $(VENV)/bin/python -m tools.coverage_by_package

coverage: $(VENV)/.stamp-test
	rm -rf .coverage
	$(LINES) --prepare .coverage
	PYTHONPATH="$(CURDIR)/tools/count_lines$${PYTHONPATH:+:$$PYTHONPATH}" TREADLE_COUNT_LINES=$(CURDIR)/.coverage TREADLE_TESTS=quick $(PYTEST)
	$(LINES) --floor 85 .coverage

lint: style types

lint-all: style types-all

style: $(VENV)/.stamp-test
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/lint-imports

types: $(VENV)/.stamp-test
	$(VENV)/bin/mypy

# With all that `make test-all` installs, and each other system.
types-all: types-elsewhere $(VENV)/.stamp-dev
	$(VENV)/bin/mypy

# What a system lacks, Windows lacks too; the oldest Python is checked with it, as nothing depends on
# both. The files of other systems are in one folder, the only one that asks which system it is on:
# no package outside of it, and no module, is looked into for them.
ELSEWHERE := --no-site-packages --ignore-missing-imports --follow-imports=silent --no-warn-unused-ignores

types-elsewhere: $(VENV)/.stamp-test
	$(VENV)/bin/mypy --platform win32 --python-version 3.10 --no-warn-return-any --no-warn-unused-ignores --cache-dir .mypy_cache/win32 src/treadle
	$(VENV)/bin/mypy --platform darwin $(ELSEWHERE) --cache-dir .mypy_cache/darwin src/treadle/system
	$(VENV)/bin/mypy --platform freebsd14 $(ELSEWHERE) --cache-dir .mypy_cache/freebsd src/treadle/system

# The sdist, the wheel from it, both installed; the workflows and the image's recipe linted.
release-check: $(VENV)/.stamp-release
	$(VENV)/bin/python -m pytest tests/release tests/test_packaging.py tests/tools/test_release.py

# Run the notebooks, and write them with their outputs.
notebooks: $(VENV)/.stamp-notebooks
	$(VENV)/bin/python tools/run_notebooks.py notebooks/*.ipynb

format: $(VENV)/.stamp-test
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

clean:
	rm -rf $(VENV) build dist .coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests tools -name __pycache__ -prune -exec rm -rf {} +

# Debian keeps ensurepip in a package of its own; where it is missing, the outer pip installs pip.
$(VENV)/bin/python:
	@echo "making $(VENV), an environment of its own: 'make clean' removes it"
	$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	$(PYTHON) -m pip --python $(VENV)/bin/python install --quiet pip; }

# For all later installations; without it pip does them.
uv: | $(VENV)/bin/python
	$(VENV)/bin/python -m pip --disable-pip-version-check --quiet --quiet install uv || echo "no uv: pip installs"

# Editable: a change to the sources needs no second install, a change to pyproject.toml does.
$(VENV)/.stamp-package: pyproject.toml | $(VENV)/bin/python
	@echo "installing treadle and what it needs into $(VENV): 375 MB, about half a minute"
	$(INSTALL) --editable ".[pictures,serve]"
	touch $@

$(VENV)/.stamp-site: $(VENV)/.stamp-package
	@echo "installing what builds the site into $(VENV): 60 MB more"
	$(INSTALL) --editable ".[site]"
	touch $@

$(VENV)/.stamp-test: $(VENV)/.stamp-package
	@echo "installing the quick tests' tools into $(VENV): 170 MB more, a minute or two"
	$(INSTALL) --editable ".[test]"
	touch $@

$(VENV)/.stamp-release: $(VENV)/.stamp-test
	$(INSTALL) --editable ".[release]"
	touch $@

$(VENV)/.stamp-notebooks: $(VENV)/.stamp-package
	$(INSTALL) --editable ".[notebooks]"
	touch $@

# torch comes first and alone: where a machine offers a CPU build of this version, pip takes it, and
# transformers is then content with it instead of drawing in the newest build and its GPU libraries.
# Of 17,000 modules that come the tests import a tenth: each is compiled when it is first imported,
# not all of them here, which takes a minute.
$(VENV)/.stamp-dev: $(VENV)/.stamp-test
	@echo "installing the other tests' tools into $(VENV): 1.8 GB more, a few minutes"
	@echo "  torch, the judge of architectures: 750 MB"
	$(INSTALL) torch==2.13.0
	@echo "  transformers, mlx, playwright, ray, wgpu, clients of servers: 1.1 GB"
	$(INSTALL) --editable ".[dev]"
	touch $@
