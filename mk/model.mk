# The model test: memory calls at random, with PageONE and without it, must have the same effect. A run prints its seed.
.PHONY: model

LIST ?=
ANY ?=

model: setup ## Compares what a program sees with PageONE and without, for MINUTES (1), or again with SEED or LIST
	$(CARGO) build --workspace
	MINUTES=$(MINUTES) SEED=$(SEED) LIST=$(LIST) ANY=$(ANY) $(CARGO) test --workspace --test model -- --ignored --nocapture
