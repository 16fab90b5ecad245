# What recycle and recycle-cost ask of the kernel about guests, and KSM's knobs; sourced by both, after host.sh.
# shellcheck shell=bash disable=SC2154

# Frames that the guests' memory takes, by the kernel's word: private ones in what is offered (tracked by a userfaultfd: uw),
# and those of the stores. QEMU's own memory, in which it keeps what it has translated, grows all the time.
frames() {
  local pid fd
  {
    for pid in $(of_guests .pid); do cat "/proc/$pid/smaps"; done |
      awk '/^Anonymous:/ {own = $2} /^VmFlags:.* uw/ {sum += own} END {print int(sum / 4)}'
    for fd in "/proc/$daemon/fd"/*; do
      if [[ $(readlink "$fd") == /memfd:pageone-store* ]]; then echo $(($(stat -L -c %b "$fd") / 8)); fi
    done
  } | awk '{sum += $1} END {print sum}'
}
# The processes of the guests, by the pipe that each has.
emulators() {
  local pid
  for pid in $(pgrep -x qemu-system-x86); do
    if grep -q "$dir/word" "/proc/$pid/cmdline"; then echo "$pid"; fi
  done
}
# The frames without PageONE: the guests' share of those of what QEMU offers (madvise: mg).
frames_beside() {
  local pid
  for pid in $(emulators); do cat "/proc/$pid/smaps"; done |
    awk '/^Pss:/ {its = $2} /^VmFlags:.* mg/ {sum += its} END {print int(sum / 4)}'
}
since() { awk "BEGIN {printf \"%.1f\", $EPOCHREALTIME - $1}"; }

knobs=/sys/kernel/mm/ksm
knobs_turned=(run pages_to_scan sleep_millisecs use_zero_pages advisor_mode)
declare -A knobs_before=()
# A knob's value; of a choice the one in brackets.
knob() { sed 's/.*\[\(.*\)\].*/\1/' "$knobs/$1"; }
all_knobs() {
  local name
  for name in "${knobs_turned[@]}"; do if [[ -e $knobs/$name ]]; then echo "$name=$(knob "$name")"; fi; done
}
# Looks each second, as the daemon does: a fiftieth of all pages each 20 ms.
tune_ksm() {
  local name
  # The lock of the benches that turn KSM, too.
  exec {ksm_lock}<"$knobs/run"
  flock -w "$step_seconds" "$ksm_lock" || { echo "$target: another process turns KSM" >&2; return 1; }
  for name in "${knobs_turned[@]}"; do knobs_before[$name]=$(knob "$name"); done
  echo none >"$knobs/advisor_mode"
  echo 1 >"$knobs/use_zero_pages"
  echo 20 >"$knobs/sleep_millisecs"
  echo $((guests * 384 * 256 / 50)) >"$knobs/pages_to_scan"
  echo 1 >"$knobs/run"
}
restore_ksm() {
  local name
  # The pages to scan are the advisor's while there is one: so it comes last.
  for name in "${knobs_turned[@]}"; do
    if [[ ${knobs_before[$name]-} ]]; then echo "${knobs_before[$name]}" >"$knobs/$name"; fi
  done
  if ((${#knobs_before[@]})); then exec {ksm_lock}<&-; fi
  knobs_before=()
}
