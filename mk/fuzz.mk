# Fuzzing: a target for each file of fuzz/fuzz_targets that is a program.

FUZZ_SECONDS ?= 60
# More for libFuzzer, such as -verbosity=0.
FUZZ_SAYS ?=
FUZZ_TARGETS := acpi config policy sdtree wire
# cargo's profile. dev is built in a fifth of the time.
FUZZ_PROFILE ?= release
# What cargo-fuzz passes, for machines without it: coverage counters for libFuzzer, and the address sanitizer.
FUZZ_FLAGS := -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
	-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
	-Cllvm-args=-sanitizer-coverage-trace-compares -Zsanitizer=address --cfg fuzzing

.PHONY: fuzz $(FUZZ_TARGETS:%=fuzz-%)

fuzz: $(FUZZ_TARGETS:%=fuzz-%) ## Fuzzes for FUZZ_SECONDS (60) each, with a nightly toolchain; one: fuzz-wire, fuzz-policy, ...

# Beyond the longest packet; and texts that say much.
fuzz-wire: FUZZ_ARGS := -max_len=20480
fuzz-config: FUZZ_ARGS := -seed_inputs=seeds/config.toml
fuzz-policy: FUZZ_ARGS := -seed_inputs=../packaging/policy.toml

$(FUZZ_TARGETS:%=fuzz-%): fuzz-%:
	@if $(CARGO) +nightly --version >/dev/null 2>&1; then \
		mkdir -p fuzz/corpus/$* fuzz/artifacts/$* && cd fuzz && \
		RUSTFLAGS="$(FUZZ_FLAGS)" $(CARGO) +nightly run --profile $(FUZZ_PROFILE) --target x86_64-unknown-linux-gnu --bin $* -- \
			-artifact_prefix=artifacts/$*/ -max_total_time=$(FUZZ_SECONDS) $(FUZZ_SAYS) $(FUZZ_ARGS) corpus/$*; \
	else \
		echo "fuzz-$*: skipped: there is no nightly toolchain (rustup toolchain install nightly)"; \
	fi

# The same properties on a stable toolchain, and random clients against a real daemon. `make unit` runs both, for
# a quarter of a minute in all.
.PHONY: fuzz-smoke

FUZZ_SMOKE_SECONDS ?= 60

fuzz-smoke: ## Fuzzes for FUZZ_SMOKE_SECONDS (60) without nightly: parsers, then a live daemon
	$(DEV_BUILD)
	PAGEONE_FUZZ_SECONDS=$$(( $(FUZZ_SMOKE_SECONDS) / 2 )) PAGEONE_FUZZ_LIVE_SECONDS=$$(( $(FUZZ_SMOKE_SECONDS) / 2 )) \
		$(CARGO) test --workspace --test fuzz_smoke --test fuzz_live -- --nocapture
