# PageONE's front door. `make demo` shows it at work; `make test` is what CI runs.
CARGO ?= cargo
export CARGO_TERM_COLOR ?= auto
# cargo's profile of what is shown or measured: release, or dev.
PROFILE ?= release
BUILT := target/$(PROFILE:dev=debug)
# For development with all that examples need, as tests are built: else crates would be built once more, with fewer features.
DEV_BUILD := $(CARGO) build --workspace --lib --bins --examples
BUILD = $(if $(filter dev,$(PROFILE)),$(DEV_BUILD),$(CARGO) build --profile $(PROFILE) --workspace)
DEMO ?=

.PHONY: help demo build test fmt clippy doc unit setup clean

help: ## Lists the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  %-14s %s\n", $$1, $$2}'

setup: ## Installs what the machine lacks
	@packaging/setup

# `pageone --version` names it. Not in the tests' build, which would be built anew at each commit.
ifeq ($(PROFILE),release)
build: export PAGEONE_COMMIT ?= $(shell git describe --always --dirty 2>/dev/null)
endif

build: setup ## Builds the command and the agent, optimized
	$(BUILD)

demo: build ## Merges the memory of six live guests and shows what came back
	$(BUILT)/pageone demo $(DEMO)

test: setup vm browser promtool fmt clippy doc unit ## Everything that CI runs

fmt: ## Checks the formatting
	$(CARGO) fmt --all --check

clippy: ## Lints, warnings denied
	$(CARGO) clippy --workspace --all-targets -- -D warnings

doc: ## Builds the documentation, warnings denied
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps

unit: ## Runs all tests
	$(DEV_BUILD)
	$(CARGO) test --workspace --no-fail-fast

clean: ## Removes what was built
	$(CARGO) clean

include mk/*.mk
