# What runs test programs in guests have in common: tests/numa/run, tests/kernels/run. Sourced, in the root of the checkout.
#
#   tests_of CRATE/TEST...     builds all, and notes what a guest needs for these test programs, in `files`
#   in_guest NAME LEAST MOST BOOT_ARGUMENT...
#                              boots one; it must pass LEAST tests, and skip MOST of them at most
#   guests_passed KIND         the end: fails if a guest failed
#
# Consoles are kept in target/vm/NAME.log, what the tests say in NAME.out.
target=${CARGO_TARGET_DIR:-target}
vm=$target/vm
files=() failed_guests=()

tests_of() {
  local programs line test program wanted found=0 targets=() lib=()
  for wanted in "$@"; do
    # The tests inside a crate have its name.
    if [[ ${wanted%/*} == "${wanted#*/}" ]]; then lib=(--lib); else targets+=(--test "${wanted#*/}"); fi
  done
  cargo build -q --workspace --lib --bins --examples
  # The guest of the tests: with the agent preloaded, and linked in.
  cc -O2 -Wall -Wextra -pthread -o "$vm/guest" tests/guest/guest.c
  # CRATE/TEST PROGRAM of each test program; "executable" is null for anything else.
  mapfile -t programs < <(
    cargo test -q --no-run --workspace "${targets[@]}" "${lib[@]}" --message-format=json |
      sed -n 's|.*"manifest_path":"[^"]*/\([^/"]*\)/Cargo.toml".*"name":"\([^"]*\)".*"profile":{[^}]*"test":true[^}]*}.*"executable":"\([^"]*\)".*|\1/\2 \3|p' | sort -u
  )
  files=("$target/debug/pageone" "$target/debug/libpageone_agent.so" "$vm/guest" tests/vm/tests.sh)
  for line in "${programs[@]}"; do
    read -r test program <<<"$line"
    for wanted in "$@"; do
      if [[ $test == "$wanted" ]]; then
        files+=("$program:/tests/${test#*/}")
        found=$((found + 1))
      fi
    done
  done
  (($# == found)) || { echo "suite: $found of $# test programs found" >&2; exit 1; }
}

in_guest() {
  local name=$1 least=$2 most=$3 started=$SECONDS passed skipped
  shift 3
  if tests/vm/boot --log "$vm/$name.log" "$@" >"$vm/$name.out" 2>&1; then
    passed=$(awk '/^test result: ok/ {sum += $4} END {print sum + 0}' "$vm/$name.out")
    skipped=$(grep -c 'skipped: ' "$vm/$name.out" || true)
    echo "guest $name: $passed tests passed, $skipped of them skipped for want of something, $((SECONDS - started)) s"
    ((passed >= least)) || failed_guests+=("$name (ran only $passed tests)")
    ((skipped <= most)) || { grep 'skipped: ' "$vm/$name.out" >&2; failed_guests+=("$name (skipped more than $most tests)"); }
  else
    failed_guests+=("$name")
    grep -E 'FAILED|panicked|left:|right:|boot:|guest-exit|Out of memory|Kernel panic|Oops:|RIP:' -A2 "$vm/$name.out" | cut -c 1-300 | head -n 60 >&2 || true
    echo "the console's last lines:" >&2
    tail -n 80 "$vm/$name.log" | tr -d '\r' | cut -c 1-300 >&2
    echo "guest $name: FAILED after $((SECONDS - started)) s; console: $vm/$name.log" >&2
  fi
}

guests_passed() {
  if ((${#failed_guests[@]})); then
    echo "$1 guests that failed: ${failed_guests[*]}" >&2
    exit 1
  fi
}
