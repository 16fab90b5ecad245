# How long a guest's writes wait while its pages are merged and broken.
.PHONY: bench-waits

WAITS_PAGES ?= 250000

bench-waits: ## Measures how long writes wait with WAITS_PAGES (250000) equal pages in each of four guests
	$(DEV_BUILD)
	WAITS_PAGES=$(WAITS_PAGES) $(CARGO) test --workspace --test copies -- --ignored --nocapture --test-threads=1
