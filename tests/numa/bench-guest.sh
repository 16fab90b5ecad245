# Runs inside a test guest of tests/numa/bench: the two tables. The kernel's command line has their sizes.
PAGEONE_AGENT=/bin/libpageone_agent.so
export PAGEONE_AGENT
guests=$(sed -n 's/.*pageone.guests=\([0-9,]*\).*/\1/p' /proc/cmdline)
mib=$(sed -n 's/.*pageone.mib=\([0-9]*\).*/\1/p' /proc/cmdline)
pageone bench nodes --guest-mib "$mib" && pageone bench domains --guests "$guests" --guest-mib "$mib"
