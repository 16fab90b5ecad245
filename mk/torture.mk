# Torture: guests that compare every byte while everything happens at random. A run prints its seed.
.PHONY: torture

MINUTES ?= 1
SEED ?=

test: torture

torture: setup ## Torments guests and daemon for MINUTES (1), or again with SEED
	$(DEV_BUILD)
	MINUTES=$(MINUTES) SEED=$(SEED) $(CARGO) test --workspace --test torture -- --ignored --nocapture
