//! A layout's name: the order of its axes, outermost first, as it stands on command lines (`BLPNHC`).

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// One axis of a KV cache; C, the run, is always innermost and has no axis.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum Axis {
    /// L: a layer.
    Layer,
    /// B: a block of tokens.
    Block,
    /// P: a plane, K or V; MLA has one.
    Plane,
    /// H: a KV head.
    Head,
    /// N: a token in its block.
    Token,
}

impl Axis {
    const ALL: [Self; 5] = [Self::Layer, Self::Block, Self::Plane, Self::Head, Self::Token];

    const fn letter(self) -> char {
        match self {
            Self::Layer => 'L',
            Self::Block => 'B',
            Self::Plane => 'P',
            Self::Head => 'H',
            Self::Token => 'N',
        }
    }
}

/// A permutation of the five axes, outermost first. Any of the 120 may be used; [`LayoutOrder::LISTED`] are those in the field.
///
/// Parsed from and shown as the letters and a final `C`. Axes of size 1 may be left out of the name: `BLNC` is MLA.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct LayoutOrder([Axis; 5]);

/// Why a string names no order.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "layout order {name:?}: {problem}; write each of L B P H N at most once (L, B and N always), then C, as in BLPNHC"
)]
pub struct OrderError {
    /// The refused name.
    pub name: String,
    /// What is wrong with it.
    pub problem: String,
}

impl LayoutOrder {
    /// The orders that engines use today; who uses which: the table in ARCHITECTURE.md.
    pub const LISTED: [&'static str; 12] = [
        "LPBNHC", "LBPNHC", "LBPHNC", "PLBNHC", "LBNHPC", "LBHNPC", "BLPNHC", "BHLPNC", "BPHLNC", "BLNHPC", "BHLNPC",
        "BLHNPC",
    ];

    /// Takes the five axes, outermost first.
    pub(super) fn from_axes(axes: [Axis; 5]) -> Self {
        debug_assert!(Axis::ALL.iter().all(|axis| axes.contains(axis)), "{axes:?} is no permutation");
        Self(axes)
    }

    /// The same order with blocks moved outermost: the order of a window onto this layout.
    #[must_use]
    pub fn block_outermost(self) -> Self {
        let mut axes = self.0;
        axes.sort_by_key(|&axis| axis != Axis::Block);
        Self(axes)
    }

    /// The axes, outermost first.
    #[must_use]
    pub const fn axes(self) -> [Axis; 5] {
        self.0
    }
}

impl FromStr for LayoutOrder {
    type Err = OrderError;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let refuse = |problem: String| OrderError { name: name.chars().take(32).collect(), problem };
        let Some(letters) = name.strip_suffix('C') else {
            return Err(refuse("it does not end in C".into()));
        };
        let mut axes = Vec::with_capacity(5);
        for letter in letters.chars() {
            let Some(axis) = Axis::ALL.into_iter().find(|axis| axis.letter() == letter) else {
                return Err(refuse(format!("{letter:?} is no axis")));
            };
            if axes.contains(&axis) {
                return Err(refuse(format!("{letter} stands twice")));
            }
            axes.push(axis);
        }
        for axis in [Axis::Layer, Axis::Block, Axis::Token] {
            if !axes.contains(&axis) {
                return Err(refuse(format!("{} is missing", axis.letter())));
            }
        }
        // An axis that the name leaves out has size 1, so its place changes no address.
        for axis in [Axis::Head, Axis::Plane] {
            if !axes.contains(&axis) {
                axes.push(axis);
            }
        }
        Ok(Self(axes.try_into().expect("five distinct axes")))
    }
}

impl TryFrom<String> for LayoutOrder {
    type Error = OrderError;

    fn try_from(name: String) -> Result<Self, Self::Error> {
        name.parse()
    }
}

impl From<LayoutOrder> for String {
    fn from(order: LayoutOrder) -> Self {
        order.to_string()
    }
}

impl fmt::Display for LayoutOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for axis in self.0 {
            write!(f, "{}", axis.letter())?;
        }
        f.write_str("C")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_listed_order_is_shown_as_it_is_read() {
        for name in LayoutOrder::LISTED {
            assert_eq!(name.parse::<LayoutOrder>().unwrap().to_string(), name);
        }
        assert_eq!("BLNC".parse::<LayoutOrder>().unwrap().to_string(), "BLNHPC");
    }

    #[test]
    fn a_wrong_name_is_refused_with_the_letter_at_fault() {
        for (name, problem) in [
            ("", "does not end in C"),
            ("BLPNH", "does not end in C"),
            ("BLPNXC", "'X' is no axis"),
            ("BLPNBC", "B stands twice"),
            ("BPNHC", "L is missing"),
        ] {
            let error = name.parse::<LayoutOrder>().unwrap_err().to_string();
            assert!(error.contains(problem), "{error}");
        }
    }
}
