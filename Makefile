# `make serve` and `make test` do all their own set-up; both can be the first command on a machine.
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ARGS ?=

# Ray reads these when its processes start. Token: only processes of this account may join the cluster.
RAY_ENV := RAY_AUTH_MODE=token RAY_worker_niceness=0 RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP=0

# llama.cpp is compiled for this CPU. gcc 12 miscompiles its AMX code (illegal instruction at the first
# forward), so AMX is left out wherever the compiler knows it; a pip cache of our own keeps such wheels.
NO_AMX := -mno-amx-tile -mno-amx-int8 -mno-amx-bf16
CPU_FLAGS := $(shell $(CC) $(NO_AMX) -E -x c /dev/null >/dev/null 2>&1 && echo $(NO_AMX))
PIP_ENV := CFLAGS="$(CPU_FLAGS)" CXXFLAGS="$(CPU_FLAGS)" PIP_CACHE_DIR="$(HOME)/.cache/outrider/pip"

.PHONY: serve test check bench soak evidence notebooks clean

$(READY): pyproject.toml
	python3 -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(PIP_ENV) $(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

serve: $(READY)
	$(BIN)/outrider weights pull
	$(RAY_ENV) $(BIN)/serve run serve_app:graph $(ARGS)

test: $(READY)
	$(BIN)/outrider weights pull qwen2.5-coder-0.5b-instruct qwen2.5-coder-1.5b-instruct smollm2-135m-instruct
	$(BIN)/python -m pytest $(ARGS)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest --quiet tests/test_layout.py

soak: $(READY)
	$(BIN)/outrider weights pull smollm2-135m-instruct
	$(BIN)/python -m pytest -m soak -s tests/soak $(ARGS)

bench: $(READY)
	$(BIN)/outrider weights pull
	$(BIN)/python -m serve_app.bench $(ARGS)

# docs/evidence.md: every study, half an hour on two cores
evidence: $(READY)
	$(BIN)/python -m serve_app.bench.evidence docs/evidence.md

notebooks: $(READY)
	cd notebooks && $(CURDIR)/$(BIN)/jupyter execute *.ipynb

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
