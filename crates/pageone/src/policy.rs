//! Who may connect, in which trust domain its pages are shared, and who may turn knobs.
//!
//! The domain comes from the peer's credentials, as the kernel recorded them, never from the
//! peer's word: each user id is a domain. A name that a guest asks for only splits the domain of
//! its own user further.

use sys::socket::Peer;

/// The default policy: one domain a user.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Policy {
    /// The daemon's own user id.
    uid: u32,
}

impl Policy {
    /// The policy of a daemon that runs as this process does.
    pub(crate) fn here() -> Self {
        let uid = rustix::process::geteuid().as_raw();
        Self { uid }
    }

    /// Permissions of the socket: root serves everybody, others only themselves (they have no
    /// right to other users' memory anyway).
    pub(crate) fn socket_mode(self) -> u32 {
        if self.uid == 0 { 0o666 } else { 0o600 }
    }

    /// The domain of a guest that asks for `name`; none when it may not be a guest here.
    pub(crate) fn domain(self, peer: Peer, name: &str) -> Option<String> {
        let allowed = self.uid == 0 || peer.uid == self.uid;
        allowed.then(|| match name {
            "" => format!("uid:{}", peer.uid),
            name => format!("uid:{}/{name}", peer.uid),
        })
    }

    /// Whether `peer` may see the counters and turn the knobs: they tell of all users' guests.
    pub(crate) fn may_control(self, peer: Peer) -> bool {
        peer.uid == 0 || peer.uid == self.uid
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(uid: u32) -> Peer {
        Peer {
            pid: 1,
            uid,
            gid: uid,
        }
    }

    #[test]
    fn a_name_only_narrows_the_domain_of_its_user() {
        let root = Policy { uid: 0 };
        assert_eq!(root.domain(peer(7), "").as_deref(), Some("uid:7"));
        assert_eq!(root.domain(peer(7), "a").as_deref(), Some("uid:7/a"));
        // Nothing that user 7 says leads into a domain of user 8.
        for name in ["uid:8", "/uid:8", "../uid:8", "8"] {
            let domain = root.domain(peer(7), name).unwrap();
            assert!(domain.starts_with("uid:7/"), "{domain}");
        }
    }

    #[test]
    fn a_users_daemon_serves_that_user() {
        let user = Policy { uid: 7 };
        assert!(user.domain(peer(7), "").is_some());
        assert!(user.domain(peer(8), "").is_none());
        assert!(user.domain(peer(0), "").is_none());
        assert!(user.may_control(peer(7)) && user.may_control(peer(0)));
        assert!(!user.may_control(peer(8)));
        assert_eq!(user.socket_mode(), 0o600);
    }
}
