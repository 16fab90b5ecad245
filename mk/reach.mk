# Programs as they are, under load, by PageONE and by the kernel's KSM: see tests/reach/.
.PHONY: test-reach

REACH ?= --full

test-reach: setup ## Compares ten programs under load: alone, by `run --any`, by `attach --any`, by KSM; judges the aims
	$(DEV_BUILD)
	@tests/reach/run $(REACH)
