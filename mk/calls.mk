# What memory calls cost under the agent, beside the kernel's own; and what merging costs at least.
.PHONY: bench-calls bench-floor

CALLS_SCALE ?= 20

bench-calls: ## Measures memory calls with the agent and without, on CALLS_SCALE (20) times 16 MiB
	$(BUILD)
	CALLS_SCALE=$(CALLS_SCALE) $(CARGO) test --profile $(PROFILE) --workspace --test costs -- --nocapture --test-threads 1

# As large as what the guests of `pageone bench merge` share by default.
FLOOR ?= 768

bench-floor: ## Measures the least CPU time that merging FLOOR (768) MiB takes from user space
	$(BUILD) --example floor
	$(BUILT)/examples/floor $(FLOOR)
