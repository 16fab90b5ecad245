# KSM's knobs, where a script compares with KSM; sourced.
# shellcheck shell=bash

knobs=/sys/kernel/mm/ksm
knobs_before=()
# A knob's value; of a choice the one in brackets.
knob() { sed 's/.*\[\(.*\)\].*/\1/' "$knobs/$1"; }
all_knobs() {
  local name
  for name in run pages_to_scan sleep_millisecs use_zero_pages smart_scan advisor_mode; do
    if [[ -e $knobs/$name ]]; then echo "$name=$(knob "$name")"; fi
  done
}
# turn_ksm KNOB=VALUE...: first advisor_mode, whose advisor sets others. Knobs that this kernel lacks are passed over.
turn_ksm() {
  local turn name
  # The lock of the benches that turn KSM, too (crates/pageone/src/watchdog.rs): a file that only root can open.
  local lock=/run/pageone-sys-kernel-mm-ksm-run.lock
  (umask 077; : >>"$lock")
  exec {ksm_lock}>>"$lock"
  flock -w 240 "$ksm_lock" || { echo "another process turns KSM: it holds $lock" >&2; return 1; }
  for turn in "$@"; do
    name=${turn%%=*}
    [[ -e $knobs/$name ]] || continue
    # The last is the first to be put back.
    knobs_before=("$name=$(knob "$name")" "${knobs_before[@]}")
    echo "${turn#*=}" >"$knobs/$name"
  done
}
restore_ksm() {
  local turn
  for turn in "${knobs_before[@]}"; do echo "${turn#*=}" >"$knobs/${turn%%=*}" || true; done
  knobs_before=()
  if [[ ${ksm_lock-} ]]; then exec {ksm_lock}<&-; fi
  ksm_lock=
}
