//! The text page that Prometheus and its kin scrape.
//!
//! Source: Prometheus' "Exposition formats", text format 0.0.4.

use std::fmt::Write as _;

use super::catalogue::{ConnectorMetrics, DEFINITIONS, Metrics};
use super::instrument::{Kind, Sink};

/// The page's `Content-Type`.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// What a metric is called and means.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Definition {
    /// Its name on the page.
    pub name: &'static str,
    /// Its kind.
    pub kind: Kind,
    /// What it says, with its unit.
    pub meaning: &'static str,
}

impl Kind {
    /// The word of a `TYPE` line.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

impl Metrics {
    /// Writes all metrics in text format 0.0.4. `labels` stand before the labels of each sample: names of letters, digits and
    /// `_`, any values. Serve it with [`CONTENT_TYPE`].
    #[must_use]
    pub fn prometheus(&self, labels: &[(&str, &str)]) -> String {
        self.snapshot().prometheus(labels)
    }
}

impl ConnectorMetrics {
    /// Writes this moment's values as [`Metrics::prometheus`] does.
    #[must_use]
    pub fn prometheus(&self, labels: &[(&str, &str)]) -> String {
        let mut page = Page { text: String::new(), labels };
        self.write(&mut page);
        page.text
    }
}

/// A page that is being written. Writing to its text cannot fail.
pub(super) struct Page<'p> {
    text: String,
    labels: &'p [(&'p str, &'p str)],
}

impl Page<'_> {
    pub(super) fn metric(&mut self, definition: &Definition, samples: impl FnOnce(&mut Sink<'_>)) {
        let Definition { name, kind, meaning } = definition;
        let help = meaning.replace('\\', "\\\\").replace('\n', "\\n");
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {}", kind.word());
        let (text, labels) = (&mut self.text, self.labels);
        samples(&mut |own, suffix, bound, value| {
            let _ = write!(text, "{name}{suffix}");
            let bound = bound.map(|bound| if bound.is_infinite() { "+Inf".to_owned() } else { bound.to_string() });
            let bucket = bound.as_deref().map(|bound| ("le", bound));
            let mut mark = '{';
            for (name, value) in labels.iter().copied().chain(own.iter().copied()).chain(bucket) {
                let _ = write!(text, "{mark}{name}=\"{}\"", escape(value));
                mark = ',';
            }
            let _ = writeln!(text, "{} {value}", if mark == ',' { "}" } else { "" });
        });
    }
}

fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// The table of all metrics, in Markdown, for the documentation.
#[must_use]
pub fn table() -> String {
    let mut table = String::from("| metric | kind | meaning |\n|---|---|---|\n");
    for Definition { name, kind, meaning } in DEFINITIONS {
        // Writing to a string does not fail.
        let _ = writeln!(table, "| `{name}` | {} | {meaning} |", kind.word());
    }
    table
}
