# What memory calls cost under the agent, beside the kernel's own. `make unit` runs it for short.
.PHONY: bench-calls

CALLS_SCALE ?= 20

bench-calls: ## Measures memory calls with the agent and without, on CALLS_SCALE (20) times 16 MiB
	$(CARGO) build --release -p agent
	CALLS_SCALE=$(CALLS_SCALE) $(CARGO) test --release -p agent --test costs -- --nocapture --test-threads 1
