# PageONE, KSM and nothing side by side: docs/cli.md has the tasks and the rule of the measurement.
.PHONY: bench bench-full

BENCH_OUT ?= target/bench
BENCH_SCALE ?= normal
BENCH ?=
BENCH_FULL ?=
VM = $(or $(CARGO_TARGET_DIR),target)/vm
BENCH_NOTE := $(shell git describe --always --dirty 2>/dev/null)

bench: build ## Compares PageONE and KSM at six tasks (five minutes)
	$(BUILT)/pageone bench run --scale $(BENCH_SCALE) --out $(BENCH_OUT) --note "$(BENCH_NOTE)" $(BENCH)
	$(BUILT)/pageone bench report --out $(BENCH_OUT)

bench-full: BENCH_VM = $$(tests/vm/bench-files >&2 && echo --vm-kernel $(VM)/vmlinuz-cloud --vm-initramfs $(VM)/bench-initramfs)
bench-full: build ## The same with all engines and variants and large guests (hours)
	$(BUILT)/pageone bench run --scale full --out $(BENCH_OUT) --note "$(BENCH_NOTE)" $(BENCH_VM) $(BENCH_FULL)
	$(BUILT)/pageone bench report --out $(BENCH_OUT)

# How soon memory is merged that a clone waits for.
.PHONY: bench-merge-now

MERGE_NOW_MIB ?= 1024

bench-merge-now: ## Measures how long `pageone merge` takes for a clone of MERGE_NOW_MIB (1024), with three times as much memory
	$(BUILD)
	MERGE_NOW_MIB=$(MERGE_NOW_MIB) $(CARGO) test --profile $(PROFILE) --workspace --test merge_now -- --ignored --nocapture
