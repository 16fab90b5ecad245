//! How a cost grows: the measured points, and those that a law or a model adds.
//!
//! Each point beyond is labelled by where it comes from, in tables and plots.

use serde::{Deserialize, Serialize};

/// A cost against what it depends on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Growth {
    /// Which cost.
    pub(super) name: String,
    /// What it depends on.
    pub(super) of: String,
    /// The unit of the cost.
    pub(super) unit: String,
    /// What was measured.
    pub(super) points: Vec<(f64, f64)>,
    /// What was not.
    pub(super) beyond: Option<Beyond>,
}

/// Points that were not measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Beyond {
    /// Where they come from, in words.
    pub(super) by: String,
    pub(super) points: Vec<(f64, f64)>,
}

/// y = factor · x ^ power.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Law {
    factor: f64,
    power: f64,
}

impl Law {
    /// The law that is nearest to `points`, by least squares of logarithms. None of fewer than three: one goes through any two, and tells
    /// nothing.
    fn of(points: &[(f64, f64)]) -> Option<Self> {
        let positive = points.iter().filter(|(x, y)| *x > 0.0 && *y > 0.0);
        let logs: Vec<_> = positive.map(|(x, y)| (x.ln(), y.ln())).collect();
        let mean = |of: fn(&(f64, f64)) -> f64| {
            let sum: f64 = logs.iter().map(of).sum();
            sum / f64::from(u32::try_from(logs.len()).unwrap_or(u32::MAX).max(1))
        };
        let (x, y) = (mean(|point| point.0), mean(|point| point.1));
        let spread: f64 = logs.iter().map(|point| (point.0 - x).powi(2)).sum();
        let both: f64 = logs.iter().map(|point| (point.0 - x) * (point.1 - y)).sum();
        (logs.len() > 2 && spread > 0.0).then(|| {
            let power = both / spread;
            Self {
                factor: (y - power * x).exp(),
                power,
            }
        })
    }

    fn at(self, x: f64) -> f64 {
        self.factor * x.powf(self.power)
    }
}

impl Growth {
    pub(super) fn new(name: &str, of: &str, unit: &str, points: Vec<(f64, f64)>) -> Self {
        Self {
            name: name.to_owned(),
            of: of.to_owned(),
            unit: unit.to_owned(),
            points,
            beyond: None,
        }
    }

    /// The same, with a law fitted to the points, and what it makes of `places`.
    pub(super) fn extrapolated(mut self, places: &[f64]) -> Self {
        let (law, of) = (Law::of(&self.points), &self.of);
        self.beyond = law.map(|law| Beyond {
            by: format!("extrapolated, by {of}^{:.2}", law.power),
            points: places.iter().map(|&place| (place, law.at(place))).collect(),
        });
        self
    }

    /// The same, with what a model makes of other places.
    pub(super) fn modelled(mut self, by: &str, points: Vec<(f64, f64)>) -> Self {
        let by = by.to_owned();
        self.beyond = Some(Beyond { by, points });
        self
    }

    /// As rows: the cost, where, how much, and by whose word.
    pub(super) fn rows(&self) -> Vec<Vec<String>> {
        let row = |(x, y): &(f64, f64), by: &str| {
            let place = format!("{} {}", count(*x), self.of);
            let cost = format!("{} {}", count(*y), self.unit);
            vec![self.name.clone(), place, cost, by.to_owned()]
        };
        let measured = self.points.iter().map(|point| row(point, "measured"));
        let beyond = self.beyond.iter().flat_map(|beyond| {
            let points = beyond.points.iter();
            points.map(|point| row(point, &beyond.by))
        });
        measured.chain(beyond).collect()
    }
}

/// The number in so few digits as tell it, in thousands and millions.
pub(super) fn count(value: f64) -> String {
    let units = [(1e9, " G"), (1e6, " M"), (1e3, " k")];
    let large = units.into_iter().find(|(size, _)| value.abs() >= *size);
    let (size, unit) = large.unwrap_or((1.0, ""));
    let scaled = value / size;
    match scaled.abs() {
        whole if whole.fract() < 1e-9 => format!("{scaled:.0}{unit}"),
        size if size >= 100.0 => format!("{scaled:.0}{unit}"),
        size if size >= 1.0 => format!("{scaled:.1}{unit}"),
        _ => format!("{scaled:.2}{unit}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_law_is_found_again_and_labelled() {
        let points: Vec<_> = [1.0, 10.0, 100.0]
            .map(|x: f64| (x, 3.0 * x.powf(0.5)))
            .to_vec();
        let growth = Growth::new("get", "keys", "ns", points).extrapolated(&[10_000.0]);
        let beyond = growth.beyond.as_ref().unwrap();
        assert_eq!(beyond.by, "extrapolated, by keys^0.50");
        assert!((beyond.points[0].1 - 300.0).abs() < 1e-6, "{beyond:?}");
        let rows = growth.rows();
        assert_eq!(rows.len(), 4);
        assert_eq!(rows[0], ["get", "1 keys", "3 ns", "measured"]);
        assert_eq!(rows[3][1..3], ["10 k keys", "300 ns"]);
    }

    #[test]
    fn two_places_have_no_law() {
        for points in [
            vec![],
            vec![(1.0, 2.0), (2.0, 4.0)],
            vec![(0.0, 1.0), (1.0, 2.0), (2.0, 0.0)],
            vec![(1.0, 2.0), (1.0, 3.0), (1.0, 4.0)],
        ] {
            let growth = Growth::new("get", "keys", "ns", points).extrapolated(&[9.0]);
            assert_eq!(growth.beyond, None);
        }
    }

    #[test]
    fn counts_are_short() {
        let of = |value| count(value);
        assert_eq!(of(0.36), "0.36");
        assert_eq!(of(81.23), "81.2");
        assert_eq!(
            (of(102_400_000.0), of(4096.0)),
            ("102 M".into(), "4.1 k".into())
        );
    }
}
