# Guests for tests: see tests/vm/.
.PHONY: vm

vm: ## Fetches QEMU and the kernels of the test guests
	@tests/vm/prepare cloud generic

.PHONY: test-vm
test-vm: setup ## Merges the memory of four QEMU guests that check their files
	$(CARGO) build -p pageone -p agent
	@tests/vm/merge
