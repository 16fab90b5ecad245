//! Curves and bars as SVG.

use std::fs::File;
use std::ops::Range;
use std::path::Path;

use anyhow::{Context as _, Result, anyhow};
use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;

const SIZE: (u32, u32) = (640, 320);

/// Tries whether a plot can be written into `file`, before all the time is spent that it takes.
///
/// # Errors
/// It cannot.
pub(crate) fn try_file(file: Option<&Path>) -> Result<()> {
    let Some(file) = file else { return Ok(()) };
    let opened = File::options().append(true).create(true).open(file);
    opened
        .map(drop)
        .with_context(|| format!("cannot write {}", file.display()))
}

/// One line of a plot.
pub(crate) struct Line {
    /// In the legend; lines of one name have one entry.
    pub(crate) name: String,
    pub(crate) color: RGBColor,
    pub(crate) points: Vec<(f64, f64)>,
}

/// The color of an engine: those of Okabe and Ito, which are told apart without red and green too.
pub(crate) fn color(engine: &str) -> RGBColor {
    match engine {
        "none" => RGBColor(120, 120, 120),
        "ksm" => RGBColor(230, 159, 0),
        "ksm-advisor" => RGBColor(204, 121, 167),
        "ksm-tuned" => RGBColor(213, 94, 0),
        "pageone-1" => RGBColor(86, 180, 233),
        "pageone-2" => RGBColor(0, 114, 178),
        _ => RGBColor(0, 0, 0),
    }
}

/// The colors of lines that are no engines'.
pub(crate) fn palette(number: usize) -> RGBColor {
    let names = [
        "pageone-2",
        "ksm-tuned",
        "pageone-1",
        "ksm",
        "ksm-advisor",
        "",
    ];
    color(names[number % names.len()])
}

/// A plot of something over time.
pub(crate) struct Panel<'a> {
    pub(crate) title: &'a str,
    pub(crate) unit: &'a str,
    pub(crate) lines: &'a [Line],
}

/// A plot over time; `since` names its beginning.
///
/// # Errors
/// There is nothing to draw.
pub(crate) fn over_time(title: &str, since: &str, unit: &str, lines: &[Line]) -> Result<String> {
    stacked(since, &[Panel { title, unit, lines }])
}

/// Plots over the same time, one below the other.
///
/// # Errors
/// As [`over_time`].
pub(crate) fn stacked(since: &str, panels: &[Panel<'_>]) -> Result<String> {
    let mut svg = String::new();
    {
        let rows = u32::try_from(panels.len()).unwrap_or(1).max(1);
        let root = SVGBackend::with_string(&mut svg, (SIZE.0, SIZE.1 * rows)).into_drawing_area();
        for (area, panel) in root.split_evenly((rows as usize, 1)).iter().zip(panels) {
            paint_over_time(area, since, panel)
                .map_err(|error| anyhow!("cannot draw {}: {error}", panel.title))?;
        }
        // Once for all areas: it ends the document.
        root.present()?;
    }
    Ok(svg)
}

fn paint_over_time(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    since: &str,
    panel: &Panel<'_>,
) -> Painted {
    let lines = panel.lines;
    let (x, y) = (ends(lines, |point| point.0), ends(lines, |point| point.1));
    let low = y.start.min(0.0);
    let room = (y.end - low).max(1e-3) * 0.08;
    let below = if low < 0.0 { room } else { 0.0 };
    let ranges = (0.0..x.end.max(1e-3), low - below..y.end + room);
    let axes = (&*format!("seconds since {since}"), panel.unit);
    paint(area, panel.title, axes, ranges, &|x| format!("{x}"), lines)
}

/// A plot of times by rank: each point is of accesses in a million and nanoseconds.
///
/// # Errors
/// As [`over_time`].
pub(crate) fn by_rank(title: &str, lines: &[Line]) -> Result<String> {
    let placed: Vec<Line> = lines
        .iter()
        .map(|line| Line {
            name: line.name.clone(),
            color: line.color,
            points: line
                .points
                .iter()
                .map(|&(rank, ns)| (place(rank), ns.max(1.0) / 1000.0))
                .collect(),
        })
        .collect();
    let y = ends(&placed, |point| point.1);
    let y = (y.start.max(1e-3) * 0.8..y.end * 1.3).log_scale();
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        let axes = ("share of the accesses", "µs at most");
        paint(&root, title, axes, (0.0..LONGEST, y), &share, &placed)
            .map_err(|error| anyhow!("cannot draw {title}: {error}"))?;
        root.present()?;
    }
    Ok(svg)
}

/// A plot of costs against what they depend on, both in steps of ten.
///
/// # Errors
/// As [`over_time`].
pub(crate) fn growth(title: &str, axes: (&str, &str), lines: &[Line]) -> Result<String> {
    let wide = |ends: Range<f64>| {
        let least = ends.start.max(1e-9);
        (least * 0.8..ends.end.max(least) * 1.3).log_scale()
    };
    let x = wide(ends(lines, |point| point.0));
    let y = wide(ends(lines, |point| point.1));
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        paint(&root, title, axes, (x, y), &|x| format!("{x:e}"), lines)
            .map_err(|error| anyhow!("cannot draw {title}: {error}"))?;
        root.present()?;
    }
    Ok(svg)
}

/// The place of the longest access.
const LONGEST: f64 = 5.0;

/// Each further nine is a step to the right.
fn place(per_million: f64) -> f64 {
    let rest = 1.0 - per_million / 1e6;
    if rest < 5e-6 { LONGEST } else { -rest.log10() }
}

fn share(place: &f64) -> String {
    match place {
        place if *place >= LONGEST => "all".to_owned(),
        place if place.fract().abs() < 1e-6 => {
            let percent = 100.0 * (1.0 - 10_f64.powf(-place));
            format!("{}%", (percent * 1000.0).round() / 1000.0)
        }
        _ => String::new(),
    }
}

fn ends(lines: &[Line], of: impl Fn(&(f64, f64)) -> f64) -> Range<f64> {
    let values = || lines.iter().flat_map(|line| line.points.iter().map(&of));
    let (least, most) = (
        values().fold(f64::MAX, f64::min),
        values().fold(f64::MIN, f64::max),
    );
    if least > most { 0.0..1.0 } else { least..most }
}

type Painted = std::result::Result<(), Box<dyn std::error::Error>>;

fn paint<X, Y>(
    root: &DrawingArea<SVGBackend<'_>, Shift>,
    title: &str,
    axes: (&str, &str),
    (x, y): (X, Y),
    x_label: &dyn Fn(&f64) -> String,
    lines: &[Line],
) -> Painted
where
    X: AsRangedCoord<Value = f64>,
    X::CoordDescType: ValueFormatter<f64>,
    Y: AsRangedCoord<Value = f64>,
    Y::CoordDescType: ValueFormatter<f64>,
{
    root.fill(&WHITE)?;
    let mut builder = ChartBuilder::on(root);
    builder.caption(title, ("sans-serif", 16)).margin(10);
    builder.x_label_area_size(36).y_label_area_size(56);
    let mut chart = builder.build_cartesian_2d(x, y)?;
    let mut mesh = chart.configure_mesh();
    mesh.light_line_style(TRANSPARENT)
        .x_label_formatter(&x_label);
    mesh.x_desc(axes.0)
        .y_desc(axes.1)
        .label_style(("sans-serif", 11))
        .draw()?;
    let mut named: Vec<&str> = Vec::new();
    for line in lines {
        let color = line.color;
        let series = chart.draw_series(LineSeries::new(
            line.points.iter().copied(),
            color.stroke_width(2),
        ))?;
        if !named.contains(&line.name.as_str()) {
            named.push(&line.name);
            series.label(line.name.as_str());
            series.legend(move |(x, y)| {
                PathElement::new([(x, y), (x + 16, y)], color.stroke_width(3))
            });
        }
    }
    let mut legend = chart.configure_series_labels();
    legend
        .position(SeriesLabelPosition::MiddleRight)
        .label_font(("sans-serif", 11));
    legend
        .background_style(WHITE.mix(0.8))
        .border_style(TRANSPARENT)
        .draw()?;
    Ok(())
}

/// Bars, one below the other, each of parts that are named once.
pub(crate) struct Bars<'a> {
    pub(crate) title: &'a str,
    pub(crate) unit: &'a str,
    /// Name and color of each part.
    pub(crate) parts: &'a [(&'a str, RGBColor)],
    /// Name and values of each bar, the uppermost first.
    pub(crate) bars: &'a [(String, Vec<f64>)],
}

/// Pixels of a bar, and of what stands above and below all of them.
const BAR: (u32, u32) = (24, 100);

/// Groups of bars, one below the other.
///
/// # Errors
/// As [`over_time`].
pub(crate) fn bars(groups: &[Bars<'_>]) -> Result<String> {
    let height = |group: &Bars<'_>| {
        let bars = u32::try_from(group.bars.len()).unwrap_or(u32::MAX);
        BAR.0.saturating_mul(bars.clamp(1, 1000)) + BAR.1
    };
    let all = groups.iter().map(height).sum::<u32>().max(BAR.1);
    let mut svg = String::new();
    {
        let mut rest = SVGBackend::with_string(&mut svg, (SIZE.0, all)).into_drawing_area();
        for group in groups {
            let (area, below) = rest.split_vertically(height(group));
            paint_bars(&area, group)
                .map_err(|error| anyhow!("cannot draw {}: {error}", group.title))?;
            rest = below;
        }
        rest.present()?;
    }
    Ok(svg)
}

fn paint_bars(area: &DrawingArea<SVGBackend<'_>, Shift>, group: &Bars<'_>) -> Painted {
    area.fill(&WHITE)?;
    let count = i32::try_from(group.bars.len())?.max(1);
    let sums = group.bars.iter().map(|(_, values)| values.iter().sum());
    let most = sums.fold(1e-3, f64::max);
    let mut builder = ChartBuilder::on(area);
    builder
        .caption(group.title, ("sans-serif", 16))
        .margin(10)
        .x_label_area_size(36)
        .y_label_area_size(230);
    // The legend lies over no bar.
    let room = if group.parts.len() > 1 { 1.45 } else { 1.05 };
    let mut chart = builder.build_cartesian_2d(0.0..most * room, (0..count).into_segmented())?;
    // The axis goes upwards.
    let name = |at: &SegmentValue<i32>| match at {
        SegmentValue::CenterOf(at) => usize::try_from(count - 1 - at)
            .ok()
            .and_then(|at| group.bars.get(at))
            .map_or_else(String::new, |(name, _)| name.clone()),
        _ => String::new(),
    };
    let mut mesh = chart.configure_mesh();
    mesh.disable_y_mesh().light_line_style(TRANSPARENT);
    mesh.x_desc(group.unit)
        .y_labels(group.bars.len().max(1))
        .y_label_formatter(&name)
        .label_style(("sans-serif", 11))
        .draw()?;
    for (part, &(label, color)) in group.parts.iter().enumerate() {
        let boxes = (0..count).zip(group.bars.iter().rev());
        let boxes = boxes.map(|(at, (_, values))| {
            let begin: f64 = values.iter().take(part).sum();
            let end = begin + values.get(part).copied().unwrap_or_default();
            let corners = [
                (begin, SegmentValue::Exact(at)),
                (end, SegmentValue::Exact(at + 1)),
            ];
            let mut bar = Rectangle::new(corners, color.filled());
            bar.set_margin(3, 3, 0, 0);
            bar
        });
        let series = chart.draw_series(boxes)?;
        if group.parts.len() > 1 {
            series.label(label).legend(move |(x, y)| {
                Rectangle::new([(x, y - 4), (x + 12, y + 4)], color.filled())
            });
        }
    }
    if group.parts.len() > 1 {
        let mut legend = chart.configure_series_labels();
        legend
            .position(SeriesLabelPosition::LowerRight)
            .label_font(("sans-serif", 11))
            .background_style(WHITE.mix(0.8))
            .border_style(TRANSPARENT)
            .draw()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(points: &[(f64, f64)]) -> Line {
        Line {
            name: "ksm & co".to_owned(),
            color: color("ksm"),
            points: points.to_vec(),
        }
    }

    #[test]
    fn a_line_is_drawn_in_its_color_and_named_once() {
        let lines = [
            line(&[(0.0, 0.0), (2.0, 5.0)]),
            line(&[(0.0, -1.0), (1.0, 4.0)]),
        ];
        let svg = over_time("saved", "now", "MiB", &lines).unwrap();
        assert!(
            svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"),
            "{svg}"
        );
        assert_eq!(svg.matches("ksm &amp; co").count(), 1, "{svg}");
        assert!(svg.matches("<polyline").count() > 2, "{svg}");
        assert!(svg.contains("#E69F00"), "{svg}");
    }

    /// Whether all of it is one document.
    fn is_whole(svg: &str) -> bool {
        let ends = svg.matches("</svg>").count();
        ends == 1 && svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>")
    }

    #[test]
    fn bars_have_names_and_parts() {
        let of = |name: &str, values: &[f64]| (name.to_owned(), values.to_vec());
        let group = Bars {
            title: "memory",
            unit: "MiB",
            parts: &[("zeros", color("ksm")), ("copies", color("none"))],
            bars: &[of("first & best", &[1.0, 2.0]), of("second", &[0.0, 4.0])],
        };
        let empty = Bars {
            title: "empty",
            bars: &[],
            ..group
        };
        let svg = bars(&[group, empty]).unwrap();
        let places = ["first &amp; best", "second", "empty"].map(|text| svg.find(text));
        assert!(places.iter().all(Option::is_some), "{svg}");
        assert!(svg.contains("#E69F00") && svg.contains("copies"), "{svg}");
        assert!(is_whole(&svg), "{svg}");
        assert!(bars(&[]).is_ok());
    }

    #[test]
    fn plots_stand_one_below_the_other() {
        let lines = [line(&[(0.0, 0.0), (2.0, 5.0)])];
        let panel = |title| Panel {
            title,
            unit: "MiB",
            lines: &lines,
        };
        let svg = stacked("now", &[panel("above"), panel("below")]).unwrap();
        assert!(svg.contains("height=\"640\""), "{svg}");
        let places = ["above", "below"].map(|title| svg.find(title).unwrap());
        assert!(places[0] < places[1] && is_whole(&svg), "{svg}");
    }

    #[test]
    fn each_nine_is_a_step() {
        assert!((place(990_000.0) - 2.0).abs() < 1e-9 && (place(999_900.0) - 4.0).abs() < 1e-6);
        assert_eq!(
            (share(&1.0), share(&3.0), share(&LONGEST)),
            ("90%".into(), "99.9%".into(), "all".into())
        );
        assert_eq!(place(1e6), LONGEST);
        let svg = by_rank("reads", &[line(&[(500_000.0, 40.0), (1e6, 9e6)])]).unwrap();
        assert!(
            svg.contains("99.9%") && svg.contains("µs") && is_whole(&svg),
            "{svg}"
        );
    }

    #[test]
    fn a_cost_is_drawn_in_steps_of_ten() {
        let axes = ("pages", "ns");
        let svg = growth("merge", axes, &[line(&[(1e3, 10.0), (1e9, 2e3)])]).unwrap();
        assert!(is_whole(&svg) && svg.contains("ksm &amp; co"), "{svg}");
        assert!(growth("empty", axes, &[]).is_ok());
    }

    #[test]
    fn nothing_and_a_single_point_are_drawn_too() {
        over_time("empty", "now", "MiB", &[]).unwrap();
        over_time("one", "now", "MiB", &[line(&[(0.0, 0.0)])]).unwrap();
    }
}
