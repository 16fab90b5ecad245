use super::*;
use proptest::prelude::*;

fn who(uid: u32) -> Who {
    Who {
        uid,
        gid: uid + 100,
        cgroup: None,
        confined: false,
    }
}

fn inside(uid: u32, cgroup: &str) -> Who {
    Who {
        cgroup: Some(Cgroup {
            id: 77,
            path: cgroup.into(),
        }),
        ..who(uid)
    }
}

fn policy(text: &str) -> Policy {
    Policy::parse(text, 0).unwrap_or_else(|error| panic!("{error}"))
}

fn granted(policy: &Policy, who: &Who, name: &str) -> Option<String> {
    policy.domain(who, name).ok()
}

#[test]
fn without_a_file_a_name_only_narrows_the_domain_of_its_user() {
    let root = Policy::without_file(0);
    assert_eq!(granted(&root, &who(7), "").as_deref(), Some("uid:7"));
    assert_eq!(granted(&root, &who(7), "a").as_deref(), Some("uid:7/a"));
    // Nothing that user 7 says leads into a domain of user 8.
    for name in ["uid:8", "/uid:8", "../uid:8", "8"] {
        let domain = granted(&root, &who(7), name).unwrap();
        assert!(domain.starts_with("uid:7/"), "{domain}");
    }
    assert!(!root.asks_for_cgroups());
}

/// So with the file of the packages, which has no rule.
#[test]
fn by_default_a_name_narrows_the_domain_of_a_user_without_a_rule() {
    let rules = "[[rule]]\nuid = 7\nnames = ['a']\n[[rule]]\nuid = 8\ndomain = 'b'\n";
    for (default, narrow) in [("uid", Some("uid:9/c")), ("refuse", None)] {
        let default = format!("default = '{default}'\n");
        let bare = policy(&default);
        assert_eq!(granted(&bare, &who(9), "c").as_deref(), narrow);
        let policy = policy(&format!("{default}{rules}"));
        assert_eq!(granted(&policy, &who(9), "c").as_deref(), narrow);
        // Names of others, and other names of those who have a rule.
        for (uid, name) in [(9, "a"), (9, "b"), (7, "c"), (8, "c")] {
            assert_eq!(granted(&policy, &who(uid), name), None, "{uid} {name}");
        }
    }
}

/// In a container root and services without rights are in one cgroup.
#[test]
fn users_of_a_cgroup_share_only_where_the_rule_names_them() {
    let apart = policy("[[rule]]\ncgroup = '/a'\nper = 'cgroup'\n");
    let domain = |policy: &Policy, uid, cgroup| granted(policy, &inside(uid, cgroup), "").unwrap();
    assert_eq!(domain(&apart, 7, "/a"), "cgroup:77:7/a");
    assert_eq!(domain(&apart, 0, "/a"), "cgroup:77:0/a");
    for whom in ["uid = '0-9'", "user = ['root']\ngid = '0-4294967294'"] {
        let text = format!("[[rule]]\n{whom}\ncgroup = '/a'\nper = 'cgroup'\n");
        assert_eq!(domain(&policy(&text), 0, "/a"), "cgroup:77/a", "{whom}");
    }
    let groups = policy("[[rule]]\ngid = '0-200'\nper = 'cgroup'\n");
    assert!(groups.asks_for_cgroups());
    assert_ne!(domain(&groups, 7, "/a"), domain(&groups, 8, "/a"));
}

#[test]
fn the_rule_that_decides_says_whether_all_memory_is_offered() {
    let text = "[[rule]]\nuid = 7\nper = 'uid'\nany = true\n[[rule]]\nuid = '7-8'\nnames = ['a']\n";
    let policy = policy(text);
    assert!(policy.offers_any(&who(7), ""));
    assert!(!policy.offers_any(&who(7), "a"), "another rule decides");
    assert!(!policy.offers_any(&who(8), "") && !policy.offers_any(&who(9), ""));
    assert!(!Policy::without_file(0).offers_any(&who(7), ""));
    for mistake in ["refuse = true\nany = true", "per = 'uid'\nany = false"] {
        let text = format!("[[rule]]\nuid = 7\n{mistake}\n");
        assert!(Policy::parse(&text, 0).is_err(), "{mistake}");
    }
}

#[test]
fn who_has_only_names_is_told_to_ask_for_one() {
    let policy = policy("default = 'refuse'\n[[rule]]\nuid = 7\nnames = ['a']\n");
    let why = |uid| policy.domain(&who(uid), "").unwrap_err().to_string();
    assert!(
        why(7).contains("give only names: ask for one by `--domain`"),
        "{}",
        why(7)
    );
    assert!(
        why(8).contains("no rule of the policy is for user 8"),
        "{}",
        why(8)
    );
}

#[test]
fn a_users_daemon_serves_that_user() {
    for user in [
        Policy::without_file(7),
        Policy::parse("[[rule]]\nuid = '0-9'\ndomain = 'x'\n", 7).unwrap(),
    ] {
        assert!(user.domain(&who(7), "").is_ok());
        assert!(user.domain(&who(8), "").is_err());
        assert!(user.domain(&who(0), "").is_err());
        assert!(user.may_control(&who(7)) && user.may_control(&who(0)));
        assert!(!user.may_control(&who(8)));
        assert_eq!(user.socket_mode(), 0o600);
    }
}

/// The example of docs/cli.md.
const EXAMPLE: &str = include_str!("../../../../packaging/policy.toml");

#[test]
fn the_packaged_example_says_what_its_comments_say() {
    let example = policy(EXAMPLE);
    let domain = |who: &Who, name: &str| granted(&example, who, name);
    let vm = inside(
        64055,
        "/machine.slice/machine-qemu\\x2d1\\x2dweb.scope/libvirt/emulator",
    );
    let cgroup = vm.cgroup.clone().unwrap();
    let wanted = format!("cgroup:77:64055{}", cgroup.path.raw());
    assert_eq!(domain(&vm, ""), Some(wanted));
    let made_again = Who {
        cgroup: Some(Cgroup { id: 78, ..cgroup }),
        ..vm.clone()
    };
    assert_ne!(domain(&vm, ""), domain(&made_again, ""));
    assert_eq!(domain(&vm, "build"), None);
    assert_eq!(domain(&inside(990, "/x"), ""), None);
    assert_eq!(domain(&inside(990, "/machine.slice/a.scope"), ""), None);
    for uid in [2000, 2999] {
        assert_eq!(
            domain(&inside(uid, "/x"), "").as_deref(),
            Some("name:workers")
        );
    }
    assert_eq!(
        domain(&inside(1000, "/x"), "build").as_deref(),
        Some("name:build")
    );
    assert_eq!(
        domain(&inside(1001, "/x"), "build").as_deref(),
        Some("name:build")
    );
    let narrowed = domain(&inside(1002, "/x"), "build");
    assert_eq!(narrowed.as_deref(), Some("uid:1002/build"));
    assert_eq!(domain(&inside(1000, "/x"), "").as_deref(), Some("uid:1000"));
    assert_eq!(
        domain(&inside(1500, "/x"), "mine").as_deref(),
        Some("uid:1500/mine")
    );
    assert_eq!(domain(&inside(5000, "/x"), ""), None, "the default");
    assert!(example.may_monitor(&who(990)) && !example.may_monitor(&who(1000)));
    assert!(example.may_control(&who(991)) && !example.may_control(&who(990)));
}

#[test]
fn the_first_rule_that_fits_decides() {
    let text = "[[rule]]\ngid = 107\nnames = ['a']\n\
                [[rule]]\nuid = 7\nrefuse = true\n\
                [[rule]]\nuid = [7, 8]\nper = 'gid'\n";
    let both = policy(text);
    assert_eq!(granted(&both, &who(7), "a").as_deref(), Some("name:a"));
    let refused = both.domain(&who(7), "").unwrap_err();
    assert_eq!(
        refused,
        Refusal::Rule {
            rule: 2,
            who: who(7)
        }
    );
    assert_eq!(granted(&both, &who(8), "").as_deref(), Some("gid:108"));
    let error = both.domain(&who(8), "a").unwrap_err().to_string();
    assert!(error.contains("`a`") && error.contains("user 8"), "{error}");
    assert_eq!(granted(&both, &who(9), "").as_deref(), Some("uid:9"));
}

#[test]
fn an_unknown_cgroup_is_refused_where_cgroups_count() {
    let ban = policy("[[rule]]\ncgroup = '/bad/**'\nrefuse = true\n");
    assert!(ban.asks_for_cgroups());
    assert!(ban.domain(&inside(7, "/good"), "").is_ok());
    assert!(ban.domain(&inside(7, "/bad/x"), "").is_err());
    let unknown = ban.domain(&who(7), "").unwrap_err();
    assert_eq!(unknown, Refusal::NoCgroup { who: who(7) });
}

#[test]
fn mistakes_are_named_with_rule_and_line() {
    for (text, place, what) in [
        ("defualt = 'uid'\n", "line 1", "defualt"),
        ("default = 'all'\n", "line 1", "all"),
        ("[control]\n", "control (line 1)", "no user"),
        ("\n[monitor]\n", "monitor (line 2)", "no user"),
        (
            "\n[[rule]]\nuid = 1\nper = 'uid'\nuids = 2\n",
            "rule 1 (line 5)",
            "uids",
        ),
        (
            "[[rule]]\nuid = 1\nper = 'uid'\n\n[[rule]]\nuid = []\n",
            "rule 2 (line 6)",
            "empty",
        ),
        (
            "[[rule]]\nuid = [1, '1-2']\nper = 'uid'\n",
            "rule 1 (line 2)",
            "1 is listed twice",
        ),
        ("[[rule]]\nper = 'uid'\n", "rule 1 (line 1)", "no process"),
        ("[[rule]]\nuid = 1\n", "rule 1 (line 1)", "gives nothing"),
        (
            "[[rule]]\nuid = 1\nrefuse = false\n",
            "rule 1",
            "refuse = false",
        ),
        (
            "[[rule]]\nuid = 1\nrefuse = true\nper = 'uid'\n",
            "rule 1",
            "it refuses",
        ),
        (
            "[[rule]]\nuid = 1\ndomain = 'x'\nper = 'uid'\n",
            "rule 1",
            "both",
        ),
        (
            "[[rule]]\nuid = 1\ndomain = 'x'\nsplit = true\n",
            "rule 1",
            "split",
        ),
        (
            "[[rule]]\nuid = 1\nnames = []\n",
            "rule 1",
            "`names` is empty",
        ),
        (
            "[[rule]]\nuid = 1\nnames = ['a', 'a']\n",
            "rule 1",
            "`a` is listed twice",
        ),
        ("[[rule]]\nuid = 1\ndomain = ''\n", "rule 1", "no name"),
        (
            "[[rule]]\ncgroup = 'a'\nper = 'uid'\n",
            "rule 1 (line 1)",
            "`a`",
        ),
        (
            "[[rule]]\ncgroup = []\nper = 'uid'\n",
            "rule 1",
            "`cgroup` is empty",
        ),
        (
            "[[rule]]\ncgroup = ['/a', '/a']\nper = 'uid'\n",
            "rule 1",
            "adds nothing",
        ),
        (
            "[[rule]]\nuid = '1-9'\nper = 'uid'\n# more\n[[rule]]\nuid = 4\nper = 'gid'\n",
            "rule 2 (line 5)",
            "rule 1 decides",
        ),
        (
            "[[rule]]\nuid = 1\nrefuse = true\n[[rule]]\nuid = 1\nnames = ['a']\n",
            "rule 2",
            "rule 1 decides",
        ),
    ] {
        let error = Policy::parse(text, 0).unwrap_err().to_string();
        assert!(
            error.contains(place) && error.contains(what),
            "{text}\n{error}"
        );
    }
}

#[test]
fn a_later_rule_may_say_what_an_earlier_one_leaves_open() {
    policy("[[rule]]\nuid = 1\nnames = ['a']\n[[rule]]\nuid = 1\nnames = ['b']\nper = 'uid'\n");
    policy("[[rule]]\nuid = '1-5'\nper = 'uid'\n[[rule]]\nuid = '4-8'\nper = 'gid'\n");
}

/// Rules over users 0 to 4 and cgroups /a, /b, by number.
fn rule(number: u32) -> String {
    let condition = match number % 4 {
        0 => format!("uid = {}", number / 4 % 5),
        1 => format!("uid = '{}-4'", number / 4 % 5),
        2 => "cgroup = '/a'".to_owned(),
        _ => "cgroup = ['/b', '/c']".to_owned(),
    };
    let gift = match number / 20 % 7 {
        0 => "per = 'uid'",
        1 => "per = 'uid'\nsplit = true",
        2 => "per = 'gid'\nsplit = true",
        3 => "per = 'cgroup'",
        4 => "domain = '7'",
        5 => "names = ['x', '1/x']",
        _ => "refuse = true",
    };
    format!("[[rule]]\n{condition}\n{gift}\n")
}

proptest! {
    /// Whatever a guest asks for: unless a rule of the policy gives both the same name, two users
    /// in two cgroups and groups never meet.
    #[test]
    fn no_name_leads_to_strangers(
        numbers in proptest::collection::vec(0_u32..140, 0..6),
        names in proptest::array::uniform2("[x17/:]{0,3}|uid:[0-4]|uid:[0-4]/x|cgroup:/[abc]|name:7"),
        one in 0_u32..5, step in 1_u32..5,
    ) {
        let text: String = numbers.into_iter().map(rule).collect();
        if let Ok(policy) = Policy::parse(&text, 0) {
            let (one, two) = (inside(one, "/a"), inside((one + step) % 5, "/b"));
            let first = granted(&policy, &one, &names[0]);
            let second = granted(&policy, &two, &names[1]);
            if first.is_some() && first == second {
                let shared = first.unwrap_or_default();
                prop_assert!(["name:7", "name:x", "name:1/x"].contains(&shared.as_str()), "{}", shared);
            }
        }
    }

    /// Lines that are nearly those of a policy are read or refused, and a refusal has a line.
    #[test]
    fn any_lines_are_read_or_refused(
        lines in proptest::collection::vec(
            "(\\[\\[rule\\]\\]|\\[control\\]|\\[monitor\\]|(uid|gid|cgroup|per|domain|names|split|refuse|default) = ([0-9]{1,11}|true|\"[-a-z0-9/*?]{0,8}\"|\\[(\"[-0-9/*a]{0,6}\"|, |7){0,4}\\])|[ -~]{0,10})",
            0..10,
        ),
    ) {
        let text = lines.join("\n");
        if let Err(error) = Policy::parse(&text, 0) {
            prop_assert!(error.to_string().contains("line"), "{}", error);
        }
    }

    /// A rule that is refused as hidden would have decided nothing.
    #[test]
    fn hidden_rules_never_decide(numbers in proptest::collection::vec(0_u32..140, 1..5), uid in 0_u32..5) {
        let rules: Vec<String> = numbers.into_iter().map(rule).collect();
        let (last, before) = rules.split_last().unwrap();
        let Ok(without) = Policy::parse(&before.concat(), 0) else { return Ok(()) };
        let hidden = Policy::parse(&rules.concat(), 0)
            .is_err_and(|error| error.to_string().contains("decides all"));
        if hidden {
            let alone = policy(last);
            for cgroup in ["/a", "/b", "/c", "/d"] {
                for name in ["", "x", "1/x", "other"] {
                    let who = inside(uid, cgroup);
                    let speaks = alone.rules[0].decide(&who, name).is_some();
                    let decided = without.rules.iter().any(|rule| rule.decide(&who, name).is_some());
                    prop_assert!(!speaks || decided, "{} in {} asks for {}", uid, cgroup, name);
                }
            }
        }
    }
}

#[test]
fn users_and_groups_have_names() {
    let named = "default = 'refuse'\n[monitor]\nuser = 'root'\n[[rule]]\nuser = ['root']\ngroup = 'root'\ndomain = 'x'\n";
    let named = policy(named);
    let root = Who { gid: 0, ..who(0) };
    assert_eq!(granted(&named, &root, "").as_deref(), Some("name:x"));
    assert_eq!(granted(&named, &who(0), ""), None, "of another group");
    for (text, said) in [
        (
            "[[rule]]\nuser = 'no-such-user'\ndomain = 'x'\n",
            "in rule 1 (line 1): there is no user `no-such-user`",
        ),
        (
            "[control]\ngroup = 'no-such-group'\n",
            "in control (line 1): there is no group `no-such-group`",
        ),
        (
            "[monitor]\nuser = 'root'\nuid = 0\n",
            "in monitor (line 1): it has both `user` and `uid`",
        ),
    ] {
        let error = Policy::parse(text, 0).unwrap_err().to_string();
        assert!(error.starts_with(said), "{error}");
    }
}

#[test]
fn where_the_policy_refuses_the_way_to_its_file_is_told() {
    let who = Who {
        uid: 8,
        gid: 8,
        cgroup: None,
        confined: false,
    };
    for refusal in [
        Refusal::Rule {
            rule: 1,
            who: who.clone(),
        },
        Refusal::Nobody { who: who.clone() },
        Refusal::OnlyNames { who: who.clone() },
    ] {
        assert!(file_of(&refusal.to_string()).contains("pageone doctor"));
    }
    let other = Refusal::OtherUser { own: 7, who };
    assert_eq!(file_of(&other.to_string()), "");
}

/// Each process in a container can take any number of the container's.
#[test]
fn a_number_in_a_container_gives_no_right_without_a_control_group() {
    let text = "[monitor]\nuid = 7\n[control]\nuid = 7\ncgroup = ['/ops/*']\n";
    let policy = policy(text);
    let may = |confined, cgroup: &str| {
        let who = Who {
            confined,
            ..inside(7, cgroup)
        };
        (policy.may_monitor(&who), policy.may_control(&who))
    };
    assert_eq!(may(false, "/ops/one"), (true, true));
    assert_eq!(may(true, "/ops/one"), (false, true));
    assert_eq!(may(true, "/else"), (false, false));
    // The example of docs/cli.md: services, and no container of Docker's beside them.
    let docs = include_str!("../../../../docs/cli.md");
    let after = docs.split("\n[control]").nth(1).unwrap();
    let line = after
        .lines()
        .find(|line| line.starts_with("cgroup = "))
        .unwrap();
    let example = self::policy(&format!("[control]\nuid = 7\n{line}\n"));
    for (cgroup, fits) in [("ops.service", true), ("docker-0123abcd.scope", false)] {
        let who = inside(7, &format!("/system.slice/{cgroup}"));
        let who = Who {
            confined: true,
            ..who
        };
        assert_eq!(example.may_control(&who), fits, "{cgroup}");
    }
}
