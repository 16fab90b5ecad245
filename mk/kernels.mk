# Other kernels than this machine's, and protection keys, in guests.
.PHONY: test-kernels

test: test-kernels

test-kernels: ## Runs the tests of memory calls in a guest with Linux 6.12 and protection keys; tries what is said on 6.1
	tests/kernels/run
