# How the engine's cost grows, in simulation.
.PHONY: scale

SCALE_GUESTS ?= 10000

scale: ## Simulates up to SCALE_GUESTS (10000) guests and 100 million pages on 16 nodes (minutes, 8 GiB)
	SCALE_GUESTS=$(SCALE_GUESTS) $(CARGO) test --profile $(PROFILE) --workspace --lib scale -- --ignored --nocapture --test-threads 1
