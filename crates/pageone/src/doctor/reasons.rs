//! The reasons that the daemon gives why memory of a guest is not merged.

use wire::{KnobValues, WhyNot, WhyNotCode};

use super::check::Check;

/// No period shorter than this is advised: each costs guests faults and the engine time.
const SHORTEST_MS: u64 = 1000;

/// The check that tells of one, of process `pid` and with the daemon's knobs.
pub(super) fn check(reason: &WhyNot, pid: u32, knobs: &KnobValues) -> Check {
    use WhyNotCode as Code;
    let what = reason.why.clone();
    let part = "so much less is merged";
    let fail = |check, fix: String| {
        Check::fail(check, reason.why.clone(), "nothing of it is merged").fix(fix)
    };
    match reason.code {
        Code::Leaves => fail(
            "leaves",
            "pageone status  # it comes back in its new domain by itself".to_owned(),
        ),
        Code::Stuck => fail(
            "stuck",
            format!("ls -l /proc/{pid}/fd  # a file system that hangs, or pages nobody provides"),
        ),
        Code::NoAnswer => fail(
            "no-answer",
            format!("ps -o pid,stat,wchan {pid}  # is it stopped?"),
        ),
        Code::NoOffer => fail("no-offer", "pageone run --any -- CMD".to_owned()),
        Code::Limit => {
            Check::warn("limit", what, part).fix("sudoedit /etc/pageone/pageone.toml  # [limits]")
        }
        Code::Alone => {
            Check::warn("alone", what, part).fix("pageone status  # which domain have the others?")
        }
        Code::Busy => {
            let why = "pages are merged when they rest for two periods";
            Check {
                fix: shorter_period(knobs.merge_period_ms),
                ..Check::warn("busy", what, why)
            }
        }
        Code::Broken => Check::warn("broken", what, part).fix("pageone set merge_again=true"),
        Code::Pinned => Check::warn("pinned", what, part).fix(format!("ls -l /proc/{pid}/fd")),
        Code::Foreign => {
            Check::warn("foreign", what, part).fix(format!("grep pageone /proc/{pid}/maps"))
        }
        Code::Unfit => Check::warn("unfit", what, part)
            .fix(format!("grep VmFlags /proc/{pid}/smaps | sort | uniq -c")),
        Code::PutOff => {
            Check::warn("put-off", what, part).fix("sudo sysctl vm.max_map_count=1048576")
        }
        Code::Other => Check::warn("other", what, part).fix("pageone status"),
    }
}

/// Half the period, in which pages count as resting sooner. None where that would be too short.
fn shorter_period(period_ms: u64) -> Option<String> {
    let half = period_ms / 2;
    let text = match half % 1000 {
        0 => format!("{}s", half / 1000),
        _ => format!("{half}ms"),
    };
    (half >= SHORTEST_MS).then(|| format!("pageone set merge_period={text}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_period_is_halved_down_to_a_second() {
        let fixes = [20_000, 2500, 2000, 1999, 1000, 10].map(shorter_period);
        let fixes = fixes
            .each_ref()
            .map(|fix| fix.as_deref().unwrap_or_default());
        let set = "pageone set merge_period";
        let periods = ["10s", "1250ms", "1s"].map(|half| format!("{set}={half}"));
        let [long, odd, least] = periods.each_ref().map(String::as_str);
        assert_eq!(fixes, [long, odd, least, "", "", ""]);
        for fix in &fixes[..3] {
            let pair = fix.strip_prefix("pageone set ").unwrap();
            assert!(crate::knobs::pair(pair).is_ok(), "{pair}");
        }
    }
}
