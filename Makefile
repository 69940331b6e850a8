# make demo     train a small model on real handwritten digits, save it and restore it
# make examples train a GPT, a Vision Transformer and an LSTM, each in a minute or two
# make test     run the tests
# make lint     lint, formatting and types
# make check    the same, and the tests and doctests with a coverage report
# make docs     build the guides and the API reference as HTML, in build/docs
# make bench    time nnxlib beside raw JAX and its peers
#
# Each makes its own virtual environment under .venv/ and installs what it needs; a second call is quick. Options:
#   PYTHON=python3.13                          another interpreter (3.11 or newer)
#   JAX=oldest                                 the oldest supported version of each dependency
#   JAX="jax==0.9.2 jaxlib==0.9.2"             any other version; flax, which ties the version of JAX, is then left out
#   ARGS="-k graph"                            further arguments for pytest, the demo, Sphinx or the benchmark

PYTHON ?= python3
JAX ?=
ARGS ?=

.DEFAULT_GOAL := test
.PHONY: demo examples test environment lint check docs bench clean
.DELETE_ON_ERROR:
.SECONDARY:

space := $(subst ,, )
version := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
which_jax := $(if $(JAX),-$(subst ==,,$(subst $(space),-,$(strip $(JAX)))))
test_extra := $(if $(JAX),test-without-flax,test)

lower_bounds := import tomllib; \
	print(*(line.replace(">=", "==") for line in tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]))
pins = $(if $(filter oldest,$(JAX)),$(shell $(PYTHON) -c '$(lower_bounds)'),$(JAX))

# The virtual environment of an extra, and the stamp that says it is complete.
env = .venv/$(version)-$(1)$(which_jax)
export JAX_PLATFORMS ?= cpu
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

.venv/$(version)-%$(which_jax)/.installed: pyproject.toml
	@test -n "$(version)" || { echo "$(PYTHON) does not run; name another interpreter, such as make PYTHON=/usr/bin/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit("nnxlib needs Python 3.11 or newer, this is $(version): say make PYTHON=python3.13" \
		if sys.version_info < (3, 11) else 0)'
	@echo "making $(@D), once; this takes about a minute"
	@$(PYTHON) -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install --quiet --editable '.[$*]' $(pins)
	@touch $@

demo: $(call env,demo)/.installed
	$(<D)/bin/python docs/examples/digits.py $(ARGS)

examples: $(call env,demo)/.installed
	for name in gpt vit lstm; do $(<D)/bin/python docs/examples/$$name.py || exit 1; done

test: $(call env,$(test_extra))/.installed
	$(<D)/bin/python -m pytest --numprocesses=auto --maxprocesses=8 $(ARGS)

# Only the environment of the tests: for a machine that wants to know whether it can be made.
environment: $(call env,$(test_extra))/.installed

lint: $(call env,dev)/.installed
	$(<D)/bin/ruff check .
	$(<D)/bin/ruff format --check .
	$(<D)/bin/pyright --pythonpath $(<D)/bin/python
	$(<D)/bin/mypy --follow-imports=silent --warn-unused-ignores tests/typed_program.py
	$(<D)/bin/pyrefly check --python-interpreter-path $(<D)/bin/python tests/typed_program.py tests/typed_flax_program.py

check: $(call env,dev)/.installed lint
	$(<D)/bin/coverage erase
	$(<D)/bin/coverage run -m pytest --numprocesses=auto --maxprocesses=8 $(ARGS)
	$(<D)/bin/coverage combine --quiet
	$(<D)/bin/coverage report

# Warnings, among them references to what is not there, are errors.
docs: $(call env,docs)/.installed
	$(<D)/bin/python -m sphinx --fail-on-warning --keep-going --nitpicky $(ARGS) docs build/docs

bench: $(call env,bench)/.installed
	for name in dispatch train few compile layers structure eager memory imports; do \
		$(<D)/bin/python -m benchmarks.$$name $(or $(ARGS),--results benchmarks/results) || exit 1; \
	done

clean:
	rm -rf .venv demo_output gpt_output lstm_output vit_output .coverage .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist
