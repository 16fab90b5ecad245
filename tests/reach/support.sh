# What tests/reach/run and the processes of its workloads have in common; sourced by both.
# shellcheck shell=bash disable=SC2154

# The environment of programs that tests/programs/prepare has fetched.
packaged() {
  local libraries=$target/programs/usr/lib/x86_64-linux-gnu
  export PATH=$target/programs/usr/sbin:$target/programs/usr/bin:$PATH
  export LD_LIBRARY_PATH=$libraries:$libraries/blas:$libraries/lapack:$target/programs/lib/x86_64-linux-gnu
}

# needs PROGRAM [NAME]: says what is lacking, if PROGRAM is not installed and not among the packages of NAME.
needs() {
  command -v "$1" >/dev/null && return
  [[ ${2:-} ]] || { echo "$1 is not installed" && return; }
  "$root/tests/programs/prepare" "$2" >&2 || { echo "$1 is not installed, and cannot be fetched" && return; }
  (packaged && command -v "$1" >/dev/null) || echo "the packages fetched have no $1"
}

# For workloads of which a shell asks a server: `load TURN` is timed, then `answer TURN` says what the server holds.
serve() {
  local line begun ended turn=0
  echo ready
  while read -r line && [[ $line == work ]]; do
    begun=$(date +%s%N)
    load "$turn" >&2
    ended=$(date +%s%N)
    echo "$(answer "$turn") $(((ended - begun) / 1000000))"
    turn=$((turn + 1))
  done
}
