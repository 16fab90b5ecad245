# What recycle and recycle-cost ask of the kernel about guests; sourced by both, after host.sh.
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
# Pages of the guests that lie in mappings of stores: those that they discard do so no more.
mapped() {
  local pid
  for pid in $(of_guests .pid); do cat "/proc/$pid/smaps"; done |
    awk '/^[0-9a-f]+-[0-9a-f]+ / {its = /memfd:pageone-store/} its && /^Size:/ {sum += $2} END {print int(sum / 4)}'
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

# shellcheck source=tests/ksm.sh
. "$root/tests/ksm.sh"
# Looks each second, as the daemon does: a fiftieth of all pages each 20 ms.
tune_ksm() { turn_ksm advisor_mode=none use_zero_pages=1 sleep_millisecs=20 pages_to_scan=$((guests * 384 * 256 / 50)) run=1; }
