# Every target that the README, the documents and `make help` name is made by `make test`, here in a form of seconds:
# what is never run breaks. crates/pageone/tests/targets.rs finds those that are missing.
.PHONY: short msrv

MSRV := $(shell sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
# As `make unit` builds, and little to do. The model makes lists from the same on: a difference is then a change's. With `FIRST=` it makes lists that
# no run has made before, and prints the first: `make model` with that makes them again.
SHORT := PROFILE=dev DEMO="--guests 2 --mib 48" SCALE=short STRESS_CASES=64 SDTREE_STRESS_ROUNDS=200 \
	CALLS_SCALE=1 SDTREE_KEYS=20000 SDTREE_ROUNDS=1 SDTREE_PAGES=2000 WAITS_PAGES=20000 MERGE_NOW_MIB=32 FLOOR=8 MIRI_TESTS=pool::blocks FUZZ_PROFILE=dev FUZZ_SECONDS=2 FUZZ_SAYS=-verbosity=0 FUZZ_SMOKE_SECONDS=6 \
	BENCH_NODES="2 8" BENCH_NODES_SIZES="--guests 4 --guest-mib 4" BENCH_OUT=target/bench-short BENCH_SCALE=short \
	BENCH_FULL="merge churn vms --repeats 1 --guests 2 --guest-mib 16 --merge-period 100ms --limit 1s --phase 200ms --engines pageone-1"

test: msrv short

# After `make unit`, which builds most of it.
short: unit ## Runs each demonstration, bench, simulation and fuzz target for a moment
	$(MAKE) demo $(SHORT)
	rm -rf target/bench-short
	$(MAKE) bench $(SHORT)
	$(MAKE) bench-full $(SHORT)
	$(MAKE) test-deb $(SHORT)
	$(MAKE) test-rpm $(SHORT)
	$(MAKE) test-image $(SHORT)
	$(MAKE) scale $(SHORT)
	$(MAKE) stress $(SHORT)
	$(MAKE) test-reach REACH=
	$(MAKE) bench-waits $(SHORT)
	$(MAKE) bench-merge-now $(SHORT)
	$(MAKE) bench-calls $(SHORT)
	$(MAKE) bench-floor $(SHORT)
	$(MAKE) bench-sdtree $(SHORT)
	$(MAKE) bench-numa $(SHORT)
	$(MAKE) bench-nodes $(SHORT)
	$(MAKE) bench-recycle $(SHORT) WAYS=pageone:balloon WINDOW=10
	$(MAKE) bench-recycle $(SHORT) WAYS="none:order0 pageone:order0" WINDOW=10 MOST=2
	$(MAKE) fuzz-smoke $(SHORT)
	$(MAKE) fuzz $(SHORT)
	$(MAKE) miri $(SHORT)
	$(MAKE) model $(SHORT) FIRST=7108 MINUTES=1
	$(MAKE) model $(SHORT) FIRST=9108 MINUTES=1 HOW=attach
	$(MAKE) model $(SHORT) FIRST=5108 MINUTES=0.25 ANY=1
	$(MAKE) attaches $(SHORT) ATTACHES=4

msrv: ## Checks that the oldest Rust that the manifest names will do, if it is installed
	@if rustup run $(MSRV) cargo --version >/dev/null 2>&1; then \
		CARGO_TARGET_DIR=target/msrv rustup run $(MSRV) cargo check --workspace; \
	else \
		echo "msrv: skipped: there is no Rust $(MSRV) (rustup toolchain install $(MSRV))"; \
	fi
