//! The machine's files, under a root that tests replace.

use std::path::PathBuf;

/// Where `/proc` and `/sys` are.
#[derive(Clone, Debug)]
pub(crate) struct Root(PathBuf);

impl Root {
    /// The machine's own.
    pub(crate) fn machine() -> Self {
        Self("/".into())
    }

    #[cfg(test)]
    pub(crate) fn at(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// A file's text without the spaces around it; nothing if it cannot be read.
    pub(crate) fn text(&self, path: &str) -> Option<String> {
        std::fs::read_to_string(self.0.join(path)).ok().map(|text| text.trim().to_owned())
    }

    /// A file that holds one number.
    pub(crate) fn number(&self, path: &str) -> Option<i64> {
        self.text(path)?.parse().ok()
    }

    /// The names in a folder, sorted by the numbers in them; none if it is not there.
    pub(crate) fn names(&self, path: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.0.join(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort_by_key(|name| {
            let digits: String = name.chars().filter(char::is_ascii_digit).collect();
            (digits.parse::<u64>().unwrap_or(0), name.clone())
        });
        names
    }
}

/// The word in brackets of a setting such as `always [madvise] never`.
pub(crate) fn chosen(setting: &str) -> Option<&str> {
    setting.split_once('[')?.1.split_once(']').map(|(word, _)| word)
}

/// How many numbers a list such as `0-3,8` names.
pub(crate) fn count_of(list: &str) -> usize {
    let part = |part: &str| -> Option<usize> {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        (last + 1).checked_sub(first)
    };
    list.split(',').filter_map(part).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_settings_are_read_as_the_kernel_writes_them() {
        for (list, count) in [("0-3", 4), ("0", 1), ("0-1,8,10-11", 5), ("", 0), ("x", 0)] {
            assert_eq!(count_of(list), count, "{list}");
        }
        assert_eq!(chosen("always [madvise] never"), Some("madvise"));
        assert_eq!(chosen("madvise"), None);
    }
}
