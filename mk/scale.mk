# How the engine's cost grows, in simulation.
.PHONY: scale

SCALE ?= full

scale: build ## Simulates up to 10 000 guests with 100 million pages, and 64 workers (minutes, 8 GiB)
	$(BUILT)/pageone bench run scale --scale $(SCALE) --repeats 1
