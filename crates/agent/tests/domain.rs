//! Pages that a guest merged in a domain it has left are its own again before it is ready in another; engines played by hand.
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

#[path = "../../../tests/support/mod.rs"]
mod support;

mod common;

use common::{Engine, count, is_free, maps_store, ready};
use support::Guest;
use wire::{DomainMark, MAX_MESSAGE, PageOutcome, Reason};

/// All pages of a guest of domain 1, merged.
fn merged() -> (Engine, Guest) {
    let (engine, guest) = ready(5);
    let merged = engine.merge(guest.memory, 0, 512, Some(1000));
    assert_eq!(count(&merged, PageOutcome::Merged), 512);
    assert!(maps_store(&guest) && !is_free(&engine.tie));
    (engine, guest)
}

/// The engine goes; the next one has other lines, and welcomes to this domain.
fn next(engine: Engine, domain: DomainMark) -> (Engine, Engine) {
    let (lifeline, tie) = (common::new_lifeline(), common::new_lifeline());
    let former = Engine::new();
    let gone = Engine {
        lifeline: engine.lifeline,
        tie: engine.tie,
        ..former
    };
    let next = Engine {
        link: None,
        lifeline,
        tie,
        domain,
        ..engine
    };
    (gone, next)
}

/// An engine that breaks off each time is asked after one second, two, four, and so on.
#[test]
fn an_engine_that_fails_is_asked_less_and_less() {
    use std::time::{Duration, Instant};
    let engine = Engine::new();
    let mut guest = engine.guest();
    guest.offer(16, 3);
    let begin = Instant::now();
    let mut times = Vec::new();
    while let Some(left) = Duration::from_secs(10).checked_sub(begin.elapsed()) {
        if sys::process::wait_readable(&engine.listener, left).unwrap() {
            drop(sys::socket::accept(&engine.listener).unwrap());
            times.push(begin.elapsed().as_millis());
        }
    }
    // At 0, 1, 3 and 7 s; on a busy machine later.
    assert!(times.len() > 1, "{times:?}");
    let pauses = times.windows(2).map(|two| two[1] - two[0]);
    for (pause, least) in pauses.zip([900, 1900, 3900]) {
        assert!(pause >= least, "{pause} ms, not {least}: {times:?}");
    }
    guest.run("check");
}

#[test]
fn the_same_domain_keeps_what_is_merged() {
    let (engine, mut guest) = merged();
    let same = engine.domain;
    let (gone, mut engine) = next(engine, same);
    engine.accept();
    assert!(maps_store(&guest) && !is_free(&gone.tie));
    guest.run("check");
}

#[test]
fn in_another_domain_all_is_the_guests_own_before_it_is_ready() {
    let (engine, mut guest) = merged();
    let (gone, mut engine) = next(engine, DomainMark([2, 0]));
    engine.accept();
    assert!(!maps_store(&guest));
    assert!(is_free(&gone.tie) && is_free(&gone.lifeline));
    assert!(!is_free(&engine.tie) && !is_free(&engine.lifeline));
    guest.run("check");
    // It is offered still, and merges here.
    engine.sync();
    let merged = engine.merge(guest.memory, 0, 512, Some(1000));
    assert_eq!(count(&merged, PageOutcome::Merged), 512);
    guest.run("check");
    assert!(gone.link.is_none());
}

#[test]
fn a_fork_child_that_joins_another_domain_has_nothing_of_its_parents() {
    let (engine, mut guest) = merged();
    let (gone, mut engine) = next(engine, DomainMark([0, 9]));
    guest.run("fork");
    engine.accept();
    assert!(!maps_store(&guest), "the parent came back");
    assert!(
        !is_free(&gone.tie),
        "the child shares with no process but by fork, and holds the tie"
    );
    guest.run("check");
}

/// Refuses the agent that comes next, which would be in this domain.
fn refuse(engine: &Engine, domain: DomainMark) {
    let link = sys::socket::accept(&engine.listener).unwrap();
    let mut buffer = [0; MAX_MESSAGE];
    sys::socket::recv(&link, &mut buffer).unwrap();
    let len = Reason::new("no", domain).encode(&mut buffer);
    sys::socket::send(&link, &buffer[..len], &[]).unwrap();
    // The agent has done what it does when it is gone.
    assert_eq!(sys::socket::recv(&link, &mut buffer).unwrap().len, 0);
}

#[test]
fn refused_for_want_of_a_place_it_keeps_all_and_in_no_domain_nothing() {
    let (engine, mut guest) = merged();
    let same = engine.domain;
    let (gone, engine) = next(engine, same);
    refuse(&engine, same);
    assert!(maps_store(&guest) && !is_free(&gone.tie));
    refuse(&engine, DomainMark::NONE);
    assert!(!maps_store(&guest) && is_free(&gone.tie));
    guest.run("check");
}
