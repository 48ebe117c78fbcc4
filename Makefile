# Each target makes the virtual environment it needs; PYTHON=... chooses the interpreter.
export PYTHON

.PHONY: help demo test oracle lint docs fuzz soak clean

help: ## Show the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile | expand -t 10

demo: ## Plain and speculative decoding side by side, on the demo model
	@scripts/demo

test: ## The test suite (ARGS=... goes to pytest)
	@scripts/test $(ARGS)

oracle: ## The tests against torch and transformers
	@scripts/oracle $(ARGS)

lint: ## Lint, format, types, documents
	@scripts/check

docs: ## Write the generated documents
	@scripts/venv .venv-test test
	@.venv-test/bin/python scripts/make_cli_docs.py

fuzz: ## Fuzz the server with REQUESTS (1000) requests made from its schema
	@scripts/venv .venv-fuzz fuzz
	@.venv-fuzz/bin/python scripts/soak/server_fuzz.py --requests $(or $(REQUESTS),1000)

soak: ## Compare speculative with plain decoding at random for MINUTES (10)
	@scripts/venv .venv-test test
	@.venv-test/bin/python scripts/soak/soak.py --minutes $(or $(MINUTES),10) --output soak.json

clean: ## Remove what these targets made: their environments (.venv-*) and caches
	rm -rf .venv-test .venv-demo .venv-dev .venv-oracle .venv-fuzz .pytest_cache .mypy_cache .ruff_cache .hypothesis
