//! A load that is fed by several transfers: which layers are complete over all of them, and its one end.
//!
//! Each part is a transfer of its own and carries some of the KV heads. The whole is good as far as its worst part is; a part that
//! fails ends its siblings; and the end comes once, when no part touches the pages any more. Sans-io: whoever drives the parts'
//! machines says what happened to each, and does what follows.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::ops::Range;

use super::planted::{Bug, Planted};
use super::rect::Rect;

/// The parts of one load, by their keys; `R` says why a part failed.
#[derive(Debug, Clone)]
pub struct Parts<K, R> {
    tokens: Range<u32>,
    first_layer: u16,
    /// Parts that have not ended, and how many KV heads each carries.
    open: BTreeMap<K, u16>,
    /// For each layer: tokens x heads of all parts that are not verified yet.
    left: Vec<u64>,
    anything_verified: bool,
    /// The end of the tokens that are good in every part that ended.
    good_until: Option<u32>,
    /// The first part that failed, and why.
    failure: Option<(K, R)>,
    bug: Bug,
}

/// What follows from the end of a part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PartsStep<K, R> {
    /// Nothing: the other parts go on.
    Wait,
    /// It was the first that failed: these are to be cancelled. Each of them still ends.
    Cancel(Vec<K>),
    /// It was the last: the load is over, and nothing touches its pages.
    Over(PartsEnd<K, R>),
}

/// How a load ended. Comes exactly once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartsEnd<K, R> {
    /// What was wanted.
    pub tokens: Range<u32>,
    /// Tokens before this one are good in all parts, layers and heads.
    pub good_until: u32,
    /// The first part that failed, and why; `None` if all are done.
    pub failure: Option<(K, R)>,
}

/// What cannot be said of a load.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PartsError {
    /// Nothing feeds the load.
    #[error("a load of tokens {tokens:?} has no part; name at least one transfer that carries heads of it")]
    NoParts {
        /// What is wanted.
        tokens: Range<u32>,
    },
    /// The part is not one of the load's, or ended before.
    #[error("part {part} is none that goes on; each part ends once, and what it does comes before its end")]
    NotOpen {
        /// Which.
        part: String,
    },
    /// The part spoke of cells that nobody wants.
    #[error("part {part} verified {rect}, outside tokens {tokens:?} of layers {layers:?}")]
    Outside {
        /// Which.
        part: String,
        /// Of what.
        rect: Rect,
        /// What is wanted.
        tokens: Range<u32>,
        /// What is wanted.
        layers: Range<u16>,
    },
}

impl<K: Ord + Clone + Display, R> Parts<K, R> {
    /// Begins a load of some tokens (counted from the sequence's start) of some layers; each part with the number of KV heads that it
    /// carries.
    ///
    /// # Errors
    /// [`PartsError::NoParts`].
    pub fn new(wanted: Rect, parts: impl IntoIterator<Item = (K, u16)>) -> Result<Self, PartsError> {
        let (tokens, layers) = (wanted.tokens(), wanted.layers());
        let open: BTreeMap<K, u16> = parts.into_iter().collect();
        if open.is_empty() {
            return Err(PartsError::NoParts { tokens });
        }
        let heads: u64 = open.values().copied().map(u64::from).sum();
        Ok(Self {
            left: vec![tokens.len() as u64 * heads; layers.len()],
            first_layer: layers.start,
            tokens,
            open,
            anything_verified: false,
            good_until: None,
            failure: None,
            bug: Bug::default(),
        })
    }

    /// A rectangle of one part is verified, for the first time; returns the layers that are now complete over all parts.
    ///
    /// # Errors
    /// [`PartsError::NotOpen`], [`PartsError::Outside`]; nothing is counted then.
    pub fn verified(&mut self, part: &K, rect: Rect) -> Result<Vec<u16>, PartsError> {
        let Some(&heads) = self.open.get(part) else { return Err(Self::not_open(part)) };
        let (tokens, layers) = (&self.tokens, self.layers());
        let inside = tokens.start <= rect.tokens().start
            && rect.tokens().end <= tokens.end
            && layers.start <= rect.layers().start
            && rect.layers().end <= layers.end;
        if !inside {
            return Err(PartsError::Outside { part: part.to_string(), rect, tokens: tokens.clone(), layers });
        }
        self.anything_verified = true;
        let cells = rect.tokens().len() as u64 * u64::from(heads);
        let enough = if self.bug.is(Planted::LayerOfOnePart) { self.left_of_others(heads) } else { 0 };
        let mut complete = Vec::new();
        for layer in rect.layers() {
            let left = &mut self.left[usize::from(layer - self.first_layer)];
            let before = *left;
            *left = before.saturating_sub(cells);
            if before > enough && *left <= enough {
                complete.push(layer);
            }
        }
        Ok(complete)
    }

    /// A part ended, and nothing of it touches the pages any more: its tokens before `good_until` are good, and if it failed,
    /// `failure` says why.
    ///
    /// # Errors
    /// [`PartsError::NotOpen`].
    pub fn ended(&mut self, part: &K, good_until: u32, failure: Option<R>) -> Result<PartsStep<K, R>, PartsError> {
        let Some((part, _)) = self.open.remove_entry(part) else { return Err(Self::not_open(part)) };
        let good = match self.good_until {
            Some(before) if self.bug.is(Planted::BestPartCounts) => before.max(good_until),
            Some(before) => before.min(good_until),
            None => good_until,
        };
        self.good_until = Some(good.clamp(self.tokens.start, self.tokens.end));
        let first_failure = failure.is_some() && self.failure.is_none();
        if let Some(why) = failure
            && first_failure
        {
            self.failure = Some((part, why));
        }
        let forgets = first_failure && self.bug.is(Planted::SiblingsForgotten);
        if self.open.is_empty() || forgets {
            self.open.clear();
            let (tokens, good_until) = (self.tokens.clone(), self.good_until.unwrap_or(self.tokens.start));
            return Ok(PartsStep::Over(PartsEnd { tokens, good_until, failure: self.failure.take() }));
        }
        Ok(if first_failure { PartsStep::Cancel(self.open.keys().cloned().collect()) } else { PartsStep::Wait })
    }

    /// The parts that have not ended.
    pub fn open(&self) -> impl Iterator<Item = &K> {
        self.open.keys()
    }

    /// Whether any part verified anything.
    #[must_use]
    pub const fn has_begun(&self) -> bool {
        self.anything_verified
    }

    /// Plants a bug, so that a test can prove that it is seen.
    #[cfg(feature = "sim")]
    pub const fn plant(&mut self, bug: Option<Planted>) {
        self.bug = Bug::plant(bug);
    }

    fn layers(&self) -> Range<u16> {
        // As many as were given, so the end is one of them.
        self.first_layer..self.first_layer.saturating_add(self.left.len() as u16)
    }

    /// What is left of a layer when only a part with so many heads is complete.
    fn left_of_others(&self, heads: u16) -> u64 {
        let all: u64 = self.open.values().copied().map(u64::from).sum();
        self.tokens.len() as u64 * all.saturating_sub(heads.into())
    }

    fn not_open(part: &K) -> PartsError {
        PartsError::NotOpen { part: part.to_string() }
    }
}

impl<K, R> PartsEnd<K, R> {
    /// The first token that is missing, if any is. A deadline may come between the last byte and its digest: the end is a failure
    /// then, but everything that was wanted is there.
    #[must_use]
    pub fn first_missing(&self) -> Option<u32> {
        (self.failure.is_some() && self.good_until < self.tokens.end).then_some(self.good_until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(parts: &[(u32, u16)]) -> Parts<u32, &'static str> {
        Parts::new(Rect::new(8..40, 2..4).unwrap(), parts.iter().copied()).unwrap()
    }

    fn rect(tokens: Range<u32>, layers: Range<u16>) -> Rect {
        Rect::new(tokens, layers).unwrap()
    }

    #[test]
    fn a_layer_is_complete_when_all_heads_of_all_tokens_are() {
        let mut parts = load(&[(0, 1), (1, 3)]);
        assert!(!parts.has_begun());
        for (part, rect, want) in [
            (0, rect(8..40, 2..4), vec![]),
            (1, rect(8..16, 2..4), vec![]),
            (1, rect(16..40, 3..4), vec![3]),
            (1, rect(16..40, 2..3), vec![2]),
        ] {
            assert_eq!(parts.verified(&part, rect), Ok(want), "{rect} of part {part}");
        }
        assert!(parts.has_begun());
    }

    #[test]
    fn the_first_failure_ends_the_siblings_and_the_shortest_prefix_counts() {
        let mut parts = load(&[(0, 1), (1, 1), (2, 1), (3, 1)]);
        assert_eq!(parts.ended(&2, 40, None), Ok(PartsStep::Wait));
        assert_eq!(parts.ended(&1, 20, Some("a digest")), Ok(PartsStep::Cancel(vec![0, 3])));
        assert_eq!(parts.ended(&3, 12, Some("cancelled")), Ok(PartsStep::Wait));
        let end = PartsEnd { tokens: 8..40, good_until: 12, failure: Some((1, "a digest")) };
        assert_eq!(end.first_missing(), Some(12));
        assert_eq!(parts.ended(&0, 40, None), Ok(PartsStep::Over(end)));
        assert_eq!(parts.ended(&0, 40, None), Err(PartsError::NotOpen { part: "0".into() }));
    }

    #[test]
    fn a_load_that_misses_nothing_misses_nothing_whatever_its_verdict() {
        for (name, good_until, failure, want) in [
            ("done", 40, None, None),
            ("failed between the last byte and its digest", 40, Some("deadline"), None),
            ("failed in a block", 39, Some("deadline"), Some(39)),
            ("failed at once, behind a local prefix", 8, Some("deadline"), Some(8)),
            ("good before its begin", 0, Some("deadline"), Some(8)),
        ] {
            let Ok(PartsStep::Over(end)) = load(&[(0, 1)]).ended(&0, good_until, failure) else { panic!("{name}") };
            assert_eq!(end.first_missing(), want, "{name}");
        }
    }

    #[test]
    fn what_does_not_fit_is_named_and_counts_nothing() {
        let none = Parts::<u32, ()>::new(rect(8..40, 2..4), []).unwrap_err();
        assert!(none.to_string().contains("8..40"), "{none}");
        let mut parts = load(&[(7, 1)]);
        for outside in [rect(7..9, 2..3), rect(39..41, 2..3), rect(8..9, 1..3), rect(8..9, 3..5)] {
            let error = parts.verified(&7, outside).unwrap_err();
            assert!(matches!(error, PartsError::Outside { .. }), "{error}");
        }
        assert!(!parts.has_begun());
        assert_eq!(parts.verified(&6, rect(8..9, 2..3)), Err(PartsError::NotOpen { part: "6".into() }));
        assert_eq!(parts.open().copied().collect::<Vec<_>>(), [7]);
    }
}
