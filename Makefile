# Each target does its own set-up in .venv and is quick the second time.
#
#   make demo       a small random model, prefill, steps
#   make test       every test             (PYTEST_ARGS="-k name" to choose)
#   make test-vulkan tests/test_device.py on a GPU: Mesa's software Vulkan (tools/vulkan.sh)
#   make bench      the benchmarks, and docs/performance.md from them
#   make lint       ruff, mypy, clang-format: changes nothing
#   make format     ruff and clang-format: rewrites
#   make sanitize   the boundary and parity tests under AddressSanitizer and UBSan
#   make dist-check sdist, a wheel from it alone, that wheel in a fresh environment
#   make wheel      a wheel for any Linux of these last years, one x86-64 level after the other
#   make test-wheel that wheel in a bare environment and under emulated CPUs   (installs qemu-user)
#   make lib        compile csrc alone, after a change
#   make clean      remove all that the others made

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

# Random programs take 100 s there, and two groups of threads that spin take long.
SANITIZE_TESTS := tests -m sanitize --deselect tests/test_state.py::test_random_programs \
	--deselect tests/test_batch.py::test_two_threads_with_overlapping_groups
TYPED          := pyggml_slowar setup.py $(wildcard tests benchmarks examples)
CSRC            = $(wildcard csrc/*.h csrc/*.cpp csrc/*/*.c csrc/reference/*.h csrc/reference/*.cpp)

DIST        := build/dist
WHEEL       := build/wheel
PIP_INSTALL := $(BIN)/python -m pip install -q --disable-pip-version-check

# Where setup.py builds.
TREE = build/$(shell $(BIN)/python -c 'import sysconfig; print(sysconfig.get_platform())')

.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: demo test test-vulkan bench lint format sanitize dist-check wheel test-wheel lib clean

demo: lib
	$(BIN)/python examples/demo.py

test: $(VENV)/.test lib
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-vulkan: $(VENV)/.test lib
	tools/vulkan.sh $(TREE) python -m pytest tests/test_device.py $(PYTEST_ARGS)

bench: $(VENV)/.bench lib
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/performance.py

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(TYPED)
	$(BIN)/clang-format --dry-run -Werror $(CSRC)

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CSRC)

# The runtimes must be in the process before Python is. Its own leaks are not our subject. Two tests at a time: one
# leaves the processors idle for a third of the time.
sanitize: $(VENV)/.test lib
	$(BIN)/python setup.py -q libslowar --inplace --sanitize
	LD_PRELOAD="$$(for so in libasan.so libubsan.so libstdc++.so.6; do $${CXX:-c++} -print-file-name=$$so; done | tr '\n' ' ')" \
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:abort_on_error=1 \
	UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
	SLOWAR_LIBRARY="$(CURDIR)/$(TREE)/asan/libslowar.so" \
	$(BIN)/python -m pytest -n 2 $(SANITIZE_TESTS) $(PYTEST_ARGS)

# TMPDIR: where the sdist is unpacked and the wheel built from it, so nothing else is within reach.
dist-check: $(VENV)/.test
	rm -rf $(DIST)
	mkdir -p "$(DIST)/schräge Größe"
	TMPDIR="$(CURDIR)/$(DIST)/schräge Größe" $(BIN)/python -m build --outdir $(DIST) .
	rm -rf "$(DIST)/schräge Größe"
	$(PYTHON) -m venv $(DIST)/venv
	$(DIST)/venv/bin/python -m pip install -q --disable-pip-version-check $(DIST)/*-py3-none-*.whl
	cd $(DIST) && venv/bin/slowar devices

# Not isolated: another release of CMake would compile all of ggml again, three times.
wheel: $(VENV)/.wheel
	rm -rf $(WHEEL)
	SLOWAR_LEVELS="x86-64-v2 x86-64-v3 x86-64-v4" \
	$(BIN)/python -m build --wheel --no-isolation --skip-dependency-check --outdir $(WHEEL)/raw .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --strip --wheel-dir $(WHEEL) $(WHEEL)/raw/*.whl
	$(BIN)/auditwheel show $(WHEEL)/*.whl
	$(BIN)/python -m pytest -q tests/check_wheel.py

test-wheel: wheel
	@command -v qemu-x86_64 >/dev/null || { test "$$(id -u)" = 0 && apt-get -q update && apt-get -q install -y qemu-user; } || \
	{ echo "make test-wheel: qemu-x86_64 is needed: apt-get install qemu-user, as root" >&2; exit 1; }
	$(BIN)/python -m pytest -q tests/check_wheel_runs.py

lib: $(VENV)/.installed
	$(BIN)/python setup.py -q libslowar --inplace

clean:
	rm -rf build dist $(VENV) *.egg-info pyggml_slowar/libslowar* pyggml_slowar/_declarations.py pyggml_slowar/licenses

# Set-up. A stamp says that the install of that name is newer than what describes it; the larger
# installs contain the smaller ones.

$(BIN)/python:
	$(PYTHON) -m venv --clear $(VENV)

$(VENV)/.installed: pyproject.toml setup.py | $(BIN)/python
	$(PIP_INSTALL) -e '.[native]'
	touch $@

$(VENV)/.test: pyproject.toml setup.py | $(BIN)/python
	$(PIP_INSTALL) -e '.[test]'
	touch $(VENV)/.installed $@

$(VENV)/.wheel: pyproject.toml setup.py | $(BIN)/python
	$(PIP_INSTALL) -e '.[test,wheel]'
	touch $(VENV)/.installed $(VENV)/.test $@

$(VENV)/.bench: pyproject.toml setup.py | $(BIN)/python
	$(PIP_INSTALL) -e '.[native,bench]'
	touch $(VENV)/.installed $@

$(VENV)/.lint: pyproject.toml setup.py | $(BIN)/python
	$(PIP_INSTALL) -e '.[lint,test]'
	touch $(VENV)/.installed $(VENV)/.test $@
