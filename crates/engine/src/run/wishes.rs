//! Wishes that memory be merged now, until a pass grants them ([`now`](crate::run::now)). A pass is one user's: the times that he is
//! told are those of his own work, and an agent of his that does not answer holds up no other user.
//!
//! Where the list is full, the user who has most in it loses his last one to a user who has fewer. Root's wishes always have room.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use wire::MergedNow;

use crate::error::EngineError;
use crate::guest::Guest;
use crate::sync::lock;
use crate::users::is_master;

/// Wishes that wait, and those of one user among them.
const MOST: usize = 1024;
const MOST_OF_USER: usize = 64;
/// The least time between two passes of a user. A pass costs the driver some work for each guest and domain, whichever user
/// wishes.
const REST: Duration = Duration::from_millis(250);
/// Is told what came of a wish.
pub(crate) type Tell = Box<dyn FnOnce(Result<MergedNow, EngineError>) + Send>;

/// That the memory of some guests be merged now.
pub(crate) struct Wish {
    /// Whose it is.
    pub(crate) uid: u32,
    pub(crate) guests: Vec<Arc<Guest>>,
    pub(crate) range: Range<u64>,
    /// A part of it in a short time, and no more.
    pub(crate) brief: bool,
    pub(crate) tell: Tell,
}

impl Wish {
    /// The user whose turn it takes: who answers for the guests of the one who asks, for he may have many ids.
    pub(crate) fn user(&self) -> u32 {
        let of_guests = self.guests.first().map(|guest| guest.user.uid);
        match is_master(self.uid) {
            true => self.uid,
            false => of_guests.unwrap_or(self.uid),
        }
    }

    /// The pass that grants it.
    pub(crate) fn pass(&self, begin: Instant) -> Pass {
        Pass {
            user: self.user(),
            brief: self.brief,
            begin,
        }
    }
}

/// A pass under way.
#[derive(Clone, Copy)]
pub(crate) struct Pass {
    pub(crate) user: u32,
    pub(crate) brief: bool,
    pub(crate) begin: Instant,
}

/// The wishes that wait for a pass.
#[derive(Default)]
pub(crate) struct Wishes(Mutex<List>);

#[derive(Default)]
struct List {
    wishes: Vec<Wish>,
    /// When a user's next pass may begin.
    rests: BTreeMap<u32, Instant>,
    /// No pass will come any more.
    closed: bool,
}

impl List {
    fn is_due(&self, wish: &Wish, now: Instant) -> bool {
        self.rests.get(&wish.user()).is_none_or(|&rest| rest <= now)
    }

    /// Adds a wish; gives back one that there is no place for: this one, or the last one of the user who has most.
    fn add(&mut self, wish: Wish) -> Option<Wish> {
        if is_master(wish.uid) {
            self.wishes.push(wish);
            return None;
        }
        let mut counts = BTreeMap::<u32, usize>::new();
        for user in self.wishes.iter().map(Wish::user) {
            *counts.entry(user).or_default() += usize::from(!is_master(user));
        }
        let own = counts.get(&wish.user()).copied().unwrap_or(0);
        if own >= MOST_OF_USER {
            return Some(wish);
        }
        if counts.values().sum::<usize>() < MOST {
            self.wishes.push(wish);
            return None;
        }
        let most = counts.into_iter().max_by_key(|&(_, count)| count);
        let Some((greedy, _)) = most.filter(|&(_, count)| count > own + 1) else {
            return Some(wish);
        };
        let last = self.wishes.iter().rposition(|wish| wish.user() == greedy);
        let lost = self.wishes.remove(last.expect("he has most wishes"));
        self.wishes.push(wish);
        Some(lost)
    }
}

impl Wishes {
    /// Adds a wish. One too many is refused.
    pub(crate) fn add(&self, wish: Wish) {
        let mut waiting = lock(&self.0);
        let (refused, why) = match waiting.closed {
            true => (Some(wish), EngineError::Ends),
            false => (waiting.add(wish), EngineError::Crowd { most: MOST_OF_USER }),
        };
        drop(waiting);
        if let Some(refused) = refused {
            (refused.tell)(Err(why));
        }
    }

    /// When the first may be granted, `now` if nothing keeps it; `None` when there is none.
    pub(crate) fn due(&self, now: Instant) -> Option<Instant> {
        let waiting = lock(&self.0);
        let due = |wish: &Wish| waiting.rests.get(&wish.user()).copied().unwrap_or(now);
        waiting.wishes.iter().map(due).min()
    }

    /// Takes those that one pass grants: the first that may be granted now, and those of its user that are brief, or not, as it is.
    pub(crate) fn take(&self, now: Instant) -> Vec<Wish> {
        let mut waiting = lock(&self.0);
        waiting.rests.retain(|_, rest| *rest > now);
        let kind = |wish: &Wish| (wish.user(), wish.brief);
        let first = waiting.wishes.iter().find(|wish| waiting.is_due(wish, now));
        let first = first.map(kind);
        let list = std::mem::take(&mut waiting.wishes);
        let (taken, rest) = list.into_iter().partition(|wish| Some(kind(wish)) == first);
        waiting.wishes = rest;
        taken
    }

    /// Whether there are wishes of other users, and their turn has come.
    pub(crate) fn others_wait(&self, user: u32, now: Instant) -> bool {
        let waiting = lock(&self.0);
        let mut list = waiting.wishes.iter();
        list.any(|wish| wish.user() != user && waiting.is_due(wish, now))
    }

    /// Notes that a pass for this user ended now and took so long.
    pub(crate) fn rest(&self, user: u32, took: Duration) {
        if !is_master(user) {
            let until = Instant::now() + took.max(REST);
            lock(&self.0).rests.insert(user, until);
        }
    }

    /// Lets go of guests of which nothing is left, for each holds descriptors. The first of a wish stays: it tells whose turn the wish takes.
    pub(crate) fn forget_gone(&self) {
        let others = |wish: &Wish| wish.guests.iter().skip(1).cloned().collect::<Vec<_>>();
        // What is gone is found, and dropped, without the lock.
        let named: Vec<_> = lock(&self.0).wishes.iter().flat_map(others).collect();
        let gone = named.iter().filter(|guest| guest.is_gone());
        let gone: BTreeSet<_> = gone.map(|guest| guest.number).collect();
        if gone.is_empty() {
            return;
        }
        for wish in &mut lock(&self.0).wishes {
            let mut is_first = true;
            let stays =
                |guest: &Arc<Guest>| std::mem::take(&mut is_first) || !gone.contains(&guest.number);
            wish.guests.retain(stays);
        }
    }

    /// Refuses those that wait, and all that come: the engine ends.
    pub(crate) fn close(&self) {
        let mut waiting = lock(&self.0);
        waiting.closed = true;
        let list = std::mem::take(&mut waiting.wishes);
        drop(waiting);
        list.into_iter()
            .for_each(|wish| (wish.tell)(Err(EngineError::Ends)));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};

    use super::*;
    use crate::testing::fake::Lab;

    fn add(wishes: &Wishes, uid: u32) -> Receiver<Result<MergedNow, EngineError>> {
        let (tell, told) = channel();
        wishes.add(Wish {
            uid,
            guests: Vec::new(),
            range: 0..1,
            brief: false,
            tell: Box::new(move |merged| tell.send(merged).unwrap()),
        });
        told
    }

    /// What the passes take that may begin now, one after another.
    fn taken(wishes: &Wishes, now: Instant) -> Vec<u32> {
        let passes = std::iter::from_fn(|| Some(wishes.take(now)).filter(|pass| !pass.is_empty()));
        let passes = passes.inspect(|pass| assert!(pass.iter().all(|its| its.uid == pass[0].uid)));
        passes.flatten().map(|wish| wish.uid).collect()
    }

    #[test]
    fn who_had_a_pass_waits_as_long_and_others_do_not() {
        let (wishes, now) = (Wishes::default(), Instant::now());
        let hour = Duration::from_secs(3600);
        assert!(wishes.due(now).is_none());
        wishes.rest(7, hour);
        wishes.rest(0, hour);
        let told: Vec<_> = [7, 8, 0].map(|uid| add(&wishes, uid)).into();
        assert!(wishes.others_wait(0, now) && wishes.others_wait(7, now));
        assert_eq!(taken(&wishes, now), [8, 0], "root does not wait");
        assert!(!wishes.others_wait(8, now), "who rests is not waited for");
        assert!(wishes.due(now).unwrap() >= now + hour);
        assert_eq!(taken(&wishes, now + hour * 2), [7]);
        assert!(told.iter().all(|told| told.try_recv().is_err()));
    }

    #[test]
    fn guests_that_are_gone_are_let_go() {
        let lab = Lab::new();
        let processes = [(); 3].map(|()| lab.guest_of("d", 1, 1000));
        let (wishes, (tell, _told)) = (&lab.core.wishes, channel());
        let hour = Duration::from_secs(3600);
        wishes.rest(1000, hour);
        wishes.add(Wish {
            uid: 1000,
            guests: lock(&lab.core.guests).clone(),
            range: 0..1,
            brief: false,
            tell: Box::new(move |merged| tell.send(merged).unwrap()),
        });
        for process in processes {
            lab.world(|world| world.kill(process));
        }
        lab.rounds(3);
        let wish = &wishes.take(Instant::now() + hour * 2)[0];
        assert_eq!(wish.guests.len(), 1);
    }

    #[test]
    fn a_full_list_takes_from_whoever_has_most() {
        let wishes = Wishes::default();
        let users = u32::try_from(MOST / MOST_OF_USER).unwrap();
        let told: Vec<_> = (1000..1000 + users)
            .flat_map(|uid| (0..MOST_OF_USER).map(move |_| uid))
            .map(|uid| add(&wishes, uid))
            .collect();
        let lost = || {
            let refused =
                |told: &&Receiver<_>| matches!(told.try_recv(), Ok(Err(EngineError::Crowd { .. })));
            told.iter().filter(refused).count()
        };
        assert_eq!(lost(), 0);
        let others: Vec<_> = (0..10).map(|_| add(&wishes, 7)).collect();
        assert!(others.iter().all(|told| told.try_recv().is_err()));
        assert_eq!(lost(), 10, "a place for each of his");
        // Root's take no other user's place.
        let root: Vec<_> = (0..10).map(|_| add(&wishes, 0)).collect();
        assert_eq!(lost(), 0);
        let all = taken(&wishes, Instant::now());
        assert_eq!(all.len(), MOST + 10);
        for (uid, expected) in [(7, others.len()), (0, root.len())] {
            assert_eq!(all.iter().filter(|its| **its == uid).count(), expected);
        }
        let least = MOST_OF_USER - 1;
        for uid in 1000..1000 + users {
            assert!(all.iter().filter(|its| **its == uid).count() >= least);
        }
    }

    #[test]
    fn one_too_many_is_refused_and_the_end_refuses_all() {
        let wishes = Wishes::default();
        let told: Vec<_> = (0..=MOST_OF_USER).map(|_| add(&wishes, 7)).collect();
        let (last, first) = told.split_last().unwrap();
        assert!(matches!(
            last.try_recv(),
            Ok(Err(EngineError::Crowd { .. }))
        ));
        let other = add(&wishes, 8);
        wishes.close();
        for told in first.iter().chain([&other, &add(&wishes, 9)]) {
            assert!(matches!(told.try_recv(), Ok(Err(EngineError::Ends))));
        }
    }
}
