//! The figures to reach, and whether they were.

/// What was measured against what is to be reached.
#[derive(Clone, Debug)]
pub struct Figure {
    /// What it is about.
    pub what: String,
    /// Measured.
    pub measured: f64,
    /// To be reached.
    pub limit: f64,
    /// Is more better?
    pub at_least: bool,
    /// Of both numbers.
    pub unit: &'static str,
}

impl Figure {
    /// `measured` is to be at most `limit`.
    pub fn at_most(what: impl Into<String>, measured: f64, limit: f64, unit: &'static str) -> Self {
        Self { what: what.into(), measured, limit, at_least: false, unit }
    }

    /// `measured` is to be at least `limit`.
    pub fn at_least(what: impl Into<String>, measured: f64, limit: f64, unit: &'static str) -> Self {
        Self { what: what.into(), measured, limit, at_least: true, unit }
    }

    fn is_met(&self) -> bool {
        if self.at_least { self.measured >= self.limit } else { self.measured <= self.limit }
    }
}

/// Prints one line a figure.
pub fn print(figures: &[Figure]) {
    println!("\n| figure | to reach | measured | |\n|---|---|---|---|");
    for figure in figures {
        let Figure { what, measured, limit, at_least, unit } = figure;
        let digits = if *limit < 10.0 { 2 } else { 0 };
        let sign = if *at_least { ">=" } else { "<=" };
        let verdict = if figure.is_met() {
            "met".to_owned()
        } else {
            format!("missed by {:.0} %", (measured / limit - 1.0).abs() * 100.0)
        };
        println!("| {what} | {sign} {limit} {unit} | {measured:.digits$} {unit} | {verdict} |");
    }
}
