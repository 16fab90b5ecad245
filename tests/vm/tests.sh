# Runs test programs inside a guest: sourced by its script, as /bin/tests.sh.
PAGEONE_BIN=/bin/pageone
PAGEONE_AGENT=/bin/libpageone_agent.so
PAGEONE_GUEST=/bin/guest
export PAGEONE_BIN PAGEONE_AGENT PAGEONE_GUEST
failed=0
# Should the tests not end, the console says after $1 seconds what each thread waits for.
say_who_waits() {
  (
    sleep "$1"
    for task in /proc/[0-9]*/task/*; do
      command=$(tr '\0' ' ' <"$task/cmdline")
      [ -n "$command" ] || continue
      echo "waits: $(cat "$task/comm") of $command"
      cat "$task/stack"
    done
  ) 2>/dev/null &
}
# try COMMAND...: runs it; a failure is told with its status, for a program that a signal ends says nothing.
try() {
  "$@" && return
  echo "FAILED with status $?: $*"
  failed=1
}
