# NUMA: guests with several nodes, figures, and the core-only build of the ACPI reader.
.PHONY: test-numa bench-numa bench-hashdist numa-core

test: numa-core test-numa

test-numa: ## Runs the NUMA tests in guests with one to four nodes
	tests/numa/run

bench-hashdist: ## Shows a table on one node and spread over four, in a guest
	tests/numa/run four
	@sed -n '/^hashdist=0/,/^== /p' target/vm/numa-four.out

bench-numa: ## Measures the heap, the ACPI reader and node queries
	$(CARGO) bench $(BENCH_PROFILE) -p numa

numa-core: ## Checks that the ACPI reader needs core and alloc only
	$(CARGO) clippy -p numa --no-default-features -- -D warnings
