# Runs inside a test guest: every test program there is, then the views for the record.
# NODES, the number of nodes the guest must have, is on the kernel's command line.
PAGEONE_TEST_NODES=$(sed -n 's/.*pageone.nodes=\([0-9]*\).*/\1/p' /proc/cmdline)
export PAGEONE_TEST_NODES
. /bin/tests.sh
# For cpusets, and limits of memory.
mkdir -p /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup && echo "+cpuset +memory" >/sys/fs/cgroup/cgroup.subtree_control
say_who_waits 240
if grep -q pageone.unplug /proc/cmdline; then
  export PAGEONE_TEST_UNPLUG=1
  try /tests/nodes --nocapture a_node_whose_memory
  exit $failed
fi
if grep -q pageone.hashdist /proc/cmdline; then
  # Before anything else has taken and given back memory.
  try pageone bench hashdist
fi
for program in /tests/*; do
  echo "== ${program##*/}"
  filters=
  # Of the system-call wrappers only those that know of nodes: the rest is the same on every machine.
  case $program in
  */sys) filters='mempolicy node residence zeroed' ;;
  */nodes) filters=$(sed -n 's/.*pageone.some=\([^ ]*\).*/\1/p' /proc/cmdline | tr , ' ') ;;
  esac
  # shellcheck disable=SC2086 # several words
  try "$program" --nocapture $filters
done
try pageone numa topology
try pageone numa memory
exit $failed
