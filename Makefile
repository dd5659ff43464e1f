# One pinned environment for everything; every target builds what it needs.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.complete

.PHONY: venv run test fuzz chaos lint bench docs tables audit-deps wheel clean

venv: $(STAMP)

# The stamp is written last: an interrupted installation is repeated, a complete one is not.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11, or say make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "ntkfl needs Python 3.11 or newer; $(PYTHON) is older. Say make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "$(PYTHON) lacks venv: apt-get install python3-venv"; exit 1; }
	@echo "building $(VENV): some minutes, most of them for torch"
	$(PYTHON) -m venv --clear $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools wheel
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[dev]'
	@touch $@

run: $(STAMP)
	$(PY) -m ntkfl compare configs/quickstart.toml

test: $(STAMP)
	$(PY) -m pytest -n 3 --no-loadscope-reorder  # real processes wait much: three files at a time on two cores, in the order of tests/conftest.py

# Longer than the slices in `make test`: minutes. What fails is kept in build/fuzz, and said how to try again.
fuzz: $(STAMP)
	$(PY) -m tests.fuzz --cases 200000
	NTKFL_OPENAPI_REQUESTS=250 $(PY) -m pytest -q tests/engine/services/test_openapi.py

# Runs killed 50 times in a row, and at every step of their writing; resumed, they end with the same bytes. Then Ctrl-C in every long verb.
chaos: $(STAMP)
	$(PY) -m tests.chaos --kills 50
	$(PY) -m tests.chaos --every-step
	$(PY) -m tests.chaos --ctrl-c

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: $(STAMP)
	$(PY) -m ntkfl bench

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet
	@echo build/site/index.html

# Tables of README.md and docs/ from the files in results/.
tables: $(STAMP)
	$(PY) docs/tables.py

# Known vulnerabilities of what is pinned, from PyPI's own list; what cannot be looked up there is a failure too.
audit-deps:
	$(PYTHON) -m venv build/audit
	build/audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit==2.10.1
	build/audit/bin/pip-audit -r constraints.txt --no-deps --disable-pip --strict --progress-spinner off

# A wheel, installed with the core alone into an empty environment, trains and reports there.
wheel: $(STAMP)
	rm -rf build/wheel build/core
	$(PY) -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation -w build/wheel .
	$(PYTHON) -m venv build/core
	build/core/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	build/core/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt build/wheel/*.whl
	cd build/core && bin/python -m ntkfl doctor && bin/ntkfl train --dataset digits --clients 20 --clients-per-round 4 \
	  --rounds 2 --out run && bin/ntkfl report run
	@ls -l build/wheel/*.whl

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
