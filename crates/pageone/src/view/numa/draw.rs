//! A topology as a picture: Graphviz source, or an SVG that needs nothing else.

use std::f64::consts::TAU;
use std::fmt::Write;

use numa::topology::UNREACHABLE;
use numa::{Node, Topology, format_list};

use super::table::bytes;

const RADIUS: f64 = 46.0;
const SPACE_PER_NODE: f64 = 60.0;

fn label(node: &Node) -> [String; 3] {
    let cpus = if node.cpus.is_empty() {
        "no CPUs".into()
    } else {
        format!("CPUs {}", format_list(&node.cpus))
    };
    let memory = if node.memory_bytes == 0 {
        "no memory".into()
    } else {
        bytes(node.memory_bytes)
    };
    [format!("node {}", node.id), cpus, memory]
}

/// Both distances of a pair, as one text where they are the same.
fn distance(topology: &Topology, one: usize, two: usize) -> Option<String> {
    let name = |distance| {
        if distance == UNREACHABLE {
            "no way".into()
        } else {
            format!("{distance}")
        }
    };
    let (there, back) = (topology.distances[one][two], topology.distances[two][one]);
    match (there, back) {
        (UNREACHABLE, UNREACHABLE) => None,
        _ if there == back => Some(name(there)),
        _ => Some(format!("{} / {}", name(there), name(back))),
    }
}

fn pairs(topology: &Topology) -> impl Iterator<Item = (usize, usize, String)> + '_ {
    let count = topology.nodes.len();
    (0..count)
        .flat_map(move |one| (one + 1..count).map(move |two| (one, two)))
        .filter_map(|(one, two)| distance(topology, one, two).map(|text| (one, two, text)))
}

/// Graphviz source.
pub(super) fn dot(topology: &Topology) -> String {
    let mut text =
        String::from("graph numa {\n  layout=neato;\n  node [shape=box, style=rounded];\n");
    for node in &topology.nodes {
        let _ = writeln!(
            text,
            "  n{} [label=\"{}\"];",
            node.id,
            label(node).join("\\n")
        );
    }
    for (one, two, distance) in pairs(topology) {
        let (from, to) = (&topology.nodes[one], &topology.nodes[two]);
        let length = f64::from(topology.distances[one][two]) / 10.0;
        let _ = writeln!(
            text,
            "  n{} -- n{} [label=\"{distance}\", len={length:.1}];",
            from.id, to.id
        );
    }
    text + "}\n"
}

/// A drawing: nodes on a circle, lines the darker the nearer.
pub(super) fn svg(topology: &Topology) -> String {
    let count = topology.nodes.len();
    let shares = u32::try_from(count.max(1)).map_or(1.0, f64::from);
    let circle = if count == 1 {
        0.0
    } else {
        (SPACE_PER_NODE * shares / TAU * 2.0).max(130.0)
    };
    let size = 2.0 * (circle + RADIUS + 20.0);
    let places: Vec<(f64, f64)> = (0..count)
        .map(|index| {
            let angle = u32::try_from(index).map_or(0.0, f64::from) / shares * TAU - TAU / 4.0;
            (
                size / 2.0 + circle * angle.cos(),
                size / 2.0 + circle * angle.sin(),
            )
        })
        .collect();
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {size:.0} {size:.0}\" width=\"{size:.0}\" \
         height=\"{size:.0}\" font-family=\"sans-serif\" font-size=\"11\" text-anchor=\"middle\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    for (one, two, distance) in pairs(topology) {
        let ((x1, y1), (x2, y2)) = (places[one], places[two]);
        let opacity = (12.0 / f64::from(topology.distances[one][two])).clamp(0.1, 1.0);
        let _ = writeln!(
            text,
            "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"#345\" \
             stroke-opacity=\"{opacity:.2}\" stroke-width=\"2\"/>"
        );
        // A third of the way, so that the labels of crossing lines do not meet.
        let (x, y) = (x1 + (x2 - x1) * 0.36, y1 + (y2 - y1) * 0.36);
        let _ = writeln!(
            text,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" stroke=\"white\" stroke-width=\"3\" paint-order=\"stroke\">{distance}</text>"
        );
    }
    for (node, (x, y)) in topology.nodes.iter().zip(places) {
        let fill = if node.cpus.is_empty() || node.memory_bytes == 0 {
            "#fdebd0"
        } else {
            "#d6eaf8"
        };
        let _ = writeln!(
            text,
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{RADIUS}\" fill=\"{fill}\" stroke=\"#345\"/>"
        );
        for (line, dy) in label(node).iter().zip([-12.0, 3.0, 18.0]) {
            let short: String = if line.len() > 16 {
                format!("{}…", &line[..15])
            } else {
                line.clone()
            };
            let _ = writeln!(
                text,
                "<text x=\"{x:.1}\" y=\"{:.1}\">{short}</text>",
                y + dy
            );
        }
    }
    text + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_node_and_every_pair_is_drawn() {
        let node = |id| Node {
            id: numa::NodeId(id),
            memory_bytes: 1 << 30,
            ..Node::default()
        };
        let topology = Topology {
            source: numa::topology::Source::Sysfs,
            cpu_naming: numa::topology::CpuNaming::Logical,
            nodes: (0..3).map(node).collect(),
            distances: vec![vec![10, 20, 20], vec![31, 10, 20], vec![20, 20, 10]],
            offline: Vec::new(),
            performance: Vec::new(),
        };
        let dot = dot(&topology);
        assert_eq!(dot.matches(" -- ").count(), 3);
        assert!(
            dot.contains("n0 -- n1 [label=\"20 / 31\", len=2.0]")
                && dot.contains("n1 -- n2 [label=\"20\"")
        );
        let svg = svg(&topology);
        assert_eq!(
            (svg.matches("<circle").count(), svg.matches("<line").count()),
            (3, 3)
        );
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n") && svg.contains(">node 2<"));
    }
}
