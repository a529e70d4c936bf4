//! One thing that was looked at.

use std::fmt::Write as _;

use serde::Serialize;

/// How it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum State {
    /// As it should be.
    Ok,
    /// Works, but something is slower or not there.
    Note,
    /// kvferry cannot do its work.
    Broken,
}

/// What was found, and what to do about it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) name: &'static str,
    pub(crate) state: State,
    pub(crate) found: String,
    /// What it means and how to mend it; nothing if all is well.
    pub(crate) mend: Option<String>,
}

impl Row {
    pub(crate) fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, state: State::Ok, found: found.into(), mend: None }
    }

    pub(crate) fn note(name: &'static str, found: impl Into<String>, mend: impl Into<String>) -> Self {
        Self { name, state: State::Note, found: found.into(), mend: Some(mend.into()) }
    }

    pub(crate) fn broken(name: &'static str, found: impl Into<String>, mend: impl Into<String>) -> Self {
        Self { name, state: State::Broken, found: found.into(), mend: Some(mend.into()) }
    }
}

/// A table for people: what is found, and under it what to do.
pub(crate) fn table(rows: &[Row]) -> String {
    let width = rows.iter().map(|row| row.name.len()).max().unwrap_or(0);
    let mut out = String::new();
    for row in rows {
        let state = match row.state {
            State::Ok => "ok    ",
            State::Note => "note  ",
            State::Broken => "BROKEN",
        };
        let _ = writeln!(out, "{state} {:<width$}  {}", row.name, row.found);
        if let Some(mend) = &row.mend {
            let _ = writeln!(out, "       {:<width$}  -> {mend}", "");
        }
    }
    out
}
