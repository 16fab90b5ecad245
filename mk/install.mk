# Puts what was built where packages have it. `make build` first: an install builds nothing, so root need not run cargo.
.PHONY: install uninstall test-install

PREFIX ?= /usr/local
SYSCONFDIR ?= /etc
DESTDIR ?=
STRIP ?= strip
# Where the agent is looked for: ../lib/pageone beside the folder of the command.
LIBDIR := $(PREFIX)/lib/pageone
UNITDIR ?= $(PREFIX)/lib/systemd/system
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
INSTALLED := PREFIX='$(PREFIX)' SYSCONFDIR='$(SYSCONFDIR)' DESTDIR='$(DESTDIR)' LIBDIR='$(LIBDIR)' UNITDIR='$(UNITDIR)' \
	STRIP='$(STRIP)' VERSION='$(VERSION)' BUILT='$(BUILT)'

install: ## Installs command, agent, header, unit, manual and completions below PREFIX (/usr/local) and DESTDIR
	@$(INSTALLED) packaging/install install

uninstall: ## Removes what `make install` has installed; configuration that was edited stays
	@$(INSTALLED) packaging/install uninstall

test: test-install

test-install: # In a folder of its own, from the tests' build: `crates/pageone/tests/install.rs` compares the files.
	$(DEV_BUILD)
	rm -rf target/installed
	$(MAKE) install PROFILE=dev PREFIX=/usr DESTDIR=$(CURDIR)/target/installed
	target/installed/usr/bin/pageone --version
	$(MAKE) uninstall PROFILE=dev PREFIX=/usr DESTDIR=$(CURDIR)/target/installed
	@! find target/installed -not -type d | grep .

.PHONY: deb test-deb rpm test-rpm test-image lintian rpmbuild podman
DEB := $(CURDIR)/target/deb
RPM := $(CURDIR)/target/rpm

deb: ## Makes Debian packages of what was built, in target/deb, where dpkg-deb is; lintian looks through them, if it is installed
	@if ! command -v dpkg-deb >/dev/null; then \
		echo "deb: skipped: there is no dpkg-deb"; \
	else \
		set -e; $(INSTALLED) packaging/deb/build $(DEB); \
		for package in deb:pageone dbgsym:pageone-dbgsym; do \
			dpkg-deb --fsys-tarfile $(DEB)/$${package#*:}_$(VERSION)_amd64.deb | tar -t | sed -n 's|^\.\(/.*[^/]\)$$|\1|p' | \
				packaging/compare $${package%:*}; \
		done; \
		if command -v lintian >/dev/null; then \
			lintian --allow-root --fail-on error,warning --profile debian --tag-display-limit 0 $(DEB)/pageone_$(VERSION)_amd64.deb; \
			: Its address is that of the other, and it may have no file that says why; \
			lintian --allow-root --fail-on error,warning --profile debian --suppress-tags bogus-mail-host $(DEB)/pageone-dbgsym_$(VERSION)_amd64.deb; \
		elif [ "$$PAGEONE_TEST_STRICT" = 1 ]; then \
			echo "deb: there is no lintian, and PAGEONE_TEST_STRICT is 1" >&2; exit 1; \
		else \
			echo "deb: lintian is skipped: it is not installed"; \
		fi; \
	fi

test: lintian rpmbuild podman

lintian: ## Installs lintian for `make deb`, where that can be
	@packaging/setup lintian

rpmbuild: ## Installs rpmbuild and rpmlint for `make rpm`, where that can be
	@packaging/setup rpm rpmlint

test-deb: deb ## Installs this package in a fresh Debian under systemd, has two programs share their memory, upgrades and purges it
	@PROFILE=$(PROFILE) packaging/deb/try $(DEB)/pageone_$(VERSION)_amd64.deb target/debian

rpm: ## Makes packages for rpm of what was built, in target/rpm, where rpmbuild is; rpmlint looks through them, if it is installed
	@if ! command -v rpmbuild >/dev/null; then \
		if [ "$$PAGEONE_TEST_STRICT" = 1 ]; then echo "rpm: there is no rpmbuild, and PAGEONE_TEST_STRICT is 1" >&2; exit 1; fi; \
		echo "rpm: skipped: there is no rpmbuild"; \
	else \
		set -e; $(INSTALLED) packaging/rpm/build $(RPM); \
		for package in rpm:pageone debuginfo:pageone-debuginfo; do \
			rpm -qp --queryformat '[%{FILEMODES:perms} %{FILENAMES}\n]' $(RPM)/$${package#*:}-$(VERSION)-1.x86_64.rpm | \
				sed -n 's/^[^d][^ ]* //p' | packaging/compare $${package%:*}; \
		done; \
		if command -v rpmlint >/dev/null; then \
			rpmlint --strict --config packaging/rpm/rpmlint.toml $(RPM)/*-$(VERSION)-1.x86_64.rpm; \
		else \
			echo "rpm: rpmlint is skipped: it is not installed"; \
		fi; \
	fi

test-rpm: rpm ## Installs this package over a copy of the root, installs it again, and erases it
	@packaging/rpm/try $(RPM)/pageone-$(VERSION)-1.x86_64.rpm

podman: ## Installs podman for `make test-image`, where that can be
	@packaging/setup crun podman

test-image: podman ## Builds the image of packaging/container from what was built, and has two programs share their memory by it
	@packaging/container/try $(BUILT) target/debian
