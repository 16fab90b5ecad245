# Runs inside a test guest: the tests that concern its kernel.
. /bin/tests.sh
PAGEONE_GUEST_LINKED=/bin/guest-linked
PAGEONE_EARLY=/bin/early.so
PAGEONE_MODEL=/bin/model
# A guest of the tests that locks all its memory must fit.
GUEST_SHADOW_PAGES=81920
export PAGEONE_GUEST_LINKED PAGEONE_EARLY PAGEONE_MODEL GUEST_SHADOW_PAGES
say_who_waits 360
release=$(uname -r)
echo "Linux $release"
case $release in
6.1.*)
  try /tests/old_kernel --nocapture
  exit $failed
  ;;
esac
grep -qw ospke /proc/cpuinfo || try false # the processor has no protection keys
# Left out: what takes minutes here and asks no more of the kernel; what wants an agent that answers within 10 ms, or a map of memory as
# of later kernels. Each of the model's lists is tried once.
skip='--skip writer --skip whatever_fails --skip filter --skip handlers_locks_and_signals --skip children_of_every_kind
  --skip direct_io --skip forks_never_fall --skip the_programs_descriptors_are_its_own_alone
  --skip the_agents_own_memory_cannot_be_offered_when_it_is_linked'
export PAGEONE_MODEL_TRIES=1
for program in /tests/*; do
  [ "$program" = /tests/old_kernel ] && continue
  echo "== ${program##*/} at $(cut -d. -f1 /proc/uptime) s"
  # shellcheck disable=SC2086 # several words
  try "$program" --nocapture $skip
done
exit $failed
