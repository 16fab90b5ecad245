# Programs of others, fetched: with all their memory offered (see tests/programs/), and to look at the dashboard.
.PHONY: test-programs test-programs-short

FULL ?= --full

test: test-programs-short

test-programs-short: # Without PostgreSQL, and some of CPython's tests.
	$(MAKE) test-programs FULL=

test-programs: setup ## Compares redis, CPython, stress-ng and PostgreSQL with all their memory merged with what they are without
	$(DEV_BUILD)
	@tests/programs/run $(FULL)

.PHONY: browser promtool

browser: setup ## Fetches Chromium for the test of the dashboard, where none is installed
	@command -v chromium >/dev/null || tests/programs/prepare chromium || echo "browser: skipped: it cannot be fetched"

promtool: setup ## Fetches Prometheus' tool for the tests of metrics and alerts, where none is installed
	@command -v promtool >/dev/null || tests/programs/prepare promtool || echo "promtool: skipped: it cannot be fetched"
