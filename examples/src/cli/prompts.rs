//! Prompt files: one prompt a line.

use std::path::{Path, PathBuf};

/// Why a prompt file cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PromptsError {
    /// The file cannot be read.
    #[error("prompts {path}: cannot be read; give --prompts a UTF-8 text file with one prompt a line")]
    Open {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A line has an escape that means nothing.
    #[error("prompts {path}, line {line}: {escape:?} is no escape; write \\n, \\t or \\\\")]
    Escape {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The escape.
        escape: String,
    },
    /// No line has a prompt.
    #[error("prompts {path}: no prompt in it; write one a line")]
    Empty {
        /// The file.
        path: PathBuf,
    },
}

/// Reads a prompt file.
///
/// # Errors
/// [`PromptsError`].
pub fn read_prompts(path: &Path) -> Result<Vec<String>, PromptsError> {
    let text = std::fs::read_to_string(path).map_err(|source| PromptsError::Open { path: path.into(), source })?;
    parse_prompts(path, &text)
}

/// Parses a prompt file's text: `\n`, `\t` and `\\` are escapes, empty lines are skipped.
///
/// # Errors
/// [`PromptsError::Escape`] and [`PromptsError::Empty`].
pub fn parse_prompts(path: &Path, text: &str) -> Result<Vec<String>, PromptsError> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.is_empty());
    let prompts = lines.map(|(index, line)| {
        unescape(line).map_err(|escape| PromptsError::Escape { path: path.into(), line: index + 1, escape })
    });
    let prompts = prompts.collect::<Result<Vec<_>, _>>()?;
    if prompts.is_empty() {
        return Err(PromptsError::Empty { path: path.into() });
    }
    Ok(prompts)
}

fn unescape(line: &str) -> Result<String, String> {
    let mut out = String::with_capacity(line.len());
    let mut chars = line.chars();
    while let Some(c) = chars.next() {
        if c != '\\' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('n') => out.push('\n'),
            Some('t') => out.push('\t'),
            Some('\\') => out.push('\\'),
            other => return Err(std::iter::once('\\').chain(other).collect()),
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_prompts_and_escapes_are_read() {
        let prompts = parse_prompts(Path::new("p"), "one\\ntwo\n\n a\\\\b\\t\nthree\n").unwrap();
        assert_eq!(prompts, ["one\ntwo", " a\\b\t", "three"]);
    }

    #[test]
    fn a_wrong_escape_is_refused_with_its_line() {
        for (text, want) in
            [("fine\nnot \\q", "line 2: \"\\\\q\""), ("at the end \\", "line 1: \"\\\\\""), ("\n\n", "no prompt")]
        {
            let error = parse_prompts(Path::new("p"), text).unwrap_err().to_string();
            assert!(error.contains(want), "{text:?}: {error}");
        }
        assert!(read_prompts(Path::new("/nonexistent")).unwrap_err().to_string().contains("/nonexistent"));
    }
}
