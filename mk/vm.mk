# Guests for tests: see tests/vm/.
.PHONY: vm

vm: ## Fetches QEMU and the kernels of the test guests
	@tests/vm/prepare cloud generic balloon

.PHONY: test-vm
VM_GUESTS ?= 4

test: test-vm-short

.PHONY: test-vm-short
test-vm-short: # With two guests, all its checks.
	$(MAKE) test-vm VM_GUESTS=2

test-vm: setup ## Merges the memory of VM_GUESTS (4) QEMU guests that check their files; attaches to two that run
	$(DEV_BUILD)
	@tests/vm/merge $(VM_GUESTS)
	@tests/vm/attach

.PHONY: test-recycle test-recycle-short

test: test-recycle-short

test-recycle-short: # With two guests, all its checks; and the same guests with KSM, in one way.
	$(MAKE) test-recycle VM_GUESTS=2 BESIDE=ksm:reported

# BESIDE="ksm none" has the same guests run with KSM, and with nothing, as well.
test-recycle: setup ## Has VM_GUESTS (4) QEMU guests delete what they hold, and the host get it back
	$(DEV_BUILD)
	@tests/vm/recycle $(VM_GUESTS)

.PHONY: test-libvirt

test: test-libvirt

test-libvirt: setup ## Has three machines of a real libvirtd share their memory, one attached by a rule: as root, where libvirt is or can be fetched
	$(DEV_BUILD)
	@tests/libvirt/run

.PHONY: bench-recycle

RECYCLE_GUESTS ?= 2

# WAYS="none:balloon pageone:order0" is a choice of rows: see tests/vm/recycle-cost.
bench-recycle: setup ## Measures what it costs until freed memory of RECYCLE_GUESTS (2) guests is back: with nothing, KSM, PageONE
	$(BUILD)
	@tests/vm/recycle-cost $(RECYCLE_GUESTS) $(CURDIR)/$(BUILT)
