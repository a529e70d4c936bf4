//! What is measured for one block size: agreed by both sides before the first byte moves.

use kvferry_protocol::RegionId;
use kvferry_protocol::layout::{KvLayout, KvShape};
use kvferry_protocol::pages::{Extent, Pages, Piece};
use serde::{Deserialize, Serialize};

use crate::args::{Direction, Spoil};
use crate::error::CliError;

/// One token of one head: 128 bf16, as most models have it.
const RUN_BYTES: u64 = 256;
/// K and V of one run.
const ROW_BYTES: u64 = 2 * RUN_BYTES;
/// Blocks of a request.
const REQUEST_BLOCKS: u32 = 64;
/// Bytes of a write, if nothing else is said: what the connector lets one completion cover (`chunk_bytes`).
const WRITE_BYTES: u64 = 4 << 20;
/// The largest block.
const MAX_BLOCK_BYTES: u64 = 1 << 30;
/// The most blocks of a pass: what one write may name.
const MAX_BLOCKS: u32 = 1 << 20;

/// One block size and all that is done with it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Case {
    /// Bytes of a block.
    pub(crate) block_bytes: u64,
    /// Blocks of a pass: each side has so many.
    pub(crate) blocks: u32,
    /// Blocks of a write.
    pub(crate) batch: u32,
    /// Writes under way at once.
    pub(crate) posts: u32,
    /// Who sends, as the measuring side sees it.
    pub(crate) direction: Direction,
    /// Whether bytes are digested on both sides.
    pub(crate) digest: bool,
    /// Whether nothing is copied: the receiver reads blocks where they lie.
    pub(crate) in_place: bool,
    /// Whether threads of their own digest, and not those that carry the bytes.
    pub(crate) movers: bool,
    /// Whether bytes are compared with what was sent.
    pub(crate) verify: bool,
    /// A byte to spoil.
    pub(crate) spoil: Option<Spoil>,
}

/// Blocks `first..first + count` of a case's order: what one request or pass moves.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Span {
    pub(crate) first: u32,
    pub(crate) count: u32,
}

impl Case {
    /// Checks sizes against each other, and fills in what was not said.
    pub(crate) fn new(
        block_bytes: u64,
        blocks: Option<u32>,
        batch: Option<u32>,
        posts: u32,
        memory: u64,
    ) -> Result<Self, CliError> {
        if !block_bytes.is_multiple_of(ROW_BYTES) || !(ROW_BYTES..=MAX_BLOCK_BYTES).contains(&block_bytes) {
            let fix = format!("write a multiple of {ROW_BYTES} B (K and V of a token's head), at most 1GiB");
            return Err(CliError::argument("--block", format!("{block_bytes} B"), fix));
        }
        let held = u32::try_from(memory / block_bytes).unwrap_or(MAX_BLOCKS).min(MAX_BLOCKS);
        let blocks = blocks.unwrap_or(held);
        if blocks == 0 || blocks > held {
            let fix = match held {
                0 => format!("--memory {memory} B holds no block of {block_bytes} B: give more memory"),
                _ => format!("write 1 to {held}, which is what --memory holds of {block_bytes} B, or give more memory"),
            };
            return Err(CliError::argument("--blocks", blocks, fix));
        }
        let batch = batch.unwrap_or_else(|| u32::try_from(WRITE_BYTES / block_bytes).unwrap_or(1).clamp(1, blocks));
        if batch == 0 {
            return Err(CliError::argument("--batch", batch, "write 1 or more blocks"));
        }
        if !(1..=1024).contains(&posts) {
            return Err(CliError::argument("--posts", posts, "write 1 to 1024"));
        }
        let batch = batch.min(blocks);
        let direction = Direction::Push;
        Ok(Self {
            block_bytes,
            blocks,
            batch,
            posts,
            direction,
            digest: true,
            in_place: false,
            movers: false,
            verify: false,
            spoil: None,
        })
    }

    /// Whether a case that came from the other side is one that [`Case::new`] makes.
    pub(crate) fn check(&self, memory: u64) -> Result<(), CliError> {
        Self::new(self.block_bytes, Some(self.blocks), Some(self.batch), self.posts, memory).map(drop)
    }

    /// Bytes of a pass.
    pub(crate) fn bytes(&self) -> u64 {
        self.block_bytes * u64::from(self.blocks)
    }

    /// All blocks.
    pub(crate) fn pass(&self) -> Span {
        Span { first: 0, count: self.blocks }
    }

    /// The `index`-th request of `count` blocks: another place each time, as long as there are others.
    pub(crate) fn request(&self, count: u32, index: u32) -> Span {
        let count = count.min(self.blocks);
        let places = (self.blocks / count).max(1);
        Span { first: index % places * count, count }
    }

    /// Blocks of a request: 64, or all if there are fewer.
    pub(crate) fn request_blocks(&self) -> u32 {
        REQUEST_BLOCKS.min(self.blocks)
    }

    /// Which blocks the sender reads, in the order in which they are sent.
    pub(crate) fn source_order(&self) -> Vec<u32> {
        shuffled(self.blocks, 0x5eed_0001)
    }

    /// Which blocks the receiver fills, in the same order.
    pub(crate) fn target_order(&self) -> Vec<u32> {
        shuffled(self.blocks, 0x5eed_0002)
    }

    /// How the bytes of a block are taken for a KV cache's, so that the digest has runs: blocks outermost, 128 bf16 a run, up to 16
    /// tokens and 8 heads.
    pub(crate) fn layout(&self) -> KvLayout {
        let rows = self.block_bytes / ROW_BYTES;
        let tokens_per_block = largest_factor(rows, 16);
        let heads = largest_factor(rows / tokens_per_block, 8);
        let shape = KvShape {
            layers: (rows / tokens_per_block / heads) as u16,
            blocks: self.blocks,
            heads: heads as u16,
            tokens_per_block: tokens_per_block as u32,
            run_bytes: vec![RUN_BYTES as u32; 2],
        };
        KvLayout::packed(shape, "BLPNHC".parse().expect("an order of ARCHITECTURE.md")).expect("a checked size")
    }

    /// Where the blocks of an order lie in the region that holds them all.
    pub(crate) fn pages(&self, region: RegionId, blocks: &[u32]) -> Pages {
        let piece = Piece { region, offset: 0, loops: Vec::new(), run_bytes: self.block_bytes };
        Pages { bases: blocks.iter().map(|block| u64::from(*block) * self.block_bytes).collect(), pieces: vec![piece] }
    }
}

impl Span {
    /// The span's part of an order.
    pub(crate) fn of(self, order: &[u32]) -> &[u32] {
        &order[self.first as usize..][..self.count as usize]
    }

    /// Whether it is a part of a case.
    pub(crate) fn is_in(self, case: &Case) -> bool {
        self.count > 0 && self.first.checked_add(self.count).is_some_and(|end| end <= case.blocks)
    }

    /// How many writes of `batch` blocks it takes.
    pub(crate) fn writes(self, batch: u32) -> u32 {
        self.count.div_ceil(batch)
    }

    /// Which of its blocks the `write`-th write carries, counted from the span's first.
    pub(crate) fn write(self, write: u32, batch: u32) -> Span {
        let first = write * batch;
        Span { first, count: batch.min(self.count - first) }
    }

    /// Where these blocks lie in a window that holds them one after the other.
    pub(crate) fn extent(self, block_bytes: u64) -> Extent {
        Extent::contiguous(u64::from(self.first) * block_bytes, u64::from(self.count) * block_bytes)
    }
}

/// The largest power of two up to `most` that divides `number`.
fn largest_factor(number: u64, most: u64) -> u64 {
    (1_u64 << number.trailing_zeros().min(63)).min(most)
}

/// All numbers below `count` in an order that looks random and is the same on both sides.
fn shuffled(count: u32, seed: u64) -> Vec<u32> {
    let mut order: Vec<u32> = (0..count).collect();
    let mut state = seed;
    for at in (1..order.len()).rev() {
        // xorshift64
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        order.swap(at, ((state >> 11) % (at as u64 + 1)) as usize);
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_that_cannot_be_says_what_to_write() {
        for (block, blocks, batch, posts, memory, argument) in [
            (1000, None, None, 8, 1 << 20, "--block"),
            (0, None, None, 8, 1 << 20, "--block"),
            (2 << 20, None, None, 8, 1 << 20, "--blocks"),
            (4 << 10, Some(257), None, 8, 1 << 20, "--blocks"),
            (4 << 10, Some(0), None, 8, 1 << 20, "--blocks"),
            (4 << 10, None, Some(0), 8, 1 << 20, "--batch"),
            (4 << 10, None, None, 0, 1 << 20, "--posts"),
        ] {
            let error = Case::new(block, blocks, batch, posts, memory).unwrap_err().to_string();
            assert!(error.starts_with(argument) && error.contains(": "), "{error}");
        }
    }

    #[test]
    fn any_block_size_is_a_whole_number_of_runs() {
        for block_bytes in [512, 1536, 4 << 10, 16 << 10, 100 << 10, 2 << 20, 512 * 997] {
            let case = Case::new(block_bytes, Some(2), None, 8, 8 << 20).unwrap();
            assert_eq!(case.layout().shape().block_bytes(), block_bytes);
        }
    }

    #[test]
    fn orders_hold_each_block_once_and_differ() {
        let case = Case::new(512, Some(1000), None, 8, 1 << 20).unwrap();
        let (source, target) = (case.source_order(), case.target_order());
        assert_ne!(source, target);
        for mut order in [source, target] {
            order.sort_unstable();
            assert!(order.iter().copied().eq(0..1000));
        }
    }

    #[test]
    fn writes_cover_a_span_once() {
        let span = Span { first: 3, count: 10 };
        let parts: Vec<Span> = (0..span.writes(4)).map(|write| span.write(write, 4)).collect();
        assert_eq!(parts, [(0, 4), (4, 4), (8, 2)].map(|(first, count)| Span { first, count }));
    }
}
