# How long a guest's writes wait while its pages are merged and broken.
.PHONY: bench-waits

bench-waits: ## Measures how long writes wait with a million equal pages in four guests
	$(CARGO) build --workspace
	$(CARGO) test -p pageone --test copies -- --ignored --nocapture --test-threads=1
