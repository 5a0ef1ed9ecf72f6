//! Rows, medians, and the forms they are shown in: a table for people, `summary.json` for machines.

use std::fmt::Write as _;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

/// One figure beside the one it is measured against.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// What was measured.
    pub name: String,
    /// In what both figures are.
    pub unit: &'static str,
    /// Ours: the median of the runs.
    pub ours: f64,
    /// The other one.
    pub other: f64,
    /// What the other one is.
    pub other_name: String,
    /// Ours over the other one in the sense "bigger is better".
    pub ratio: f64,
    /// The ratio that is wanted at least; `None` for a figure that explains others.
    pub target: Option<f64>,
    /// Whether it was reached.
    pub met: Option<bool>,
    /// Under which conditions, and how far the runs lay apart.
    pub conditions: String,
}

impl Row {
    /// For figures of which more is better.
    pub(super) fn rate(name: impl Into<String>, unit: &'static str, ours: &Runs, other: f64) -> Self {
        Self::new(name.into(), unit, ours, other, ours.median() / other)
    }

    /// For figures of which less is better.
    pub(super) fn cost(name: impl Into<String>, unit: &'static str, ours: &Runs, other: f64) -> Self {
        Self::new(name.into(), unit, ours, other, other / ours.median())
    }

    fn new(name: String, unit: &'static str, ours: &Runs, other: f64, ratio: f64) -> Self {
        let spread = format!("runs {} to {}", shown(ours.least()), shown(ours.most()));
        let ours = ours.median();
        let other_name = "limit".to_owned();
        let row = Self { name, unit, ours, other, other_name, ratio, target: None, met: None, conditions: spread };
        row.against_target(1.0)
    }

    /// The ratio was taken in another way than from the two medians: run by run, say.
    pub(super) fn with_ratio(mut self, ratio: f64) -> Self {
        self.ratio = ratio;
        self.met = self.target.map(|target| ratio >= target);
        self
    }

    pub(super) fn against(mut self, other_name: impl Into<String>) -> Self {
        self.other_name = other_name.into();
        self
    }

    pub(super) fn against_target(mut self, target: f64) -> Self {
        self.target = Some(target);
        self.met = Some(self.ratio >= target);
        self
    }

    /// No goal: the figure explains another one.
    pub(super) fn explaining(mut self) -> Self {
        (self.target, self.met) = (None, None);
        self
    }

    pub(super) fn under(mut self, conditions: impl AsRef<str>) -> Self {
        self.conditions = format!("{}; {}", conditions.as_ref(), self.conditions);
        self
    }

    /// One line for people.
    pub fn line(&self) -> String {
        format!(
            "{:<58} {:>11} {:<9} {:>11} {:<27} {:>6.2}  {:>5}  {}",
            self.name,
            shown(self.ours),
            self.unit,
            shown(self.other),
            self.other_name,
            self.ratio,
            self.target.map_or_else(|| "-".to_owned(), |target| format!("{target:.2}")),
            self.met.map_or("", |met| if met { "met" } else { "NOT MET" })
        )
    }
}

/// Everything one run of the benchmarks found.
#[derive(Debug, Serialize)]
pub struct Report {
    /// In the order they were measured.
    pub rows: Vec<Row>,
    /// What could not be measured, and why.
    pub notes: Vec<String>,
    /// The machine and how busy it was when the run began.
    pub machine: String,
}

impl Report {
    pub(super) fn new() -> Self {
        Self { rows: Vec::new(), notes: Vec::new(), machine: machine() }
    }

    /// The table's head.
    pub fn head() -> String {
        format!(
            "{:<58} {:>11} {:<9} {:>11} {:<27} {:>6}  {:>5}  {}",
            "LINE", "MEASURED", "UNIT", "OTHER", "WHICH IS", "RATIO", "GOAL", ""
        )
    }

    /// The conditions of every row, for below the table.
    pub fn conditions(&self) -> String {
        let mut text = format!("machine: {}\n", self.machine);
        for row in &self.rows {
            let _ = writeln!(text, "{}: {}", row.name, row.conditions);
        }
        for note in &self.notes {
            let _ = writeln!(text, "note: {note}");
        }
        text
    }
}

fn machine() -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let cpu = read("/proc/cpuinfo");
    let model = cpu.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": ")).map_or("?", |(_, m)| m);
    let cores = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    format!("{cores} cores, {model}, load {} before", read("/proc/loadavg").trim())
}

/// The figures of the runs of one line.
#[derive(Debug, Clone)]
pub(super) struct Runs(Vec<f64>);

impl Runs {
    /// `figures` must not be empty.
    pub fn new(mut figures: Vec<f64>) -> Self {
        assert!(!figures.is_empty(), "a line was run at least once");
        figures.sort_by(f64::total_cmp);
        Self(figures)
    }

    pub fn median(&self) -> f64 {
        let middle = self.0.len() / 2;
        if self.0.len() % 2 == 1 { self.0[middle] } else { (self.0[middle - 1] + self.0[middle]) / 2.0 }
    }

    pub fn least(&self) -> f64 {
        self.0[0]
    }

    pub fn most(&self) -> f64 {
        self.0[self.0.len() - 1]
    }
}

/// A figure with as many digits as mean something.
pub(super) fn shown(figure: f64) -> String {
    match figure.abs() {
        size if size >= 100.0 => {
            let digits = format!("{:.0}", figure.abs());
            let grouped: Vec<&str> = digits
                .as_bytes()
                .rchunks(3)
                .rev()
                .map(|group| std::str::from_utf8(group).unwrap_or_default())
                .collect();
            grouped.join(",")
        }
        size if size >= 10.0 => format!("{figure:.1}"),
        _ => format!("{figure:.2}"),
    }
}

/// The time that this thread has been on a core: on a shared machine, the others' time does not count.
pub(super) fn on_core() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.try_into().unwrap_or_default(), time.tv_nsec.try_into().unwrap_or_default())
}

/// Resident bytes of this process.
pub(super) fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.split_whitespace().next()?.parse().ok());
    resident.map_or(0, |kib: u64| kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_is_the_middle_of_the_runs() {
        assert_eq!(Runs::new(vec![3.0, 1.0, 2.0]).median(), 2.0);
        assert_eq!(Runs::new(vec![4.0, 1.0, 2.0, 3.0]).median(), 2.5);
    }

    #[test]
    fn bigger_is_better_in_every_ratio() {
        let runs = Runs::new(vec![2.0]);
        assert_eq!(Row::rate("r", "/s", &runs, 1.0).met, Some(true));
        assert_eq!(Row::cost("c", "s", &runs, 1.0).met, Some(false));
        assert_eq!(Row::cost("c", "s", &runs, 1.0).explaining().with_ratio(9.0).met, None);
        assert_eq!(Row::cost("c", "s", &runs, 1.0).against_target(0.5).met, Some(true));
    }

    #[test]
    fn figures_are_grouped() {
        assert_eq!(shown(1_234_567.8), "1,234,568");
        assert_eq!((shown(12.34), shown(1.234)), ("12.3".to_owned(), "1.23".to_owned()));
    }
}
