//! Random histories of guests, checked after every round against a world that knows better.

use proptest::prelude::*;
use wire::{PageOutcome, RunMode};

use crate::options::Rules;
use crate::sync::lock;
use crate::testing::fake::{Lab, Manners};

const GUESTS: usize = 4;
const CHUNKS: u64 = 3;
const NODES: u8 = 3;

/// What happens to a guest, or to all.
#[derive(Clone, Debug)]
enum Event {
    Write {
        page: u64,
        count: u64,
        content: u64,
    },
    /// Equal pages in a row.
    Same {
        page: u64,
        count: u64,
        content: u64,
    },
    /// Contents of all guests, with some of the guest's own between them.
    Strewn {
        page: u64,
        count: u64,
        content: u64,
    },
    Discard {
        page: u64,
        count: u64,
    },
    Touch {
        page: u64,
        count: u64,
    },
    Pin {
        page: u64,
        on: bool,
    },
    Offer {
        chunk: u64,
        on: bool,
    },
    Behave(Manners),
    Fork,
    EndChild,
    Disconnect,
    Connect,
    Kill,
    Mode(RunMode),
    Migrate {
        page: u64,
        count: u64,
        node: u8,
    },
    /// The frames of the slots that these pages map move.
    Stray {
        page: u64,
        count: u64,
        node: u8,
    },
    /// Unmerge, then other rules.
    Switch(Rules),
    /// The engine is killed; whether agents deal with what it asked last, and who comes back.
    Succeed(bool, u8),
    Rounds(usize),
    /// So many early looks.
    Early(usize),
    Glance,
    /// A user wants some guests merged now, in so many chunks.
    Now(u8, u64),
}

/// Pages crowd at the ends of the chunks, where runs meet borders.
fn page() -> impl Strategy<Value = u64> {
    (0..CHUNKS, prop_oneof![0u64..12, 500u64..512]).prop_map(|(chunk, page)| chunk * 512 + page)
}

fn manners() -> impl Strategy<Value = Manners> {
    prop_oneof![
        8 => Just(Manners::Honest),
        2 => Just(Manners::Stalls),
        1 => Just(Manners::Tires),
        1 => Just(Manners::Refuses(PageOutcome::Pinned)),
        1 => Just(Manners::Refuses(PageOutcome::Again)),
        1 => Just(Manners::Refuses(PageOutcome::Gone)),
        1 => Just(Manners::Refuses(PageOutcome::Unsupported)),
        1 => Just(Manners::Invents),
        1 => Just(Manners::Oversteps),
        1 => Just(Manners::Forgets),
        1 => Just(Manners::Confuses),
        1 => Just(Manners::Pretends),
    ]
}

fn rules() -> impl Strategy<Value = Rules> {
    let limit = prop_oneof![Just(2), Just(3), Just(256)];
    (any::<bool>(), limit).prop_map(|(across_nodes, max_sharing)| Rules {
        across_nodes,
        max_sharing,
    })
}

fn event() -> impl Strategy<Value = Event> {
    let mode =
        prop_oneof![4 => Just(RunMode::Run), 1 => Just(RunMode::Stop), 1 => Just(RunMode::Unmerge)];
    prop_oneof![
        10 => (page(), 1u64..10, 0u64..12).prop_map(|(page, count, content)| Event::Write { page, count, content }),
        // Whole groups, so that guesses are made, of runs that begin alike or one apart.
        4 => (0..CHUNKS * 32, 14u64..60, 1u64..3, 0u64..2).prop_map(|(group, count, content, late)| Event::Write { page: group * 16 + late, count, content: content * 100 + late }),
        3 => (0..CHUNKS * 16, 20u64..70, 1u64..3).prop_map(|(row, count, content)| Event::Same { page: row * 32, count, content }),
        6 => (page(), 4u64..40, 20u64..60).prop_map(|(page, count, content)| Event::Strewn { page, count, content }),
        3 => (page(), 1u64..10).prop_map(|(page, count)| Event::Discard { page, count }),
        4 => (page(), 1u64..16).prop_map(|(page, count)| Event::Touch { page, count }),
        1 => (page(), any::<bool>()).prop_map(|(page, on)| Event::Pin { page, on }),
        1 => (0..CHUNKS, any::<bool>()).prop_map(|(chunk, on)| Event::Offer { chunk, on }),
        3 => manners().prop_map(Event::Behave),
        2 => Just(Event::Fork),
        2 => Just(Event::EndChild),
        1 => Just(Event::Disconnect),
        2 => Just(Event::Connect),
        1 => Just(Event::Kill),
        1 => mode.prop_map(Event::Mode),
        2 => (any::<bool>(), any::<u8>()).prop_map(|(deal, back)| Event::Succeed(deal, back)),
        2 => (page(), 1u64..16, 0..NODES).prop_map(|(page, count, node)| Event::Migrate { page, count, node }),
        2 => (page(), 1u64..16, 0..NODES).prop_map(|(page, count, node)| Event::Stray { page, count, node }),
        1 => rules().prop_map(Event::Switch),
        10 => (1usize..5).prop_map(Event::Rounds),
        4 => (1usize..4).prop_map(Event::Early),
        4 => Just(Event::Glance),
        4 => (any::<u8>(), 1..=CHUNKS).prop_map(|(who, chunks)| Event::Now(who, chunks)),
    ]
}

fn happen(lab: &mut Lab, guest: usize, event: &Event) {
    let in_region = |page: u64, count: u64| page..(page + count).min(CHUNKS * 512);
    let dead = lab.world(|world| world.processes[guest].dead);
    match *event {
        Event::Rounds(count) => lab.rounds(count),
        Event::Early(count) if lab.core.knobs.values().run == RunMode::Run => lab.early(count),
        Event::Early(_) => {}
        Event::Glance => {
            lab.rest();
            lab.glance();
        }
        Event::Now(who, chunks) => {
            let all: Vec<_> = (0..GUESTS)
                .filter(|guest| who & (1 << guest) != 0)
                .collect();
            // One that is no guest now is named.
            let _ = lab.merge_now(&all, 0..chunks * 512);
        }
        Event::Succeed(deal, back) => succeed(lab, deal, back),
        Event::Mode(mode) => lab.core.knobs.turn([wire::Setting::Run(mode)]),
        Event::Switch(rules) => {
            let former = lab.core.knobs.values().run;
            // Once without a right to: it must be refused as long as something is shared.
            if lab.switch(rules) > 0 {
                lab.unmerge();
                lab.unmerge();
                lab.switch(rules);
                lab.core.knobs.turn([wire::Setting::Run(former)]);
            }
        }
        Event::EndChild => lab.world(|world| world.end_child(guest)),
        _ if dead => {}
        // Neighbours differ, but a run starting with the same content is the same everywhere.
        Event::Write {
            page,
            count,
            content,
        } => lab.world(|world| {
            for (at, page) in in_region(page, count).enumerate() {
                world.write(
                    guest,
                    page,
                    if content == 0 { 0 } else { content + at as u64 },
                );
            }
        }),
        Event::Same {
            page,
            count,
            content,
        } => lab.world(|world| {
            in_region(page, count).for_each(|page| world.write(guest, page, content));
        }),
        Event::Strewn {
            page,
            count,
            content,
        } => lab.world(|world| {
            for (at, page) in (0u64..).zip(in_region(page, count)) {
                let own = 1_000_000 * (guest as u64 + 1);
                let content = content + at + if at % 3 == 1 { own } else { 0 };
                world.write(guest, page, content);
            }
        }),
        Event::Discard { page, count } => lab.world(|world| {
            in_region(page, count).for_each(|page| world.discard(guest, page));
        }),
        Event::Touch { page, count } => lab.world(|world| {
            in_region(page, count).for_each(|page| world.touch(guest, page));
        }),
        Event::Migrate { page, count, node } => lab.world(|world| {
            in_region(page, count).for_each(|page| world.migrate(guest, page, node));
        }),
        Event::Pin { page, on: true } => lab.world(|world| world.pin(guest, page)),
        Event::Pin { page, on: false } => lab.world(|world| {
            world.processes[guest].pinned.remove(&page);
        }),
        Event::Stray { page, count, node } => lab.world(|world| {
            world.migrate_slots(guest, in_region(page, count), node);
        }),
        Event::Offer { chunk, on } => lab.world(|world| world.offer(guest, chunk, on)),
        Event::Behave(manners) => lab.world(|world| world.processes[guest].manners = manners),
        Event::Fork => lab.world(|world| world.fork(guest)),
        Event::Disconnect => lab.world(|world| world.processes[guest].connection = 0),
        Event::Connect if lab.world(|world| world.processes[guest].connection == 0) => {
            lab.connect(guest);
        }
        Event::Connect => {}
        Event::Kill => lab.world(|world| world.kill(guest)),
    }
}

fn succeed(lab: &mut Lab, deal: bool, back: u8) {
    lab.succeed(deal);
    for guest in (0..GUESTS).filter(|guest| back & (1 << guest) != 0) {
        if lab.world(|world| !world.processes[guest].dead) {
            lab.connect(guest);
        }
    }
}

/// Ends everything: nothing must be left, whatever happened before.
fn end(lab: &Lab) {
    lab.core.knobs.turn([wire::Setting::Run(RunMode::Run)]);
    lab.rounds(2);
    for guest in 0..GUESTS {
        lab.world(|world| {
            while !world.processes[guest].children.is_empty() {
                world.end_child(guest);
            }
            if !world.processes[guest].dead {
                world.kill(guest);
            }
        });
    }
    lab.rounds(2);
    assert!(lock(&lab.core.guests).is_empty(), "ghosts stay");
    assert!(lock(&lab.core.domains).is_empty(), "domains stay");
    assert_eq!(
        lab.world(|world| world.frames("a") + world.frames("b")),
        0,
        "frames stay"
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn no_history_breaks_an_invariant(
        nodes in prop_oneof![Just(1), Just(usize::from(NODES))],
        across in any::<bool>(),
        limit in prop_oneof![Just(2), Just(3), Just(256)],
        events in proptest::collection::vec((0..GUESTS, event()), 1..60)
    ) {
        let mut lab = Lab::on_nodes(nodes, across, limit);
        let events = events.iter().filter(|(_, event)| {
            nodes > 1 || !matches!(event, Event::Migrate { .. } | Event::Stray { .. })
        });
        for domain in ["a", "a", "a", "b"] {
            lab.guest(domain, CHUNKS);
        }
        for (guest, event) in events {
            happen(&mut lab, *guest, event);
        }
        end(&lab);
    }
}
