//! No circles: files of a crate use each other in one order, and so do its folders.
//!
//! A file that gives its folder a name, and the files in it, may use each other. Tests may use all.
//! Where a crate's head has a picture of its folders, each uses only those above it there.
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use syn::visit::{self, Visit};
use syn::{Attribute, Item, ItemUse, UseTree};

/// The words of a module's path below its crate.
type Module = Vec<String>;
/// What uses what.
type Uses = BTreeMap<Module, BTreeSet<Module>>;

/// The paths that a file names.
#[derive(Default)]
struct Names(Vec<Module>);

impl Names {
    fn of_tree(&mut self, tree: &UseTree, before: &Module) {
        let mut path = before.clone();
        match tree {
            UseTree::Path(step) => {
                path.push(step.ident.to_string());
                self.of_tree(&step.tree, &path);
            }
            UseTree::Group(group) => group
                .items
                .iter()
                .for_each(|tree| self.of_tree(tree, &path)),
            UseTree::Name(name) => {
                path.push(name.ident.to_string());
                self.0.push(path);
            }
            UseTree::Rename(name) => {
                path.push(name.ident.to_string());
                self.0.push(path);
            }
            UseTree::Glob(_) => self.0.push(path),
        }
    }
}

impl<'a> Visit<'a> for Names {
    fn visit_item(&mut self, item: &'a Item) {
        let attributes: &[Attribute] = match item {
            Item::Mod(item) => &item.attrs,
            Item::Fn(item) => &item.attrs,
            Item::Impl(item) => &item.attrs,
            Item::Use(item) => &item.attrs,
            _ => &[],
        };
        let is_test = |attribute: &Attribute| {
            let list = attribute.meta.require_list();
            attribute.path().is_ident("cfg")
                && list.is_ok_and(|list| list.tokens.to_string() == "test")
        };
        if !attributes.iter().any(is_test) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'a ItemUse) {
        self.of_tree(&item.tree, &Module::new());
    }

    fn visit_path(&mut self, path: &'a syn::Path) {
        let words = path.segments.iter().map(|word| word.ident.to_string());
        self.0.push(words.collect());
        visit::visit_path(self, path);
    }
}

/// The modules of a folder, with their text, but for those of tests.
fn modules(folder: &Path, above: &Module, found: &mut BTreeMap<Module, String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let mut module = above.clone();
        match name.as_str() {
            "testing" | "tests" | "main" | "bin" => continue,
            "lib" | "mod" => {}
            _ => module.push(name),
        }
        if path.is_dir() {
            modules(&path, &module, found);
        } else if path.extension().is_some_and(|ext| ext == "rs") {
            found.insert(module, fs::read_to_string(&path).unwrap());
        }
    }
}

/// Where a path leads that stands in `module`: the longest part of it that is a module.
fn resolve(path: &[String], module: &Module, all: &BTreeMap<Module, String>) -> Option<Module> {
    let (first, mut rest) = path.split_first()?;
    let mut to = match first.as_str() {
        "crate" => Module::new(),
        "super" => module[..module.len().checked_sub(1)?].to_vec(),
        "self" => module.clone(),
        // A child of this one, or another crate.
        child => [module.as_slice(), &[child.to_owned()]].concat(),
    };
    while let Some(("super", left)) = rest.split_first().map(|(word, left)| (word.as_str(), left)) {
        to.pop();
        rest = left;
    }
    for word in rest {
        to.push(word.clone());
        if !all.contains_key(&to) {
            to.pop();
            break;
        }
    }
    all.contains_key(&to).then_some(to)
}

/// What the files of a crate use of each other, but for what a file has from its own folder's.
fn uses(folder: &Path) -> Uses {
    let mut all = BTreeMap::new();
    modules(folder, &Module::new(), &mut all);
    let mut uses = Uses::new();
    for (module, text) in &all {
        let mut names = Names::default();
        names.visit_file(&syn::parse_file(text).unwrap());
        let found = names
            .0
            .iter()
            .filter_map(|path| resolve(path, module, &all));
        let apart = |to: &Module| !to.starts_with(module) && !module.starts_with(to);
        uses.insert(module.clone(), found.filter(apart).collect());
    }
    uses
}

/// The same between folders: the first words of the modules.
fn folders(uses: &Uses) -> Uses {
    let mut folders = Uses::new();
    for (from, all) in uses.iter().filter(|(from, _)| !from.is_empty()) {
        let own = folders.entry(vec![from[0].clone()]).or_default();
        own.extend(all.iter().map(|to| vec![to[0].clone()]));
        own.remove(&from[..1]);
    }
    folders
}

/// What is in circles, or uses them alone: what is left when all is taken away again and again that uses nothing that is left.
fn circles(mut uses: Uses) -> Vec<String> {
    loop {
        let left: BTreeSet<_> = uses.keys().cloned().collect();
        uses.values_mut()
            .for_each(|all| all.retain(|to| left.contains(to)));
        uses.retain(|_, all| !all.is_empty());
        if uses.len() == left.len() {
            break;
        }
    }
    let line = |(from, all): (&Module, &BTreeSet<Module>)| {
        let all: Vec<_> = all.iter().map(|to| to.join("/")).collect();
        format!("{} uses {}", from.join("/"), all.join(", "))
    };
    uses.iter().map(line).collect()
}

/// The line that each folder has in the picture under "The folders", at the head of a crate. The names end where two spaces are.
fn places(head: &str) -> BTreeMap<String, usize> {
    let picture = head.split("# The folders").nth(1).unwrap();
    let picture = picture.split("```").nth(1).unwrap();
    let lines = picture
        .lines()
        .filter_map(|line| line.strip_prefix("//!  "));
    let names = lines.map(|line| line.split("  ").next().unwrap());
    let place = |(at, names): (usize, &str)| {
        let names = names.split_whitespace();
        let names = names.map(move |name| (name.trim_end_matches('/').to_owned(), at));
        names.collect::<Vec<_>>()
    };
    names.enumerate().flat_map(place).collect()
}

/// The folders that are not in the picture, and those that use one below them.
fn misplaced(folders: &Uses, places: &BTreeMap<String, usize>) -> Vec<String> {
    let mut found = Vec::new();
    for (from, all) in folders {
        let Some(place) = places.get(&from[0]) else {
            found.push(format!("{} has no place", from[0]));
            continue;
        };
        let below = |to: &&Module| places.get(&to[0]).is_some_and(|its| its > place);
        let line = |to: &Module| format!("{} uses {}", from[0], to[0]);
        found.extend(all.iter().filter(below).map(line));
    }
    found
}

#[test]
fn folders_of_the_engine_use_those_above_them_in_its_picture() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/src");
    let places = places(&fs::read_to_string(source.join("lib.rs")).unwrap());
    let found = misplaced(&folders(&uses(&source)), &places);
    assert!(found.is_empty(), "{places:?}:\n{}", found.join("\n"));
}

#[test]
fn a_use_of_a_folder_below_is_found() {
    let picture =
        "//! # The folders\n//!\n//! ```text\n//!  x a   words\n//!  b/    more words\n//! ```";
    let places = places(picture);
    let place = |name: &str| places.get(name).copied();
    assert_eq!(
        ["a", "x", "b", "words"].map(place),
        [Some(0), Some(0), Some(1), None]
    );
    let module = |name: &str| vec![name.to_owned()];
    let uses = |all: &[(&str, &str)]| {
        let uses = all
            .iter()
            .map(|(from, to)| (module(from), BTreeSet::from([module(to)])));
        misplaced(&uses.collect(), &places)
    };
    assert_eq!(uses(&[("a", "x"), ("b", "a"), ("x", "a")]), [""; 0]);
    assert_eq!(
        uses(&[("a", "b"), ("c", "a")]),
        ["a uses b", "c has no place"]
    );
}

#[test]
fn files_and_folders_of_a_crate_use_each_other_in_one_order() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut arrows = 0;
    for entry in fs::read_dir(crates).unwrap() {
        let folder = entry.unwrap().path();
        let uses = uses(&folder.join("src"));
        arrows += uses.values().map(BTreeSet::len).sum::<usize>();
        let found = [circles(folders(&uses)), circles(uses)].concat();
        assert!(
            found.is_empty(),
            "{}: a circle, or what uses one:\n{}",
            folder.display(),
            found.join("\n")
        );
    }
    assert!(arrows > 500, "{arrows} uses: the sources are not read");
}

#[test]
fn a_circle_is_found() {
    let module = |name: &str| name.split('/').map(str::to_owned).collect::<Module>();
    let uses = |all: &[(&str, &[&str])]| {
        let uses = all
            .iter()
            .map(|(from, to)| (module(from), to.iter().map(|to| module(to)).collect()));
        uses.collect::<Uses>()
    };
    let files = uses(&[
        ("a/x", &["b/y"]),
        ("b/y", &[]),
        ("b/z", &["a/x"]),
        ("c", &["b/z"]),
    ]);
    assert_eq!(circles(files.clone()), Vec::<String>::new());
    assert_eq!(
        circles(folders(&files)),
        ["a uses b", "b uses a", "c uses b"]
    );
    assert_eq!(
        circles(uses(&[("a", &["b"]), ("b", &["a"])])),
        ["a uses b", "b uses a"]
    );
}

/// Calls that wait for a lease on the file, each before the name of a file of another process.
fn waiting_opens(text: &str) -> Vec<String> {
    const CALLS: [&str; 4] = [
        "File::open(",
        "fs::read(",
        "fs::read_to_string(",
        "fs::write(",
    ];
    let product = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    let words: String = product.split_whitespace().collect();
    let opens = |call: &str| {
        let begin = format!("{call}format!(\"/proc/{{");
        words.contains(&begin).then_some(begin)
    };
    CALLS.iter().filter_map(|call| opens(call)).collect()
}

/// The owner of such a file may have a lease on it, for which open(2) waits: `sys::text` opens them.
#[test]
fn files_of_other_processes_are_opened_without_waiting() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for name in ["sys", "engine", "numa", "pageone"] {
        let mut found = BTreeMap::new();
        modules(&crates.join(name).join("src"), &Module::new(), &mut found);
        for (module, text) in found {
            assert_eq!(waiting_opens(&text), [] as [&str; 0], "{name}: {module:?}");
        }
    }
    let bad = "let a = File::open(\n    format!(\"/proc/{pid}/maps\"),\n)?;";
    assert_eq!(waiting_opens(bad).len(), 1);
}
