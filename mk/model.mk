# The model test: memory calls at random, with PageONE and without it, must have the same effect. A run prints its seed.
.PHONY: model

LIST ?=

model: setup ## Compares what a program sees with PageONE and without, for MINUTES (1), or again with SEED or LIST
	$(CARGO) build --workspace
	MINUTES=$(MINUTES) SEED=$(SEED) LIST=$(LIST) $(CARGO) test --workspace --test model -- --ignored --nocapture
