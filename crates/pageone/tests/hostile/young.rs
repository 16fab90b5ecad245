//! Early looks are fair: guests that have just come are merged in their first period, whatever strangers come beside them.

use std::time::Duration;

use crate::arena::Arena;

const PERIOD: Duration = Duration::from_secs(16);

/// Rounds alone would take three periods.
fn are_merged_in_a_period(verb: &str, args: &[&str]) {
    let period = format!("{}s", PERIOD.as_secs());
    let Some(mut arena) = Arena::empty(&["--merge-period", &period], None) else {
        return;
    };
    let _attacker = arena.attack(verb, args);
    let took = arena.joins_and_merges();
    println!("merged after {took:?}, beside {verb}");
    assert!(took < PERIOD, "{took:?}");
}

macro_rules! attacks {
    ($($name:ident: $verb:literal $($arg:literal)*;)*) => {$(
        #[test]
        fn $name() {
            are_merged_in_a_period($verb, &[$($arg),*]);
        }
    )*};
}

attacks! {
    beside_hundreds_that_are_as_young: "many-processes" "300";
    beside_joins_without_end: "map-storm" "60000";
    beside_hellos_without_end: "hello-storm" "8";
    beside_syncs_without_end: "sync-storm";
    beside_wishes_to_merge_without_end: "merge-storm" "8";
    beside_brief_wishes_without_end: "merge-storm" "8" "brief";
    beside_reads_that_do_not_return: "stall" "16";
    beside_a_million_chunks: "chunk-flood";
    beside_thousands_of_descriptors: "descriptor-bomb" "18900" "50";
    beside_an_agent_that_lies: "liar";
}
