//! What a sender is told at the start.

use std::num::{NonZeroU32, NonZeroU64};
use std::time::Duration;

use super::super::output::Order;
use super::super::rect::Rect;
use crate::ids::TransferId;

/// What is leased, for how long, and how it is cut into posts.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SenderConfig {
    /// Which transfer.
    pub transfer: TransferId,
    /// All cells that this side has or will compute.
    pub held: Rect,
    /// Who speaks first.
    pub order: Order,
    /// The first lease; the receiver's grants and renewals extend it.
    pub lease_ttl: Duration,
    /// The lease ends by then, however often it is renewed.
    pub lease_max: Duration,
    /// How long the peer may be without a session once it had one.
    pub absent: Duration,
    /// How long to wait for the receiver's word when this side can do no more.
    pub word: Duration,
    /// The most posts in flight.
    pub max_posts_in_flight: NonZeroU32,
    /// Cells (tokens x layers) of one post; at least one aligned run of tokens is posted at a time.
    pub max_cells_per_post: NonZeroU64,
    /// Posts are cut at multiples of this many tokens, counted from the sequence's start: this side's tokens per block.
    pub align_tokens: NonZeroU32,
}

impl SenderConfig {
    /// The first part of a rectangle that makes one post.
    pub(super) fn first_post(&self, rect: Rect) -> Rect {
        let (tokens, layers, align) = (rect.tokens(), rect.layers(), self.align_tokens.get());
        let per_layer = self.max_cells_per_post.get() / u64::from(layers.end - layers.start);
        let budget = u32::try_from(per_layer).unwrap_or(u32::MAX).max(align);
        let end = match tokens.start.checked_add(budget) {
            Some(end) if end < tokens.end => {
                let aligned = end - end % align;
                if aligned > tokens.start { aligned } else { end }
            }
            Some(_) | None => tokens.end,
        };
        // `end` is above the start and at most the rectangle's end, so the part is never empty.
        Rect::new(tokens.start..end, layers).unwrap_or(rect)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_post_ends_at_a_block_and_within_its_budget() {
        for (name, tokens, layers, max_cells, want_end) in [
            ("all fits", 0..40, 0..2, 1000, 40),
            ("whole blocks within the budget", 0..100, 0..2, 100, 48),
            ("never less than a block", 0..100, 0..30, 30, 16),
            ("from inside a block to its end", 5..100, 0..2, 32, 16),
            ("from inside a block, as far as the budget goes", 5..100, 0..1, 32, 32),
            ("the last part is short", 96..100, 0..2, 32, 100),
            ("at the end of the token space", u32::MAX - 4..u32::MAX, 0..1, 1, u32::MAX),
        ] {
            let config = SenderConfig {
                transfer: TransferId::new(1),
                held: Rect::new(0..1, 0..1).unwrap(),
                order: Order::DecodeFirst,
                lease_ttl: Duration::ZERO,
                lease_max: Duration::ZERO,
                absent: Duration::ZERO,
                word: Duration::ZERO,
                max_posts_in_flight: NonZeroU32::MIN,
                max_cells_per_post: NonZeroU64::new(max_cells).unwrap(),
                align_tokens: NonZeroU32::new(16).unwrap(),
            };
            let post = config.first_post(Rect::new(tokens.clone(), layers.clone()).unwrap());
            assert_eq!((post.tokens(), post.layers()), (tokens.start..want_end, layers), "{name}");
        }
    }
}
