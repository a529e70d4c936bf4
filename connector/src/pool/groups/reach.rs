//! Which blocks are worth keeping: those at which some later request can end its hit.
//!
//! Where groups' blocks differ in length, hits end at multiples of all of them, and of a window's blocks only those before such an end are
//! ever asked for; a state's block is worth as much as a whole prefix, and takes as much as many tokens. What is not reachable is not
//! registered, so it is reused first.
//!
//! Source: `reachable_block_mask` and `replay_boundaries` in vLLM's `v1/core`, 0.32.0.

use std::ops::Range;

use super::hits::needed_blocks;
use super::{LayerKind, LayerSpec};

/// At which ends of prefixes windows and states are kept. Full attention always keeps all.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Retention {
    /// Where the prompt can be asked for again, and where requests were seen to part (vLLM's default, 0).
    #[default]
    Replay,
    /// There, and every so many tokens.
    Every {
        /// A multiple of what hits are multiples of.
        tokens: usize,
    },
    /// Wherever a hit can end.
    Dense,
}

/// Ends of prefixes at which a later request with this prompt can go on: one token is always computed again. With a drafter that computes
/// the last block again there are two: the same prompt, and a longer one.
pub(super) fn replay_ends(prompt_tokens: usize, hit_tokens: usize, draft: bool) -> Vec<usize> {
    if !draft {
        return vec![prompt_tokens.saturating_sub(1)];
    }
    let whole = |tokens: usize| (tokens / hit_tokens * hit_tokens).saturating_sub(hit_tokens);
    vec![whole(prompt_tokens.saturating_sub(1)), whole(prompt_tokens)]
}

/// Whether each block of `range` is reachable.
pub(super) struct Reach<'a> {
    pub(super) spec: &'a LayerSpec,
    pub(super) hit_tokens: usize,
    pub(super) draft: bool,
    pub(super) retention: Retention,
    /// Ends that are kept in any case.
    pub(super) ends: &'a [usize],
}

impl Reach<'_> {
    pub(super) fn mask(&self, range: Range<usize>) -> Vec<bool> {
        let size = self.spec.tokens_per_block as usize;
        match self.spec.kind {
            LayerKind::Window { window_tokens, .. } => self.window(range, size, window_tokens as usize),
            LayerKind::State { .. } => self.state(range, size),
            _ => vec![true; range.len()],
        }
    }

    fn window(&self, range: Range<usize>, size: usize, window: usize) -> Vec<bool> {
        let needed = needed_blocks(window, size, self.draft);
        // With a drafter the run ends one block behind the end of the hit.
        let shift = usize::from(self.draft);
        let mut mask = vec![false; range.len()];
        let every = match self.retention {
            Retention::Dense => Some(self.hit_tokens),
            Retention::Every { tokens } => Some(tokens),
            Retention::Replay => None,
        };
        if let Some(every) = every {
            let per_end = every / size;
            if needed >= per_end {
                return vec![true; range.len()];
            }
            for (kept, at) in mask.iter_mut().zip(range.clone()) {
                *kept = at >= shift && (at - shift) % per_end >= per_end - needed;
            }
        }
        if self.retention != Retention::Dense {
            for end in self.ends {
                let end = end / self.hit_tokens * self.hit_tokens / size + shift;
                let run = end.saturating_sub(needed).max(range.start)..end.min(range.end);
                run.for_each(|at| mask[at - range.start] = true);
            }
        }
        mask
    }

    fn state(&self, range: Range<usize>, size: usize) -> Vec<bool> {
        let mut mask = vec![false; range.len()];
        match self.retention {
            Retention::Dense => return vec![true; range.len()],
            Retention::Every { tokens } if tokens / size <= 1 => return vec![true; range.len()],
            Retention::Every { tokens } => {
                let per_end = tokens / size;
                mask.iter_mut().zip(range.clone()).for_each(|(kept, at)| *kept = (at + 1).is_multiple_of(per_end));
            }
            Retention::Replay => {}
        }
        for end in self.ends {
            let blocks = end / self.hit_tokens * self.hit_tokens / size;
            if let Some(at) = blocks.checked_sub(1).filter(|at| range.contains(at)) {
                mask[at - range.start] = true;
            }
        }
        mask
    }
}
