# Guests for tests: see tests/vm/.
.PHONY: vm

vm: ## Fetches QEMU and the kernels of the test guests
	@tests/vm/prepare cloud generic
