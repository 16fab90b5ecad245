# Programs as they are, under load, by PageONE and by the kernel's KSM: see tests/reach/.
.PHONY: test-reach

REACH ?= --full

test-reach: setup ## Compares redis, Python, Node and Java under load: alone, by `run --any`, by KSM
	$(CARGO) build --workspace
	@tests/reach/run $(REACH)
