//! Policies from anywhere: no panic, memory in proportion to the text, and whatever a policy says, a
//! domain is of one of the known forms and of the peer that asked.

use crate::bound::bounded;
use pageone::policy::{Cgroup, Policy, Who};

const CGROUPS: [&str; 4] = [
    "/",
    "/a",
    "/machine.slice/a.scope",
    "/machine.slice/a.scope/x",
];

pub(crate) fn check(text: &str) {
    let policy = match bounded(1024 * text.len() + 65536, || Policy::parse(text, 0)) {
        Ok(policy) => policy,
        Err(error) => return assert!(error.to_string().contains("line")),
    };
    assert_eq!(
        Policy::parse(text, 0).as_ref(),
        Ok(&policy),
        "the same text, the same policy"
    );
    for (uid, cgroup) in (0..3000).step_by(500).zip(CGROUPS.iter().cycle()) {
        let who = Who {
            uid,
            gid: uid + 1,
            cgroup: Some(Cgroup {
                id: 77,
                path: (*cgroup).into(),
            }),
            confined: false,
        };
        for name in ["", "build", "x", "uid:1"] {
            if let Ok(domain) = policy.domain(&who, name) {
                is_his(&who, name, &domain);
            }
        }
        let nowhere = Who {
            cgroup: None,
            ..who
        };
        assert!(policy.domain(&nowhere, "").is_err() || !policy.asks_for_cgroups());
    }
}

fn is_his(who: &Who, name: &str, domain: &str) {
    let own = [format!("uid:{}", who.uid), format!("gid:{}", who.gid)];
    let plain = own.iter().any(|own| domain == own);
    let split = own.iter().any(|own| *domain == format!("{own}/{name}"));
    let its = who.cgroup.as_ref();
    // For himself, or for all users of a rule that names them.
    let cgroups = its.map(|cgroup| {
        let (id, path) = (cgroup.id, &cgroup.path);
        [
            format!("cgroup:{id}:{}{path}", who.uid),
            format!("cgroup:{id}{path}"),
        ]
    });
    let by_cgroup = cgroups.is_some_and(|cgroups| cgroups.iter().any(|cgroup| domain == cgroup));
    let fits = match (name, domain.strip_prefix("name:")) {
        ("", Some(named)) => !named.is_empty(),
        ("", None) => plain || by_cgroup,
        (name, Some(named)) => named == name,
        (_, None) => split,
    };
    assert!(fits, "{who} asks for {name:?} and gets {domain:?}");
}
