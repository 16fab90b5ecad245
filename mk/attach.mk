# Attaching and detaching at random moments: programs that allocate, fork, take signals, make and end threads check their own answers.
.PHONY: attaches

ATTACHES ?= 300

attaches: setup ## Attaches to busy programs and detaches, ATTACHES (300) times, each time at another moment
	$(DEV_BUILD)
	PAGEONE_ATTACHES=$(ATTACHES) $(CARGO) test --workspace --test attach -- --nocapture a_process_may_be_attached_at_any_moment
