# Programs with musl, as Alpine's containers have it: an agent is attached to them. The kernel's headers are those of glibc's programs.
.PHONY: test-musl

MUSL_CC := musl-gcc -idirafter /usr/include -idirafter /usr/include/$(shell uname -m)-linux-gnu
MUSL_TESTS := running_programs_become any_moment is_merged_with_any that_was_divided clones_and_groups_go_on after_detaching_as_it_was whichever_step_fails gave_up_its_rights

test: test-musl

test-musl: setup ## Attaches to programs with musl, and runs the model with it for MINUTES (1), where musl-gcc can be had
	@packaging/setup musl-gcc
	@if ! command -v musl-gcc >/dev/null; then \
		echo "test-musl: skipped: there is no musl-gcc (musl-tools)"; \
	else \
		set -e; $(DEV_BUILD); \
		PAGEONE_CC="$(MUSL_CC)" $(CARGO) test --workspace --test attach -- $(MUSL_TESTS); \
		PAGEONE_CC="$(MUSL_CC)" MINUTES=$(MINUTES) FIRST=$(or $(FIRST),7108) HOW=attach ANY=1 \
			$(CARGO) test --workspace --test model -- --ignored --nocapture a_program_sees; \
	fi
