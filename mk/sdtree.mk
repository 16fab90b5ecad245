# Checks of the SD tree that go further than `make unit`, and its measurements.

LOOM_MAX_PREEMPTIONS ?= 3
SDTREE_STRESS_ROUNDS ?= 100000
STRESS_CASES ?= 20000

.PHONY: loom miri stress bench-sdtree

# The models take seconds; what goes further is for the nights.
test: loom

loom: ## Runs the models of the SD tree through all interleavings
	RUSTFLAGS="--cfg loom" LOOM_MAX_PREEMPTIONS=$(LOOM_MAX_PREEMPTIONS) CARGO_TARGET_DIR=target/loom \
		$(CARGO) test --release -p sdtree --test loom

# All tests, or those whose name contains MIRI_TESTS. crossbeam-epoch is right by the rules of tree borrows, not by those of
# stacked borrows.
MIRI_TESTS ?=

miri: ## Runs the unit tests of the SD tree under miri, if it is installed
	@if $(CARGO) +nightly miri --version >/dev/null 2>&1; then \
		MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-ignore-leaks -Zmiri-tree-borrows" CARGO_TARGET_DIR=target/miri PROPTEST_CASES=8 \
			$(CARGO) +nightly miri test -p sdtree --lib $(MIRI_TESTS); \
	else \
		echo "miri: skipped: the nightly toolchain has no miri (rustup component add --toolchain nightly miri)"; \
	fi

stress: ## Runs the property and linearizability tests for long
	PROPTEST_CASES=$(STRESS_CASES) $(CARGO) test --profile $(PROFILE) --workspace --test oracle --test garbage --test dedup --test store
	SDTREE_STRESS_ROUNDS=$(SDTREE_STRESS_ROUNDS) $(CARGO) test --profile $(PROFILE) --workspace --test linearizability

bench-sdtree: ## Measures the SD tree beside other maps
	$(CARGO) bench --profile $(PROFILE) --workspace --features sdtree/peers --bench maps --bench pages
