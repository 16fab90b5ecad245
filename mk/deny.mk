# Licences, sources and doubles of dependencies; advisories where there is a network.
.PHONY: deny

test: deny

# Advisories come from a database that has to be fetched: DENY=check for those as well.
DENY ?= --offline check bans licenses sources

deny: ## Checks the dependencies' licences and sources, if cargo-deny is installed
	@if $(CARGO) deny --version >/dev/null 2>&1; then \
		$(CARGO) deny $(DENY); \
	else \
		echo "deny: skipped: there is no cargo-deny (cargo install cargo-deny)"; \
	fi
