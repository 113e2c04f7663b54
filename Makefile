# make demo and make test set up all they need (a virtual environment in .venv, the native build), then run.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip -qq
NATIVE := CMakeLists.txt $(wildcard csrc/*.cpp csrc/*.h csrc/tests/*.cpp csrc/tests/*.h)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test lint unit sanitize neon bench format stub clean
.DELETE_ON_ERROR:

demo: $(VENV)/.built
	$(BIN)/python examples/demo.py

test: lint unit sanitize

unit: $(VENV)/.built $(VENV)/.tools
	$(BIN)/python -m pytest

lint: $(VENV)/.built $(VENV)/.tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror csrc/*.cpp csrc/*.h csrc/tests/*.cpp csrc/tests/*.h
	$(BIN)/mypy

# The native tests, once with the address and undefined-behaviour sanitizers and once with the thread sanitizer.
sanitize: $(VENV)/.built
	PATH="$(abspath $(BIN)):$$PATH" sh csrc/tests/sanitize.sh

# The native tests on ARM64, in emulation. Needs aarch64-linux-gnu-g++ and qemu-aarch64-static.
neon: $(VENV)/.built
	$(BIN)/cmake -S . -B build/neon -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DCMAKE_SYSTEM_NAME=Linux \
		-DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_EXE_LINKER_FLAGS=-static \
		-DMAGICPIG_PYTHON=OFF -DMAGICPIG_TESTS=ON
	$(BIN)/ninja -C build/neon
	for test in native_test scan_test linear_test prompt_test step_test; do MAGICPIG_TEST_ISA=neon qemu-aarch64-static build/neon/$$test || exit 1; done

bench: $(VENV)/.built
	$(BIN)/python benchmarks/kernels.py $(BENCH_ARGS)

format: $(VENV)/.tools
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i csrc/*.cpp csrc/*.h csrc/tests/*.cpp csrc/tests/*.h

stub: $(VENV)/.built
	$(BIN)/python -m nanobind.stubgen -q -m magicpig._native -o src/magicpig/_native.pyi

clean:
	rm -rf $(VENV) build

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "magicpig needs Python 3.10 or later: make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "setting up $(VENV): packages (torch is the large one) and the native build; once, a minute or two"
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt scikit-build-core nanobind cmake ninja
	$(PIP) install -c constraints.txt --no-build-isolation -e .
	@touch $@

$(VENV)/.built: $(VENV)/.ready $(NATIVE)
	$(PIP) install --no-build-isolation --no-deps -e .
	@touch $@

# What tests and linters need besides; the demo does without.
$(VENV)/.tools: $(VENV)/.ready
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@
