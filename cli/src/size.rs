//! Sizes as people write them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A number of bytes: `16384`, `16KiB`, `2MiB`, `1GiB`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Size(pub(crate) u64);

/// A text that is no size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{found:?} is no size: write a whole number of bytes, or one with KiB, MiB or GiB, such as 16KiB")]
pub(crate) struct SizeError {
    found: String,
}

impl FromStr for Size {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let refuse = || SizeError { found: text.to_owned() };
        let text_end = text.trim().find(|c: char| !c.is_ascii_digit()).unwrap_or(text.trim().len());
        let (number, unit) = text.trim().split_at(text_end);
        let unit = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "k" | "kib" => 1 << 10,
            "m" | "mib" => 1 << 20,
            "g" | "gib" => 1 << 30,
            _ => return Err(refuse()),
        };
        number.parse().ok().and_then(|number: u64| number.checked_mul(unit)).map(Self).ok_or_else(refuse)
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(1_u64 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
        match units.into_iter().find(|(unit, _)| self.0 >= *unit && self.0.is_multiple_of(*unit)) {
            // 2048 KiB is how tables of block sizes are read, beside 512 KiB.
            Some((unit, name)) if unit != 1 << 20 || self.0 >= 16 << 20 => f.pad(&format!("{} {name}", self.0 / unit)),
            Some(_) => f.pad(&format!("{} KiB", self.0 >> 10)),
            None => f.pad(&format!("{} B", self.0)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, bytes) in
            [("16384", 16384), ("16KiB", 16384), (" 16 kib ", 16384), ("2MiB", 2 << 20), ("1g", 1 << 30), ("0", 0)]
        {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        for text in ["", "KiB", "1.5MiB", "-1", "1TB", "99999999999999999999", "18446744073709551615KiB"] {
            let error = text.parse::<Size>().unwrap_err().to_string();
            assert!(error.contains("such as 16KiB"), "{error}");
        }
    }

    #[test]
    fn sizes_are_shown_in_the_unit_that_divides_them() {
        for (bytes, text) in
            [(16 << 10, "16 KiB"), (2 << 20, "2048 KiB"), (256 << 20, "256 MiB"), (1 << 30, "1 GiB"), (100, "100 B")]
        {
            assert_eq!(Size(bytes).to_string(), text);
        }
    }
}
