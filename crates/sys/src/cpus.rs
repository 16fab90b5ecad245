//! The time of the machine's processors since it started: the first line of /proc/stat.

use std::fs;
use std::io;
use std::time::Duration;

/// CPU time of all processors together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuTimes {
    /// At any work on this machine.
    pub busy: Duration,
    /// Without work, or waiting for a disk.
    pub idle: Duration,
    /// Taken by the host of this virtual machine while there was work.
    pub stolen: Duration,
}

impl CpuTimes {
    /// Reads the present figures.
    ///
    /// # Errors
    /// Whatever reading gives; `InvalidData` when the line is not understood.
    pub fn read() -> io::Result<Self> {
        let text = fs::read_to_string("/proc/stat")?;
        Self::parse(&text).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// What they did since `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        Self {
            busy: self.busy.saturating_sub(before.busy),
            idle: self.idle.saturating_sub(before.idle),
            stolen: self.stolen.saturating_sub(before.stolen),
        }
    }

    /// Percent of the time that was stolen.
    #[must_use]
    pub fn stolen_percent(&self) -> f64 {
        let all = (self.busy + self.idle + self.stolen).as_secs_f64();
        100.0 * self.stolen.as_secs_f64() / all.max(1e-9)
    }

    /// The fields are user, nice, system, idle, iowait, irq, softirq, steal; guests' time is in user's already.
    fn parse(text: &str) -> Option<Self> {
        let line = text.lines().find_map(|line| line.strip_prefix("cpu "))?;
        let ticks = line.split_whitespace().map(|word| word.parse().ok());
        let ticks: Vec<u64> = ticks.collect::<Option<_>>()?;
        let &[user, nice, system, idle, iowait, irq, softirq, steal, ..] = &ticks[..] else {
            return None;
        };
        let tick = 1_000_000_000 / rustix::param::clock_ticks_per_second().max(1);
        let time = |ticks: u64| Duration::from_nanos(ticks * tick);
        Some(Self {
            busy: time(user + nice + system + irq + softirq),
            idle: time(idle + iowait),
            stolen: time(steal),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_is_of_all_processors() {
        let text = "cpu  100 0 50 800 20 0 10 20 5 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n";
        let times = CpuTimes::parse(text).unwrap();
        let tick = Duration::from_nanos(1_000_000_000 / rustix::param::clock_ticks_per_second());
        assert_eq!((times.busy, times.idle), (tick * 160, tick * 820));
        assert_eq!(times.stolen, tick * 20);
        assert_eq!(times.stolen_percent(), 2.0);
        assert_eq!(CpuTimes::parse("cpu 1 2 3\n"), None);
    }

    #[test]
    fn this_machine_has_worked() {
        let now = CpuTimes::read().unwrap();
        assert!(now.busy > Duration::ZERO);
        assert!(CpuTimes::read().unwrap().since(&now).busy < now.busy);
    }
}
