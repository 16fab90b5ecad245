# The model test: memory calls at random, with PageONE and without it, must have the same effect. A run prints its seed. HOW=attach: the agent
# comes into programs that run, and may go again; ANY=1: all their memory is offered.
.PHONY: model

LIST ?=
ANY ?=
HOW ?=
FIRST ?=

model: setup ## Compares what a program sees with PageONE and without, for MINUTES (1), or again with SEED or LIST
	$(DEV_BUILD)
	MINUTES=$(MINUTES) FIRST=$(FIRST) SEED=$(SEED) LIST=$(LIST) ANY=$(ANY) HOW=$(HOW) $(CARGO) test --workspace --test model -- --ignored --nocapture
