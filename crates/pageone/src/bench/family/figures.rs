//! The figures of the family: one table, from which records, reports and comparisons take names, units and directions.

/// Which way is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Better {
    Less,
    More,
    /// What tells how quiet the machine was, or how large the task.
    Neither,
}

/// One figure of a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Figure {
    /// Its name in the records; the unit is last.
    pub(super) name: &'static str,
    pub(super) better: Better,
    /// A change of the median by less than this is none, in the figure's unit.
    pub(super) grain: f64,
    /// One sentence.
    pub(super) about: &'static str,
}

const fn less(name: &'static str, grain: f64, about: &'static str) -> Figure {
    Figure {
        name,
        better: Better::Less,
        grain,
        about,
    }
}

const fn more(name: &'static str, grain: f64, about: &'static str) -> Figure {
    Figure {
        name,
        better: Better::More,
        grain,
        about,
    }
}

const fn neither(name: &'static str, about: &'static str) -> Figure {
    Figure {
        name,
        better: Better::Neither,
        grain: 0.0,
        about,
    }
}

/// All figures, in the order of a report.
pub(super) const FIGURES: &[Figure] = &[
    more(
        "saved_percent",
        0.5,
        "bytes saved of those that could be, when the saving had settled or the time was over",
    ),
    more(
        "net_percent",
        1.0,
        "the same less page tables, slab and the engine's own memory",
    ),
    neither(
        "available_percent",
        "what MemAvailable gained meanwhile, with all that others gave or took",
    ),
    more(
        "held_percent",
        1.0,
        "bytes saved of those that could be, mean over the time in which pages were rewritten",
    ),
    more(
        "lived_percent",
        1.0,
        "bytes saved of those that could be, mean over the lives of all guests",
    ),
    less(
        "first_s",
        0.05,
        "from the first offer to a saving of a hundredth of the most that could be",
    ),
    less(
        "t50_s",
        0.05,
        "from the offer until half of what could be saved was saved, net",
    ),
    less("t95_s", 0.05, "the same for 95 %"),
    less(
        "cpu_t95_s",
        0.02,
        "CPU time of engine and agents until then",
    ),
    less(
        "cpu_s",
        0.02,
        "CPU time of engine and agents, or of ksmd, from the offer on",
    ),
    less(
        "used_mib",
        1.0,
        "what programs and engine take when it has settled: anonymous memory by parts, stores, page tables",
    ),
    less(
        "left_mib",
        1.0,
        "what they take when they have freed all that they wrote in their turns",
    ),
    less(
        "turn_s",
        0.02,
        "time of a program for a turn of its work, while all work",
    ),
    less(
        "cpu_percent",
        0.3,
        "of one core for engine and agents, or for ksmd, while pages were rewritten",
    ),
    less(
        "work_ns",
        5.0,
        "CPU time of a guest for a step of its work, faults included",
    ),
    neither("work_before_ns", "the same before memory was offered"),
    more(
        "huge_percent",
        1.0,
        "of the guests' memory that lies in huge pages in the end",
    ),
    neither("huge_before_percent", "the same before memory was offered"),
    less(
        "faults_per_write",
        0.02,
        "page faults of the guests for a page that they rewrote",
    ),
    less(
        "metadata_mib",
        0.2,
        "page tables, slab and the engine's own memory",
    ),
    neither(
        "slab_mib",
        "of that the growth of the machine's slab, by whatever program",
    ),
    less(
        "break_p50_us",
        0.1,
        "the time of the first write to a merged page: half took at most so long",
    ),
    less("break_p99_us", 0.5, "the same for 99 of 100"),
    less("break_p999_us", 2.0, "the same for 999 of 1000"),
    less("break_max_us", 20.0, "the longest"),
    less(
        "break_cpu_us",
        0.1,
        "CPU time of the guest for such a write",
    ),
    neither(
        "read_before_p50_us",
        "reads before memory was offered: half took at most so long",
    ),
    neither("read_before_p99_us", "99 of 100"),
    neither("read_before_p999_us", "999 of 1000"),
    neither("read_before_max_us", "the longest"),
    less(
        "read_during_p50_us",
        0.05,
        "reads while memory was merged: half took at most so long",
    ),
    less("read_during_p99_us", 0.2, "99 of 100"),
    less("read_during_p999_us", 1.0, "999 of 1000"),
    less("read_during_max_us", 20.0, "the longest"),
    less(
        "read_after_p50_us",
        0.05,
        "reads after the saving had settled: half took at most so long",
    ),
    less("read_after_p99_us", 0.2, "99 of 100"),
    less("read_after_p999_us", 1.0, "999 of 1000"),
    less("read_after_max_us", 20.0, "the longest"),
    neither(
        "write_before_p50_us",
        "writes before memory was offered: half took at most so long",
    ),
    neither("write_before_p99_us", "99 of 100"),
    neither("write_before_p999_us", "999 of 1000"),
    neither("write_before_max_us", "the longest"),
    less(
        "write_during_p50_us",
        0.05,
        "writes while memory was merged: half took at most so long",
    ),
    less("write_during_p99_us", 0.2, "99 of 100"),
    less("write_during_p999_us", 1.0, "999 of 1000"),
    less("write_during_max_us", 20.0, "the longest"),
    less(
        "write_after_p50_us",
        0.05,
        "writes after the saving had settled: half took at most so long",
    ),
    less("write_after_p99_us", 0.2, "99 of 100"),
    less("write_after_p999_us", 1.0, "999 of 1000"),
    less("write_after_max_us", 20.0, "the longest"),
    less(
        "insert_ns",
        5.0,
        "CPU time to insert a key, with the most keys",
    ),
    less("hit_ns", 5.0, "the same to find a key that is there"),
    less("miss_ns", 5.0, "the same to find that a key is not there"),
    less("remove_ns", 5.0, "the same to remove a key"),
    less("key_bytes", 0.5, "memory of a key with its value"),
    less(
        "merge_ns",
        10.0,
        "the engine's time to merge a simulated page once, of the most pages",
    ),
    less(
        "quiet_ns",
        0.1,
        "its time for a page in a round in which nothing was written",
    ),
    less("page_bytes", 0.5, "what it keeps of a page"),
    more(
        "served_workers",
        5.0,
        "workers that take the busiest lock all the time: more merge no more, by a model",
    ),
    neither("ideal_mib", "what a perfect engine would save, at most"),
    neither(
        "stolen_percent",
        "time of the processors that the host of this machine took",
    ),
    neither(
        "others_percent",
        "time of the processors that processes beside the run took",
    ),
];

/// The figure called `name`.
pub(super) fn named(name: &str) -> Option<&'static Figure> {
    FIGURES.iter().find(|figure| figure.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn names_are_used_once_and_tell_their_unit() {
        let names: HashSet<_> = FIGURES.iter().map(|figure| figure.name).collect();
        assert_eq!(names.len(), FIGURES.len());
        for name in names {
            let unit = name.rsplit('_').next().unwrap();
            assert!(
                [
                    "percent", "s", "ns", "us", "mib", "write", "bytes", "workers"
                ]
                .contains(&unit),
                "{name}"
            );
        }
    }
}
