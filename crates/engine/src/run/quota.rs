//! Quotas at the door: how many guests and how many domains a user may have.
//!
//! Each user has a number of his own, and at no time more than three times what is free for all. So one user alone gets up to three
//! quarters of the whole, the next three quarters of the rest, and a user who comes later always finds something.
//! Equal shares, the tempting alternative, would need the number of users who are yet to come.
//!
//! A domain belongs to the user whose guest began it, for the next engine too. It costs the keeper three descriptors, one more a
//! node, and one more for each former engine whose guests are not all back. A keeper has a fixed number of these, so
//! they are counted as they are, beside the domains: a user who makes up names, or keeps old ties, must not take them all.
//!
//! What guests leave to be closed counts apart from the guests, by kind ([`check_unclosed`]): strangers may make it last.
//!
//! Source: A. Choudhury, E. Hahne: *Dynamic Queue Length Thresholds for Shared-Memory Packet Switches*, 1998.

use std::collections::BTreeMap;
use std::sync::Arc;

use sys::closers::Kind;
use sys::socket::Peer;

use crate::domain::Domain;
use crate::error::{OverQuota, Refusal};
use crate::run::core::Core;
use crate::sync::lock;
use crate::users::{check_unclosed, is_master};

impl Core {
    /// Who answers for a process that connected. Whether it is the one with that number its look tells.
    ///
    /// # Errors
    /// Too much of its user's waits to be closed already.
    pub(crate) fn principal(&self, peer: Peer) -> Result<u32, Refusal> {
        check_unclosed(&self.users.limits, peer.uid, Kind::Session)?;
        Ok(sys::principal::of(peer.pid, peer.uid)?)
    }

    /// Whether a process of user `uid` may be one more guest, in the domain of this `name`.
    pub(crate) fn check_quota(&self, uid: u32, name: &str) -> Result<(), OverQuota> {
        if is_master(uid) {
            return Ok(());
        }
        let limits = &self.users.limits;
        check_unclosed(limits, uid, Kind::Session)?;
        let guests = lock(&self.guests);
        let his = guests.iter().filter(|guest| guest.user.uid == uid).count();
        let guests = OverQuota {
            what: "guests",
            uid,
            own: his as u64,
            all: guests.len() as u64,
            per_user: limits.guests_per_user,
            total: limits.guests,
        };
        guests.check()?;
        let domains = lock(&self.domains);
        if domains.contains_key(name) {
            return Ok(());
        }
        let is_his = |domain: &&Arc<Domain>| domain.is_of(uid);
        let begun = OverQuota {
            what: "domains",
            own: domains.values().filter(is_his).count() as u64,
            all: domains.len() as u64,
            per_user: limits.domains_per_user,
            total: limits.domains,
            ..guests
        };
        begun.check()?;
        let kept = self.kept_descriptors(uid, &domains);
        kept.check()
    }

    fn kept_descriptors(&self, uid: u32, domains: &BTreeMap<String, Arc<Domain>>) -> OverQuota {
        let limits = &self.users.limits;
        let kept = |domain: &Arc<Domain>| domain.handover.kept();
        let his = domains.values().filter(|domain| domain.is_of(uid));
        OverQuota {
            what: "kept_descriptors",
            uid,
            own: his.map(kept).sum(),
            all: domains.values().map(kept).sum(),
            per_user: limits.kept_descriptors_per_user,
            total: limits.kept_descriptors,
        }
    }

    /// Whether a former engine's domain of user `uid` may go on, that takes `more` descriptors of the keeper.
    pub(crate) fn check_kept(&self, uid: u32, more: u64) -> Result<(), OverQuota> {
        if is_master(uid) {
            return Ok(());
        }
        let kept = self.kept_descriptors(uid, &lock(&self.domains));
        let own = kept.own + more;
        match own <= kept.per_user && kept.all + more <= kept.total {
            true => Ok(()),
            false => Err(OverQuota { own, ..kept }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quota(own: u64, all: u64) -> OverQuota {
        OverQuota {
            what: "guests",
            uid: 7,
            own,
            all,
            per_user: 500,
            total: 1000,
        }
    }

    #[test]
    fn a_user_has_his_number_and_others_find_something() {
        assert!(quota(499, 499).check().is_ok());
        let over = quota(500, 500).check().unwrap_err().to_string();
        for words in [
            "user 7 has 500 guests",
            "guests_per_user = 500",
            "guests = 1000",
        ] {
            assert!(over.contains(words), "{over}");
        }
        // However many greedy users came before, the next one gets something.
        let (mut all, mut users) = (0, 0);
        while all < 999 {
            let mut own = 0;
            while quota(own, all).check().is_ok() {
                (own, all) = (own + 1, all + 1);
            }
            users += 1;
            assert!(own > 0, "user {users} got nothing at {all}");
        }
        assert!(users >= 5, "{users}");
    }
}
