# What memory calls cost under the agent, beside the kernel's own.
.PHONY: bench-calls

CALLS_SCALE ?= 20

bench-calls: ## Measures memory calls with the agent and without, on CALLS_SCALE (20) times 16 MiB
	$(CARGO) build --profile $(PROFILE) --workspace
	CALLS_SCALE=$(CALLS_SCALE) $(CARGO) test --profile $(PROFILE) --workspace --test costs -- --nocapture --test-threads 1
