# NUMA: guests with several nodes, figures, and the core-only build of the ACPI reader.
.PHONY: test-numa bench-numa bench-hashdist bench-nodes numa-core

NUMA_SHAPES ?= one two four cpuless hmat fake unplug
BENCH_NODES ?= 2 4 8
BENCH_NODES_SIZES ?=

test: numa-core test-numa bench-hashdist

test-numa: ## Runs the NUMA tests in guests with one to four nodes
	tests/numa/run $(NUMA_SHAPES)

# Alone it needs one guest; after all of them it shows what that one said.
bench-hashdist: NUMA_SHAPES := four
bench-hashdist: test-numa ## Shows a table on one node and spread over four, in a guest
	@grep -q '^hashdist=0' target/vm/numa-four.out
	@sed -n '/^hashdist=0/,/^== /p' target/vm/numa-four.out

bench-nodes: ## Shows where guests and their pages are with and without nodes in mind, in guests with 2, 4 and 8 nodes
	tests/numa/bench $(BENCH_NODES_SIZES) $(BENCH_NODES)

bench-numa: ## Measures the heap, the ACPI reader and node queries
	$(CARGO) bench --profile $(PROFILE) --workspace --bench numa

numa-core: ## Checks that the ACPI reader needs core and alloc only
	$(CARGO) clippy -p numa --no-default-features -- -D warnings
