//! Short lists for easy mistakes, each a test with a name.
//!
//! The numbers of a line are: thread, call, kind, first page, pages, and what the call takes besides
//! (`tests/model/main.c`). Advice 4 is DONTNEED, 12 MERGEABLE.

use crate::common::alone;
use crate::list;
use crate::trial::{HugePages, Stage};

/// 64 pages that are merged: offered, equal to many others, and given time.
const MERGED: &str = "
    0 map private 0 64 16
    0 fill - 0 64 1 1
    0 madvise - 0 64 12
    0 settle
";
/// How often a list is tried: what the engine does in between is new each time.
const TRIES: usize = 2;
/// How often at most, until something is merged.
const MOST_TRIES: usize = 6;

/// Fails where a program sees another thing under PageONE than without it.
#[track_caller]
fn same(text: &str) {
    let _alone = alone();
    let _huge = text.contains("huge").then(HugePages::reserve);
    let stage = Stage::new();
    let lines = list::read(text);
    let mut stored = 0;
    let must_merge = text.contains("settle");
    let tries = crate::variable("PAGEONE_MODEL_TRIES").unwrap_or(TRIES);
    for done in 0..MOST_TRIES.max(tries) {
        // A slow machine may have merged nothing yet.
        if done >= tries && (stored > 0 || !must_merge) {
            break;
        }
        if let Some(found) = stage.difference(&lines, &mut stored) {
            panic!("{found}");
        }
    }
    assert!(
        stored > 0 || !must_merge,
        "nothing was merged: nothing was tested"
    );
}

/// As [`same`], preloaded and attached.
#[track_caller]
fn same_both_ways(text: &str) {
    for begin in ["", "0 attach\n"] {
        same(&format!("{begin}{text}"));
    }
}

/// As [`same`], over memory that is merged.
#[track_caller]
fn same_after_merging(text: &str) {
    same(&format!("{MERGED}{text}\n0 check"));
}

#[test]
fn a_shared_file_grows_as_a_file_beside_offered_memory() {
    same(
        "0 map private 0 64 16
         0 fill - 0 64 1 1
         0 madvise - 0 64 12
         0 map file 64 32 16 0
         0 mremap - 64 32 1 48
         0 fill - 64 48 3
         0 check",
    );
}

#[test]
fn a_program_registers_its_userfaultfd_right_after_detaching() {
    same(
        "0 map private 944 80 16 77 0
         0 madvise - 944 80 12
         0 attach
         0 check
         0 detach
         1 userfaultfd - 939 8 3",
    );
}

#[test]
fn advice_on_pinned_memory_stays_when_it_is_made_whole() {
    // 1 RANDOM, 2 SEQUENTIAL, 10 DONTFORK, 16 DONTDUMP: given where pinned pages lie among merged ones.
    same_after_merging(
        "0 pin - 8 8
         0 check
         0 madvise - 4 8 2
         0 madvise - 12 8 1
         0 madvise - 8 4 10
         0 madvise - 12 4 16
         0 unpin - 0 1
         0 unpin - 0 1
         0 fill - 0 64 1 1
         0 settle
         0 settle
         0 settle
         0 take-back",
    );
}

#[test]
fn a_file_mapped_where_a_freed_block_was_stays_a_file() {
    same(
        "0 malloc - 1 700 3
         0 block-offer - 1
         0 settle
         0 block-becomes-file - 1
         0 check",
    );
}

#[test]
fn a_lock_of_one_buffer_says_nothing_of_the_next() {
    same_after_merging(
        "0 map private 100 4 16
         0 mlock - 100 4
         0 madvise - 0 16 4
         0 check
         0 mlock - 32 16
         0 munlock - 100 4
         0 madvise - 32 16 4",
    );
}

#[test]
fn memory_kept_from_children_is_that_and_no_more() {
    same_after_merging(
        "0 madvise - 5 1 10
         0 look
         0 settle
         0 look
         0 family fork 8 4 2
         0 madvise - 5 1 11",
    );
}

#[test]
fn memory_wiped_for_children_is_wiped() {
    same_after_merging(
        "0 madvise - 8 8 18
         0 settle
         0 family fork 0 16 2
         0 look
         0 madvise - 8 8 19
         0 family fork 0 16 2",
    );
}

#[test]
fn memory_that_moves_keeps_what_was_said_of_it() {
    same_after_merging(
        "0 madvise - 0 16 10
         0 madvise - 16 16 16
         0 madvise - 32 16 14
         0 mlock - 48 16
         0 settle
         0 mremap - 0 16 3 16 128
         0 mremap - 16 16 3 24 160
         0 mremap - 32 16 3 16 192
         0 mremap - 48 16 3 32 224
         0 look
         0 settle",
    );
}

#[test]
fn merged_memory_moves_grows_and_shrinks_as_one() {
    same_after_merging(
        "0 mremap - 0 64 3 64 128
         0 settle
         0 mremap - 128 64 1 100
         0 settle
         0 mremap - 128 100 0 40
         0 mremap - 128 40 7 40 256
         0 check
         0 mremap - 256 40 5 20
         0 mremap - 256 40 0 41",
    );
}

#[test]
fn guards_are_put_up_and_taken_down() {
    same_after_merging(
        "0 madvise - 4 8 102
         0 check
         0 fill - 0 16 5
         0 settle
         0 madvise - 6 4 103
         0 check
         0 fill - 6 4 2",
    );
}

#[test]
fn a_file_can_be_punched_beside_merged_memory() {
    same_after_merging(
        "0 map memfd 64 32 16 3
         0 madvise - 64 16 9
         0 check
         0 madvise - 0 16 9
         0 madvise - 60 8 9",
    );
}

#[test]
fn a_stack_that_was_offered_still_grows() {
    same_after_merging(
        "0 map growsdown 1500 16 16
         0 fill - 1500 16 1 1
         0 madvise - 1500 16 12
         0 settle
         0 below - 1500 1
         0 check
         0 settle
         0 below - 1499 1
         0 check",
    );
}

#[test]
fn a_memory_policy_is_kept_and_nobody_elses() {
    same_after_merging(
        "0 mbind - 16 16 2 0
         0 look
         0 settle
         0 mremap - 0 64 3 64 128
         0 look
         0 mbind - 128 64 0 0",
    );
}

#[test]
fn sealed_memory_can_be_discarded_and_nothing_else() {
    same_after_merging(
        "0 mseal - 0 32
         0 madvise - 0 16 4
         0 check
         0 munmap - 16 4
         0 mprotect - 16 4 1
         0 mremap - 16 4 3 4 128
         0 map private 16 4 16
         0 settle
         0 fill - 16 8 3",
    );
}

#[test]
fn memory_is_populated_cooled_and_paged_out_as_it_is() {
    same_after_merging(
        "0 madvise - 0 32 22
         0 madvise - 16 32 23
         0 check
         0 madvise - 0 64 20
         0 madvise - 0 64 21
         0 madvise - 0 64 3
         0 check",
    );
}

#[test]
fn a_mapping_that_may_replace_nothing_replaces_no_merged_memory() {
    const FIXED_NOREPLACE: u32 = 0x10_0010;
    same_after_merging(&format!(
        "0 map private 16 8 {FIXED_NOREPLACE}
         0 map shared 20 8 {FIXED_NOREPLACE}
         0 check
         0 munmap - 16 8
         0 map private 16 8 {FIXED_NOREPLACE}
         0 check"
    ));
}

/// Where the processor has no protection keys the kernel is asked with none.
#[test]
fn keys_policies_and_nodes_are_those_of_any_memory() {
    same_after_merging(
        "0 pkey_mprotect - 0 16 1 0
         0 pkey_mprotect - 16 16 3 1
         0 home-node - 0 64 0
         0 set_mempolicy - 0 1 1
         0 fill - 40 4 9 1
         0 set_mempolicy - 0 1 0
         0 remap_file_pages - 0 16 32
         0 move_pages - 32 16 0
         0 check",
    );
}

#[test]
fn advice_through_a_descriptor_of_oneself_is_advice() {
    same_after_merging(
        "0 process_madvise - 0 16 4
         0 check
         0 process_madvise - 10 16 10
         0 process_madvise - 30 8 102",
    );
}

#[test]
fn what_takes_the_place_of_offered_memory_is_not_offered() {
    same(
        "0 malloc - 1 700 3
         0 malloc - 2 700 3
         0 block-offer - 1
         0 block-offer - 2
         0 settle
         0 dealloc - 1
         0 malloc - 1 700 3
         0 settle
         0 settle
         0 settle
         0 settle
         0 block-stores - 1
         0 map private 0 64 16
         0 fill - 0 64 1 1
         0 madvise - 0 64 12
         0 settle
         0 raw-munmap - 0 64
         0 map private 0 64 16
         0 fill - 0 64 1 1
         0 settle
         0 settle
         0 settle
         0 settle
         0 stores - 0 64",
    );
}

#[test]
fn a_freed_block_gives_way_to_any_other_memory() {
    same(
        "0 malloc - 1 700 3
         0 block-offer - 1
         0 settle
         0 realloc - 1 300
         0 check
         0 settle
         0 realloc - 1 700
         0 check
         0 dealloc - 1
         0 trim
         0 malloc - 2 700 4
         0 check
         0 stack-begin - 0 0 3
         0 settle
         0 stack-end - 0
         0 stack-begin - 1 0 4
         0 stack-end - 1
         0 brk - 0 0 300
         0 heap-fill - 0 300 2
         0 heap-madvise - 0 300 12
         0 settle
         0 brk - 0 0 -200
         0 brk - 0 0 200
         0 check",
    );
}

#[test]
fn a_page_that_is_pinned_keeps_what_was_said_of_it() {
    same(
        "0 map stack 0 64 16 2
         0 fill - 0 64 4 1
         0 madvise - 0 64 12
         0 settle
         0 pin - 16 1
         0 take-back
         0 check",
    );
}

#[test]
fn a_program_may_watch_offered_memory_itself() {
    same_after_merging(
        "0 userfaultfd - 0 64 1
         0 userfaultfd - 0 64 2
         0 userfaultfd - 16 8 3
         0 check
         0 settle",
    );
}

#[test]
fn names_are_given_and_taken_and_change_no_byte() {
    same_after_merging(
        "0 name - 8 16
         0 check
         0 name - 60 16
         0 settle
         0 name - 8 8 1
         0 madvise - 0 16 4
         0 take-back",
    );
}

#[test]
fn a_segment_over_merged_memory_is_the_segment() {
    same_after_merging(
        "0 shmat - 16 16 3
         0 madvise - 8 16 4
         0 check
         0 madvise - 0 64 12
         0 settle
         0 family fork 0 64 2
         0 shmdt
         0 check
         0 map private 16 16 16
         0 fill - 16 16 1 1
         0 settle",
    );
}

/// 2: places without a page are left out.
#[test]
fn pages_move_out_of_merged_memory_and_none_is_lost() {
    same_after_merging(
        "0 move-away - 8 16
         0 check
         0 madvise - 4 8 4
         0 move-away - 0 64 2
         0 settle
         0 move-away - 0 64 2",
    );
}

#[test]
fn an_agent_that_comes_into_a_running_program_is_as_one_from_the_start() {
    same(
        "0 map private 0 64 16
         0 fill - 0 64 1 1
         0 madvise - 0 64 12
         0 malloc - 1 700 3
         0 block-offer - 1
         1 attach
         0 settle
         0 madvise - 0 16 4
         0 madvise - 16 8 10
         0 mprotect - 24 8 1
         0 mremap - 32 32 3 32 128
         0 check
         0 realloc - 1 300
         0 settle
         0 family fork 0 64 2
         0 check
         0 take-back",
    );
}

#[test]
fn an_agent_that_goes_leaves_the_kernels_own_memory() {
    same(
        "0 map private 0 64 16
         0 fill - 0 64 1 1
         0 madvise - 0 64 12
         0 attach
         0 settle
         0 madvise - 0 16 4
         0 fill - 20 4 3
         2 detach
         0 check
         0 madvise - 16 16 4
         0 check
         0 attach
         0 settle
         0 madvise - 40 8 4
         0 check
         0 detach
         0 madvise - 0 64 4
         0 take-back",
    );
}

#[test]
fn executable_memory_is_the_programs_own_when_the_agent_goes() {
    same(
        "0 attach
         0 map private 0 64 16
         0 fill - 0 64 1 1
         0 madvise - 0 64 12
         0 settle
         0 mprotect - 8 4 7
         0 mprotect - 20 4 5
         0 detach
         0 madvise - 0 16 4
         0 take-back",
    );
}

#[test]
fn every_kind_of_child_has_all_memory() {
    same_after_merging(
        "0 family fork 0 64 2
         0 family _Fork 0 64 3
         0 family clone 0 64 4
         0 family vfork 0 64 5
         1 family fork 0 64 6",
    );
}

#[test]
fn what_lies_where_a_hole_would_go_keeps_its_attributes() {
    same(
        "0 heap-here - 1040 1
         0 brk - 0 0 160
         0 heap-fill - 0 160 2
         0 heap-madvise - 0 160 12
         0 map locked 64 128 16 91
         0 madvise - 864 512 14
         0 settle
         2 mremap - 176 512 7 512 784
         0 take-back",
    );
}

#[test]
fn a_child_has_none_of_its_parents_locks() {
    same_after_merging(
        "0 mlock - 0 32
         0 settle
         0 family fork 0 64 2
         0 munlock - 0 16
         0 family fork 0 64 3",
    );
}

#[test]
fn discards_of_every_sort_bring_zeros() {
    same_after_merging(
        "0 madvise - 0 8 4
         0 free-lazily - 8 8 2
         0 madvise - 16 8 24
         0 mprotect - 24 8 1
         0 madvise - 24 8 4
         0 mprotect - 32 8 0
         0 madvise - 32 8 4
         0 map private 40 8 16
         0 munmap - 48 8
         0 settle
         0 madvise - 0 64 4",
    );
}

/// Two mappings that the kernel tells the same of, and keeps apart: the second was moved there. A window may leave memory so.
#[test]
fn sealed_memory_in_several_mappings_cannot_be_remapped() {
    same(
        "0 map private 0 8 16
         0 fill - 0 8 1 1
         0 map private 16 8 16
         0 fill - 16 8 1 1
         0 mremap - 16 8 3 8 8
         0 madvise - 0 16 12
         0 settle
         0 mseal - 0 16
         0 mremap - 0 16 1 16
         0 mremap - 0 16 1 12
         0 map private 100 16 16
         0 fill - 100 16 3 1
         0 mremap - 0 16 3 12 100
         0 mremap - 0 16 3 16 100
         0 check",
    );
}

/// A call that the kernel refuses leaves the target as it is. What may be pinned of the memory lies in a store's mapping, so it is several.
#[test]
fn sealed_memory_that_cannot_move_leaves_the_target_alone() {
    same_both_ways(
        "0 map private 0 64 16
         0 fill - 0 64 4 1
         0 madvise - 0 64 12
         0 settle
         0 pin - 16 8
         0 mseal - 0 64
         0 map private 100 64 16
         0 fill - 100 64 3 1
         0 mremap - 0 64 3 32 100
         0 mremap - 0 64 3 64 100
         0 mremap - 0 64 7 64 100
         0 check",
    );
}

/// A target that may not be given up, as a part of it is sealed or a piece of a huge page: nothing moves, though merging has divided
/// the memory.
#[test]
fn a_target_that_cannot_go_leaves_memory_where_it_is() {
    same_both_ways(
        "0 map private 0 64 16
         0 fill - 0 64 4 1
         0 madvise - 0 64 12
         0 settle
         0 pin - 16 8
         0 map private 100 64 16
         0 fill - 100 64 3 1
         0 mseal - 140 1
         0 mremap - 0 64 3 64 100
         0 mremap - 0 64 3 32 120
         0 check
         0 map huge 512 512 16
         0 mremap - 0 64 3 64 600
         0 mremap - 0 64 3 32 600
         0 check
         0 mremap - 0 64 3 64 300
         0 check",
    );
}

/// Pages that may be pinned lie in a store's mapping. Where that stays and they go, zeros are left behind, and not the store's content.
#[test]
fn pinned_pages_that_move_leave_zeros_behind() {
    same_both_ways(
        "0 map private 0 128 16
         0 fill - 0 128 4 1
         0 madvise - 0 128 12
         0 settle
         0 pin - 16 64
         0 mremap - 40 8 7 8 200
         0 check
         0 fill - 44 2 5 1
         0 settle
         0 check",
    );
}

/// The target of a call that has none is whatever the register held.
#[test]
fn a_mapping_of_huge_pages_shrinks_in_place() {
    same_both_ways(
        "0 map huge 0 512 16
         0 mremap - 0 64 1 32 864
         0 check",
    );
}

/// What calls of the agent's have left on a thread's stack leads nowhere.
#[test]
fn an_agent_goes_while_threads_wait_that_have_called_it() {
    same(
        "0 attach
         0 map memfd 32 256 16 41
         0 madvise - 32 256 12
         1 madvise - 335 1 14
         1 mbind - 32 2 3 1
         2 mbind - 32 2 3 1
         2 madvise - 335 1 14
         0 detach",
    );
}

/// What is pinned keeps its frame when it is freed lazily, so what is read through the pin is in the memory.
#[test]
fn pinned_memory_that_is_freed_lazily_keeps_its_frames() {
    same_both_ways(
        "0 map private 0 128 16
         0 fill - 0 128 4 1
         0 madvise - 0 128 12
         0 settle
         0 pin - 16 16
         0 free-lazily - 0 128
         0 fixed-read - 20 1 101
         0 check
         0 fixed-write - 21 1 105
         0 check",
    );
}

/// Pages that may be pinned stay in a store's mapping, and it is sealed with them: nothing takes its place any more.
#[test]
fn pinned_memory_that_is_sealed_takes_all_calls() {
    same_both_ways(
        "0 heap-here - 500 1
         0 brk - 0 0 160
         0 heap-fill - 0 160 5
         0 heap-madvise - 0 160 12
         0 settle
         0 pin - 608 32
         0 mseal - 592 60
         0 unpin - 0 1
         0 mlock-onfault - 560 100
         0 check
         0 munlock - 560 100
         0 madvise - 620 8 4
         0 free-lazily - 612 4
         0 mprotect - 620 8 1
         0 mremap - 620 8 3 8 740
         0 munmap - 620 8
         0 check
         0 madvise - 560 100 12
         0 settle
         0 family fork 600 64 4
         0 madvise - 560 100 4
         0 check",
    );
}

/// Merging divides mappings, and the kernel moves what lies before the part whose target it refuses: here a part of a huge page.
#[test]
fn a_move_to_a_target_that_may_not_be_unmapped_moves_nothing() {
    same(
        "0 map private 240 128 16 27
         0 map private 368 64 16 28
         0 fill - 368 64 4 1
         0 madvise - 368 64 12
         0 map huge 1024 512 16 28
         0 settle
         0 mremap - 289 512 3 512 888
         0 look",
    );
}

/// What lies before a hole and what lies behind it are moved each for itself.
#[test]
fn a_move_of_what_has_a_hole_moves_what_the_kernel_moves() {
    same(
        "0 map private 0 128 16 27
         0 fill - 0 64 1 1
         0 madvise - 0 64 12
         0 map private 160 128 16 28
         0 fill - 224 64 1 1
         0 madvise - 224 64 12
         0 map huge 1024 512 16 28
         0 settle
         0 mremap - 0 288 3 288 600
         0 look
         0 mremap - 600 288 3 288 856
         0 look",
    );
}
