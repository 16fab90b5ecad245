//! The counters in the text format of Prometheus: names end in their unit, counters in `_total`.
//!
//! This is the only place that names metrics. The number of series is bounded: guests beyond the most that are asked for, and
//! domains and nodes beyond [`STORES`], are summed up.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeGaugeValue, text::encode_registry};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;
use sys::ksm::Ksm;
use wire::{GuestStatus, Recycled, Status, StoreNode};

/// What [`text`] gives.
pub(super) const KIND: &str = "text/plain; version=0.0.4; charset=utf-8";
/// Pairs of domain and node that are named.
const STORES: usize = 256;

/// All metrics; without a status those of KSM alone, and `pageone_up` says so. At most `guests` guests are named.
pub(super) fn text(
    status: Option<Arc<Status>>,
    ksm: &Ksm,
    guests: usize,
) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Metrics {
        status,
        ksm: ksm.clone(),
        guests,
    }));
    let mut text = String::new();
    encode_registry(&mut text, &registry)?;
    Ok(text)
}

#[derive(Debug)]
struct Metrics {
    status: Option<Arc<Status>>,
    ksm: Ksm,
    guests: usize,
}

impl Collector for Metrics {
    fn encode(&self, to: DescriptorEncoder<'_>) -> fmt::Result {
        let mut to = Writer(to);
        let up = i64::from(self.status.is_some());
        to.gauge("pageone_up", "Whether the daemon answers", up)?;
        if let Some(status) = &self.status {
            let sees_all = i64::from(status.only_user.is_none());
            to.gauge(
                "pageone_sees_all_guests",
                "Whether guests of all users are counted, not only those of the user of pageone-serve",
                sees_all,
            )?;
            whole(&mut to, status)?;
            stores(&mut to, status)?;
            guests(&mut to, &status.guests, self.guests)?;
        }
        kernel(&mut to, &self.ksm)
    }
}

/// Writes one metric after the other.
struct Writer<'a>(DescriptorEncoder<'a>);

impl Writer<'_> {
    fn gauge(&mut self, name: &str, help: &str, value: impl EncodeGaugeValue) -> fmt::Result {
        let mut metric = self
            .0
            .encode_descriptor(name, help, None, MetricType::Gauge)?;
        metric.encode_gauge(&value)
    }

    /// A value for each of `rows`, which have `names` as labels.
    fn gauges<const N: usize, V: EncodeGaugeValue>(
        &mut self,
        name: &str,
        help: &str,
        names: [&str; N],
        rows: impl IntoIterator<Item = ([String; N], V)>,
    ) -> fmt::Result {
        self.rows(MetricType::Gauge, (name, help), names, rows)
    }

    /// As [`Writer::gauges`], of counters; see [`Writer::counter`].
    fn counters<const N: usize, V: EncodeGaugeValue>(
        &mut self,
        name: &str,
        help: &str,
        names: [&str; N],
        rows: impl IntoIterator<Item = ([String; N], V)>,
    ) -> fmt::Result {
        self.rows(MetricType::Counter, (name, help), names, rows)
    }

    fn rows<const N: usize, V: EncodeGaugeValue>(
        &mut self,
        kind: MetricType,
        (name, help): (&str, &str),
        names: [&str; N],
        rows: impl IntoIterator<Item = ([String; N], V)>,
    ) -> fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, None, kind)?;
        for (values, value) in rows {
            let labels: Vec<_> = names
                .iter()
                .copied()
                .zip(values.iter().map(String::as_str))
                .collect();
            metric.encode_family(&labels)?.encode_gauge(&value)?;
        }
        Ok(())
    }

    /// `name` ends in `_total`. The library's own counters have OpenMetrics' form, whose names differ from line to line.
    fn counter(&mut self, name: &str, help: &str, value: f64) -> fmt::Result {
        let to = &mut self.0;
        let mut metric = to.encode_descriptor(name, help, None, MetricType::Counter)?;
        metric.encode_gauge(&value)
    }
}

#[expect(
    clippy::cast_precision_loss,
    reason = "Prometheus has floating-point numbers"
)]
fn whole(to: &mut Writer<'_>, status: &Status) -> fmt::Result {
    to.gauge(
        "pageone_saved_bytes",
        "Memory given back and still saved",
        status.saved_bytes,
    )?;
    to.gauge(
        "pageone_net_saved_bytes",
        "The same less all overhead",
        status.net_saved_bytes,
    )?;
    to.gauge(
        "pageone_store_bytes",
        "Canonical pages held",
        status.store_bytes,
    )?;
    to.gauge(
        "pageone_metadata_bytes",
        "Memory of engine and agents",
        status.metadata_bytes,
    )?;
    let states = [
        ("shared", status.pages_shared),
        ("sharing", status.pages_sharing),
        ("unshared", status.pages_unshared),
        ("volatile", status.pages_volatile),
        ("zero", status.zero_pages),
        ("skipped", status.pages_skipped),
    ];
    let states = states.map(|(state, pages)| ([state.to_owned()], pages));
    to.gauges(
        "pageone_pages",
        "Pages present in all guests, each in one state",
        ["state"],
        states,
    )?;
    let reasons = [
        ("broken", status.pages_broken),
        ("pinned", status.pages_pinned),
        ("foreign", status.pages_foreign),
        ("unfit", status.pages_unfit),
        ("put off", status.pages_put_off()),
    ];
    let reasons = reasons.map(|(reason, pages)| ([reason.to_owned()], pages));
    to.gauges(
        "pageone_skipped_pages",
        "The skipped pages, by reason",
        ["reason"],
        reasons,
    )?;
    let help = "CPU time of the engine and of all agents";
    to.counter("pageone_cpu_seconds_total", help, status.cpu_seconds)?;
    to.counter(
        "pageone_full_scans_total",
        "Rounds over all regions",
        status.full_scans as f64,
    )?;
    let again = status.pages_merged_again as f64;
    to.counter(
        "pageone_merged_again_pages_total",
        "Pages merged once more after a write",
        again,
    )?;
    let recycled = ways(status.pages_recycled).map(|(way, pages)| ([way.to_owned()], pages));
    to.counters(
        "pageone_recycled_pages_total",
        "Pages that guests gave up, by way",
        ["way"],
        recycled,
    )?;
    let over = status.pages_over_limit as f64;
    to.counter(
        "pageone_over_limit_pages_total",
        "Pages that got no copy because of store_limit",
        over,
    )?;
    let window = status.window_max_us as f64 / 1e6;
    to.gauge(
        "pageone_window_max_seconds",
        "The longest time a page was out of reach",
        window,
    )?;
    let period = status.effective_period_ms as f64 / 1e3;
    to.gauge(
        "pageone_period_seconds",
        "The time between two looks",
        period,
    )?;
    to.gauge(
        "pageone_threads",
        "Workers at work at a time",
        u32::from(status.knobs.threads),
    )?;
    let run = u32::from(u8::from(status.knobs.run));
    to.gauge("pageone_run", "0 stopped, 1 merging, 2 unmerging", run)?;
    let unserved = status.unserved.len() as u64;
    to.gauge(
        "pageone_unserved_processes",
        "Processes that are refused as guests",
        unserved,
    )
}

/// The ways in which pages come back, as `--json` names them.
fn ways(recycled: Recycled) -> [(&'static str, u64); 3] {
    let Recycled {
        discarded,
        zeroed,
        told,
    } = recycled;
    [("discarded", discarded), ("zeroed", zeroed), ("told", told)]
}

fn stores(to: &mut Writer<'_>, status: &Status) -> fmt::Result {
    let (named, others) = status
        .store_nodes
        .split_at(STORES.min(status.store_nodes.len()));
    let rows = |count: fn(&StoreNode) -> u64| {
        // Names may be shown alike that are not the same: one of them seems escaped.
        let mut sums = BTreeMap::<_, u64>::new();
        for store in named {
            let labels = [store.domain.to_string(), store.node.to_string()];
            *sums.entry(labels).or_default() += count(store);
        }
        sums
    };
    let (pages, astray) = (|at: &StoreNode| at.pages, |at: &StoreNode| at.astray);
    let help = "Canonical pages by domain and node";
    let names = ["domain", "node"];
    to.gauges("pageone_store_pages", help, names, rows(pages))?;
    let help = "Those of them that belong to the store of another node";
    to.gauges("pageone_store_astray_pages", help, names, rows(astray))?;
    to.gauge(
        "pageone_other_store_pages",
        "Canonical pages of all further domains and nodes",
        others.iter().map(pages).sum::<u64>(),
    )?;
    to.gauge(
        "pageone_other_store_astray_pages",
        "Those of them that belong to the store of another node",
        others.iter().map(astray).sum::<u64>(),
    )
}

fn guests(to: &mut Writer<'_>, all: &[GuestStatus], most: usize) -> fmt::Result {
    to.gauge("pageone_guests", "Guests", all.len() as u64)?;
    let silent = all.iter().filter(|guest| !guest.responsive).count() as u64;
    to.gauge(
        "pageone_unresponsive_guests",
        "Guests whose agent does not answer",
        silent,
    )?;
    let mut ranked: Vec<_> = all.iter().collect();
    ranked.sort_by_key(|guest| std::cmp::Reverse(guest.saved_bytes));
    let (named, others) = ranked.split_at(most.min(ranked.len()));
    figures(to, named)?;
    recycled(to, named)?;
    let rest: u64 = others.iter().map(|guest| guest.saved_bytes).sum();
    to.gauge(
        "pageone_other_guests_saved_bytes",
        "The saving of all guests that are not named",
        rest,
    )
}

/// The labels of a guest.
const LABELS: [&str; 4] = ["pid", "comm", "name", "domain"];

/// Their values. Without a name its label is empty, which is for Prometheus as if it were not there. A process may take another name at any
/// time, and each would begin series of its own: so `comm` is the one that it joined with.
fn labels(guest: &GuestStatus) -> [String; 4] {
    let comm = match guest.joined_as.raw() {
        "" => &guest.comm,
        _ => &guest.joined_as,
    };
    let name = guest.name.as_ref().map(ToString::to_string);
    [
        guest.pid.to_string(),
        comm.to_string(),
        name.unwrap_or_default(),
        guest.domain.to_string(),
    ]
}

/// What has one value for each guest.
fn figures(to: &mut Writer<'_>, named: &[&GuestStatus]) -> fmt::Result {
    fn rows<V>(
        named: &[&GuestStatus],
        value: fn(&GuestStatus) -> V,
    ) -> impl Iterator<Item = ([String; 4], V)> {
        named.iter().map(move |guest| (labels(guest), value(guest)))
    }
    to.gauges(
        "pageone_guest_saved_bytes",
        "A guest's part of the saving",
        LABELS,
        rows(named, |guest| guest.saved_bytes),
    )?;
    to.gauges(
        "pageone_guest_net_saved_bytes",
        "The same less its tables, agent and mappings",
        LABELS,
        rows(named, |guest| guest.net_saved_bytes),
    )?;
    to.gauges(
        "pageone_guest_pages",
        "Pages present in a guest's regions",
        LABELS,
        rows(named, |guest| guest.pages),
    )?;
    to.counters(
        "pageone_guest_cpu_seconds_total",
        "CPU time of a guest's agent",
        LABELS,
        rows(named, |guest| guest.cpu_seconds),
    )
}

/// The pages that came back from each guest, by way.
fn recycled(to: &mut Writer<'_>, named: &[&GuestStatus]) -> fmt::Result {
    let rows = named.iter().flat_map(|guest| {
        let [pid, comm, name, domain] = labels(guest);
        ways(guest.pages_recycled).map(|(way, pages)| {
            let [pid, comm, name, domain] = [&pid, &comm, &name, &domain].map(String::clone);
            ([pid, comm, name, domain, way.into()], pages)
        })
    });
    to.counters(
        "pageone_guest_recycled_pages_total",
        "Pages that a guest gave up, by way",
        ["pid", "comm", "name", "domain", "way"],
        rows,
    )
}

/// The kernel's own deduplication, for comparison; as far as it tells.
fn kernel(to: &mut Writer<'_>, ksm: &Ksm) -> fmt::Result {
    let states = ["shared", "sharing", "unshared", "volatile", "skipped"];
    let rows = states.iter().filter_map(|state| {
        let pages = ksm.number(&format!("pages_{state}")).ok()?;
        Some(([(*state).to_owned()], pages))
    });
    to.gauges("pageone_ksm_pages", "KSM's pages by state", ["state"], rows)?;
    if let Ok(run) = ksm.number("run") {
        to.gauge("pageone_ksm_run", "KSM's run", run)?;
    }
    let profit = ksm.read("general_profit").ok();
    if let Some(profit) = profit.and_then(|text| text.trim().parse::<i64>().ok()) {
        to.gauge(
            "pageone_ksm_profit_bytes",
            "KSM's own estimate of its net saving",
            profit,
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guest(pid: u32, saved_bytes: u64) -> GuestStatus {
        GuestStatus {
            pid,
            comm: "a\"b\n\x1b".into(),
            saved_bytes,
            ..GuestStatus::default()
        }
    }

    fn lines(status: &Status, guests: usize) -> String {
        text(
            Some(Arc::new(status.clone())),
            &Ksm::at("/nonexistent"),
            guests,
        )
        .unwrap()
    }

    #[test]
    fn guests_are_bounded_and_the_others_summed_up() {
        let guests = (0..10).map(|n| guest(n, u64::from(n) << 20)).collect();
        let status = Status {
            guests,
            saved_bytes: 45 << 20,
            cpu_seconds: 1.5,
            ..Status::default()
        };
        let text = lines(&status, 2);
        assert_eq!(
            text.matches("pageone_guest_saved_bytes{").count(),
            2,
            "{text}"
        );
        assert!(
            text.contains("pageone_guest_saved_bytes{pid=\"9\""),
            "{text}"
        );
        let rest = format!("pageone_other_guests_saved_bytes {}\n", 28 << 20);
        assert!(text.contains(&rest), "{text}");
        assert!(text.contains("pageone_cpu_seconds_total 1.5\n"), "{text}");
        assert!(
            text.contains("pageone_pages{state=\"shared\"} 0\n"),
            "{text}"
        );
        assert!(!text.contains('\x1b'), "{text}");
        for line in text.lines() {
            let quotes = line.replace("\\\\", "").replace("\\\"", "");
            assert!(quotes.matches('"').count().is_multiple_of(2), "{line}");
        }
    }

    #[test]
    fn net_saving_and_cpu_time_are_told_by_guest() {
        let mut guests: Vec<_> = (1..=3).map(|n| guest(n, u64::from(n))).collect();
        guests[2].net_saved_bytes = -4096;
        guests[2].cpu_seconds = 1.25;
        let status = Status {
            guests,
            ..Status::default()
        };
        let text = lines(&status, 2);
        for (name, kind, value) in [
            ("pageone_guest_net_saved_bytes", "gauge", "-4096"),
            ("pageone_guest_cpu_seconds_total", "counter", "1.25"),
        ] {
            let kind = format!("# TYPE {name} {kind}\n");
            assert!(text.contains(&kind), "no {kind}: {text}");
            let start = format!("{name}{{pid=");
            let rows: Vec<_> = text
                .lines()
                .filter(|line| line.starts_with(&start))
                .collect();
            assert_eq!(rows.len(), 2, "those that save most: {text}");
            let begin = format!("{start}\"3\",");
            let row = rows.iter().find(|row| row.starts_with(&begin));
            let row = row.expect("the row of a guest");
            assert!(row.ends_with(&format!("}} {value}")), "{row}");
        }
    }

    #[test]
    fn guests_have_the_names_of_their_machines() {
        let machine = GuestStatus {
            name: Some("web\"} 1\n\x1b\\".into()),
            ..guest(1, 2)
        };
        let status = Status {
            guests: vec![machine, guest(2, 1)],
            ..Status::default()
        };
        let text = lines(&status, 2);
        let row = |pid: u32| {
            let start = format!("pageone_guest_saved_bytes{{pid=\"{pid}\"");
            let mut lines = text.lines().filter(|line| line.starts_with(&start));
            let row = lines.next().map(str::to_owned);
            row.filter(|_| lines.next().is_none()).expect("one line")
        };
        assert!(row(1).contains(r#",name="web\"} 1"#), "{text}");
        assert!(row(2).contains(r#",name="","#), "{text}");
        assert!(!text.contains('\x1b'), "{text}");
    }

    #[test]
    fn a_guest_that_takes_other_names_begins_no_series() {
        let series = |comm: &str| {
            let guest = GuestStatus {
                comm: comm.into(),
                joined_as: "first".into(),
                ..guest(1, 2)
            };
            let status = Status {
                guests: vec![guest],
                ..Status::default()
            };
            lines(&status, 2)
        };
        let text = series("second");
        assert!(text.contains(r#"pid="1",comm="first","#), "{text}");
        assert_eq!(series("third"), text);
    }

    #[test]
    fn canonical_pages_off_their_nodes_are_told_by_domain_and_node() {
        let at = |node| StoreNode {
            domain: "d".into(),
            node,
            pages: 10,
            astray: u64::from(node % 2),
        };
        let status = Status {
            store_nodes: (0..300).map(at).collect(),
            ..Status::default()
        };
        let text = lines(&status, 1);
        for line in [
            r#"pageone_store_pages{domain="d",node="1"} 10"#,
            r#"pageone_store_astray_pages{domain="d",node="0"} 0"#,
            r#"pageone_store_astray_pages{domain="d",node="1"} 1"#,
            "pageone_other_store_pages 440",
            "pageone_other_store_astray_pages 22",
        ] {
            assert!(text.lines().any(|its| its == line), "no {line}: {text}");
        }
    }

    #[test]
    fn recycled_pages_are_told_by_guest_and_in_all_by_their_way() {
        let recycled = |discarded, zeroed, told| Recycled {
            discarded,
            zeroed,
            told,
        };
        let guest = GuestStatus {
            pages_recycled: recycled(1, 2, 3),
            ..guest(7, 1)
        };
        let status = Status {
            guests: vec![guest],
            pages_recycled: recycled(10, 20, 30),
            ..Status::default()
        };
        let text = lines(&status, 1);
        let value = |start: &str, way: &str| {
            let way = format!("way=\"{way}\"}} ");
            let mut lines = text.lines().filter(|line| line.starts_with(start));
            let line = lines.find(|line| line.contains(&way));
            line.and_then(|line| line.split(&way).nth(1)?.parse::<u64>().ok())
        };
        let ways = ["discarded", "zeroed", "told"];
        let all = ways.map(|way| value("pageone_recycled_pages_total{", way));
        assert_eq!(all, [10, 20, 30].map(Some), "{text}");
        let its = ways.map(|way| value("pageone_guest_recycled_pages_total{pid=\"7\"", way));
        assert_eq!(its, [1, 2, 3].map(Some), "{text}");
    }

    #[test]
    fn the_board_and_the_alerts_ask_for_metrics_that_there_are() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["run", "pages_sharing", "general_profit"] {
            std::fs::write(folder.path().join(name), "1\n").unwrap();
        }
        let status = Status {
            guests: vec![guest(1, 1)],
            ..Status::default()
        };
        let text = text(Some(Arc::new(status)), &Ksm::at(folder.path()), 5).unwrap();
        let board = include_str!("../../../../packaging/grafana.json");
        let alerts = include_str!("../../../../packaging/alerts.yml");
        let is_part = |c: char| c.is_ascii_lowercase() || c == '_';
        let words = [board, alerts].map(|file| file.split(|c| !is_part(c)));
        let names = words.into_iter().flatten();
        let names: std::collections::BTreeSet<_> =
            names.filter(|name| name.starts_with("pageone_")).collect();
        assert!(names.len() > 10, "{names:?}");
        for name in names {
            assert!(text.contains(&format!("# TYPE {name} ")), "{name}: {text}");
        }
    }

    #[test]
    fn without_a_daemon_it_says_so() {
        let text = text(None, &Ksm::at("/nonexistent"), 5).unwrap();
        assert!(text.contains("pageone_up 0\n"), "{text}");
        assert!(!text.contains("pageone_saved_bytes"), "{text}");
    }
}
