# Every target installs what it needs and nothing else, from the locked files in requirements/ with their hashes checked.
PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip --disable-pip-version-check install --quiet
LOCKED := $(PIP) --no-deps --require-hashes -r

.PHONY: venv run test test-long test-browser fuzz chaos lint bench docs tables leaks audit-deps lock try wheel release clean

# -- Environments: a stamp each, written last, so that an interrupted installation is repeated and a complete one is not --

$(VENV)/.made:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11, or say make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "ntkfl needs Python 3.11 or newer; $(PYTHON) is older. Say make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "$(PYTHON) lacks venv: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.run: $(VENV)/.made requirements/run.txt requirements/torch.txt pyproject.toml experiments/pyproject.toml
	@echo "installing what running needs into $(VENV): about a minute, most of it for torch"
	$(LOCKED) requirements/run.txt
	$(PIP) -r requirements/torch.txt
	$(PIP) --no-deps --no-build-isolation -e . -e experiments
	@touch $@

$(VENV)/.%: requirements/%.txt $(VENV)/.run
	$(LOCKED) $<
	@touch $@

.PRECIOUS: $(VENV)/.%

venv: $(VENV)/.run $(VENV)/.test $(VENV)/.lint

# -- What people call -----------------------------------------------------------------------------------------------------

run: $(VENV)/.run
	$(PY) -m ntkfl compare configs/quickstart.toml

# Real processes wait much: three files at a time on two cores, in the order of tests/conftest.py.
test: $(VENV)/.test
	$(PY) -m pytest -n 3 --no-loadscope-reorder

# The long sweeps of which `make test` has a slice: whole deployments, kills, fuzzing.
test-long: $(VENV)/.test $(VENV)/.simulation
	$(PY) -m pytest -n 2 --no-loadscope-reorder -m long
	$(MAKE) fuzz

# Pages in headless Chromium, which the system's package manager has.
test-browser: $(VENV)/.test $(VENV)/.browser
	@command -v chromium || command -v chromium-browser || command -v google-chrome || { echo "Chromium not found: apt-get install chromium"; exit 1; }
	$(PY) -m pytest tests/report -m browser

# Inputs changed at random for every decoder and parser.
fuzz: $(VENV)/.test
	NTKFL_FUZZ_CASES=2000 $(PY) -m pytest -q tests/test_fuzz.py

# Runs killed at every step of their writing and resumed, which end with the same bytes; disks without room.
chaos: $(VENV)/.test
	$(PY) -m pytest -q -m "long or not long" tests/test_chaos.py

lint: $(VENV)/.lint
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) tools/budget.py

bench: $(VENV)/.test
	$(PY) -m ntkfl bench

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet
	@echo build/site/index.html

# What each method leaks: for a table of docs/audit.md. Some minutes on two cores.
leaks: $(VENV)/.test
	for sent in rows cp sums secure-sums private-sums; do \
	  $(PY) -m ntkfl audit --config configs/audit/$$sent.toml --round 10 --json > results/audit/$$sent.json || exit 1; done

# Tables of README.md and docs/, and the README's picture, from the files in results/.
tables: $(VENV)/.run
	$(PY) docs/tables.py

# -- What releases are made of --------------------------------------------------------------------------------------------

# Resolve all requirements anew; make lock UPGRADE=--upgrade takes newer releases too.
lock:
	$(PYTHON) -m venv build/uv
	build/uv/bin/python -m pip --disable-pip-version-check install --quiet uv==0.12.24
	sh requirements/lock.sh build/uv/bin/uv $(UPGRADE)

# A fresh environment of $(PYTHON) trains: nothing that was installed by hand can hide a missing step.
try:
	rm -rf build/try
	$(MAKE) --no-print-directory VENV=build/try/venv build/try/venv/.run
	cd build/try && NTKFL_DATA= venv/bin/ntkfl train --dataset digits --clients 20 \
	  --clients-per-round 4 --rounds 3 --out run && venv/bin/ntkfl report run

# Known vulnerabilities of what is pinned, from PyPI's own list; what cannot be looked up there is a failure too.
audit-deps:
	$(PYTHON) -m venv build/audit
	build/audit/bin/python -m pip --disable-pip-version-check install --quiet pip-audit==2.10.1
	for part in run services test simulation lint docs browser; do \
	  build/audit/bin/pip-audit -r requirements/$$part.txt --no-deps --disable-pip --strict --progress-spinner off || exit 1; done

# A wheel, installed with the core alone into an empty environment, trains and reports there.
wheel: $(VENV)/.run
	rm -rf build/wheel build/core
	$(PY) -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation -w build/wheel .
	$(PYTHON) -m venv build/core
	build/core/bin/python -m pip --disable-pip-version-check install --quiet -r requirements/torch.txt
	build/core/bin/python -m pip --disable-pip-version-check install --quiet build/wheel/*.whl
	cd build/core && bin/python -m ntkfl train --dataset digits --clients 20 --clients-per-round 4 \
	  --rounds 2 --out run && bin/ntkfl report run
	@ls -l build/wheel/*.whl

# What would be uploaded: source archives and wheels of both packages, and the library installed from the archive and from
# the repository's address, each into an empty environment.
release: wheel
	rm -rf build/release && mkdir -p build/release
	for package in . experiments; do \
	  (cd $$package && $(abspath $(PY)) -c "import sys; from setuptools.build_meta import build_sdist as b; b(sys.argv[1])" $(abspath build/release) >/dev/null) || exit 1; done
	$(PY) -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation -w build/release build/release/*.tar.gz
	build/core/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --force-reinstall "git+file://$(CURDIR)"
	cd build/core && bin/ntkfl --version
	build/core/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --force-reinstall build/release/*.whl
	cd build/core && rm -rf trial && bin/ntkfl new trial && cd trial && ../bin/ntkfl train --config config.toml --rounds 2
	@ls -l build/release

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
