# What the tests with QEMU guests have in common on the host; sourced by merge, attach, recycle and recycle-cost.
#
# Wanted: root, bin, guests, target (the name of the make target), step_seconds and all_seconds (the longest time for one
# step, and for all), kernel (see boot), append (words for the guests' kernel) and devices (arguments for
# QEMU; % is the guest's number).
# Given: a folder of its own, a daemon, guests with a pipe for words (ttyS2 inside), checks that are counted. Whatever
# ends the script ends the guests and the daemon.
# shellcheck shell=bash disable=SC2154,SC2034

skip() {
  echo "$target: skipped: $1"
  exit 0
}
[[ $(uname -m) == x86_64 ]] || skip "the guests' kernels are for x86_64"
[[ $(id -u) -eq 0 || $(</proc/sys/vm/unprivileged_userfaultfd) == 1 || -w /dev/userfaultfd ]] ||
  skip "no right to userfaultfd: be root, or set vm.unprivileged_userfaultfd=1"

dir=$(mktemp -d "${TMPDIR:-/tmp}/pageone-vm.XXXXXX")
socket=$dir/pageone.sock
# The words before QEMU's, for a shell.
launch="\"$bin/pageone\" run --socket \"$socket\" --"
daemon='' boots=() passed=0 failed=0 samples=0 unequal=0 ending=''

finish() {
  trap - EXIT
  for pid in "${boots[@]}" $daemon; do kill "$pid" 2>/dev/null || true; done
  wait
  rm -rf "$dir"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# check NAME DETAIL COMMAND...: runs the command and counts how it went; what DETAIL prints stands behind.
check() {
  local outcome=ok
  "${@:3}" || outcome=FAILED
  if [[ $outcome == ok ]]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
  printf '%-6s %4d s  %s%s\n' "$outcome" "$SECONDS" "$1" "${2:+: $($2)}"
}

pageone() { "$bin/pageone" "$1" --socket "$socket" "${@:2}"; }

start_daemon() {
  # A session of its own: the engine's threads are of idle priority and the guests never idle, so inside one
  # scheduling group with them it would starve.
  setsid setpriv --pdeathsig TERM \
    "$bin/pageone" daemon --no-keep --socket "$socket" --merge-period 1s >>"$dir/daemon.log" 2>&1 &
  daemon=$!
}

# Takes a status and holds it against the counters' equation.
sample() {
  pageone status --json >"$dir/status.new" 2>/dev/null || return 1
  mv "$dir/status.new" "$dir/status"
  samples=$((samples + 1))
  asks '.pages_shared + .pages_sharing + .pages_unshared + .pages_volatile + .zero_pages + .pages_skipped
    == ([.guests[].pages] | add // 0)' && return
  unequal=$((unequal + 1))
  cp "$dir/status" "$dir/unequal"
}

# Whether the last status fulfils a condition.
asks() { jq -e "$1" "$dir/status" >"$dir/asked"; }
of_guests() { jq -r "[.guests[]$1] | map(tostring) | join(\" \")" "$dir/status"; }
merged_with() { asks "(.guests | length) == $guests and all(.guests[]; $1)"; }

# console GUEST PATTERN: the lines a guest said.
console() { tr -d '\r' <"$dir/console.$1" | grep -E "$2"; }
all_said() {
  local guest
  for ((guest = 1; guest <= guests; guest++)); do
    console "$guest" "$1" >/dev/null || return 1
  done
}

running() {
  local pid
  ((${#boots[@]})) || return 0
  for pid in "${boots[@]}"; do kill -0 "$pid" 2>/dev/null || return 1; done
  ! grep -q '^mismatch' "$dir"/console.*
}

# wait_for COMMAND...: asks until it succeeds, taking statuses; fails when the time is over, and at once when a
# guest has ended before its time or has found a mismatch.
wait_for() {
  local end=$((SECONDS + step_seconds))
  while ((SECONDS < end && SECONDS < all_seconds)); do
    if [[ -n $daemon ]]; then sample || true; fi
    "$@" && return
    [[ -n $ending ]] || running || return 1
    sleep 0.2
  done
  return 1
}

say() {
  local guest
  for ((guest = 1; guest <= guests; guest++)); do
    # Opened for reading as well: a guest that is gone must not block us.
    echo "$1" 1<>"$dir/word.$guest.in"
  done
}

start_guests() {
  printf '#!/bin/sh\nexec %s qemu-system-x86_64 "$@"\n' "$launch" >"$dir/qemu"
  chmod +x "$dir/qemu"
  local guest
  for ((guest = 1; guest <= guests; guest++)); do
    mkfifo "$dir/word.$guest.in" "$dir/word.$guest.out"
    : >"$dir/console.$guest"
    setpriv --pdeathsig TERM "$root/tests/vm/boot" --timeout "$all_seconds" --log "$dir/console.$guest" \
      --kernel "$kernel" --append "guest=$guest $append" --qemu "$dir/qemu" "$dir/initramfs" -- \
      -smp 2 -m 384M "${devices[@]//%/$guest}" -chardev "pipe,id=word,path=$dir/word.$guest" -serial chardev:word >/dev/null 2>&1 &
    boots+=($!)
  done
}

gone() { ! kill -0 "$1" 2>/dev/null; }
all_ended() {
  local pid
  for pid in "${boots[@]}"; do gone "$pid" || return 1; done
}
guest_ended() {
  local pid=${boots[$1 - 1]}
  gone "$pid" && wait "$pid" &&
    console "$1" '^guest-exit: 0$' >/dev/null && ! console "$1" '^mismatch' >/dev/null
}
daemon_ends() { kill "$daemon" && wait "$daemon" && [[ ! -e $socket ]]; }

# Of guests that run tests/vm/merge-guest.

# The sums of a column of each guest's last reports; 2 is verified, 3 mismatched, 4 rewritten.
reports() {
  local guest
  for ((guest = 1; guest <= guests; guest++)); do
    console "$guest" '^report' | awk -v column="$1" '{last[$2] = $(column + 1)}
      END {for (worker in last) sum += last[worker]; printf "%d ", sum}' || true
  done
}
verified() { reports 2; }
rewritten() { reports 4; }

# Whether every guest has verified so many files more than the given ones.
verified_since() {
  local more=$1 before=($2) now i
  read -ra now <<<"$(verified)"
  for ((i = 0; i < guests; i++)); do ((now[i] >= before[i] + more)) || return 1; done
}

# Frames the host no longer needs for merged pages, in pages: what the guests' mappings of the stores would take
# less what they take in proportion. The kernel's figure, not ours.
frames_saved() {
  local pid
  for pid in $(of_guests .pid); do cat "/proc/$pid/smaps"; done | awk '
    /^[0-9a-f]+-[0-9a-f]+ / {store = /memfd:pageone-store/}
    store && /^Rss:/ {saved += $2}
    store && /^Pss:/ {saved -= $2}
    END {printf "%d\n", saved / 4}'
}
guest_figures() {
  console "$1" '^report' | awk '{v[$2] = $3; m[$2] = $4; r[$2] = $5}
    END {printf "%d verified, %d mismatched, %d rewritten", v[0] + v[1], m[0] + m[1], r[0] + r[1]}'
}
sharing() { of_guests .pages_sharing; }

# What the never rewritten files of the first COUNT sets have as a checksum, worked out here.
kept_sum() {
  local set key piece pieces=6
  for ((set = 1; set <= $1; set++)); do
    for key in $((set * 16)) $((set * 16 + 1)); do
      for ((piece = 0; piece < pieces; piece++)); do
        dd if="$vm/vmlinuz-cloud" bs=1M skip="$piece" count=1 status=none | "$vm/busybox" tr '\000-\377' \
          "$(printf '\\%03o' "$key")-\\377\\000-$(printf '\\%03o' $((key - 1)))"
      done
    done
    pieces=3
  done | md5sum | cut -d ' ' -f 1
}

# conclude PATTERN: says what is of use when something failed, and how many checks went how.
conclude() {
  if ((failed)); then
    if [[ -e $dir/unequal ]]; then cat "$dir/unequal"; fi
    tail -n 20 "$dir/daemon.log"
    local guest
    for ((guest = 1; guest <= guests; guest++)); do
      echo "--- guest $guest"
      console "$guest" "$1|BUG|Oops|panic|Killed" | tail -n 15 || true
    done
  fi
  echo "$passed passed, $failed failed"
  ((failed == 0))
}
