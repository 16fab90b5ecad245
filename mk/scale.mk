# How the engine's cost grows, in simulation.
.PHONY: scale

scale: ## Simulates up to 10000 guests and 100 million pages on 16 nodes (minutes, 8 GiB)
	$(CARGO) test --release -p engine scale -- --ignored --nocapture --test-threads 1
