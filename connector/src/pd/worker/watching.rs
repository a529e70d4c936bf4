//! Digests taken by the threads that carry payload, while the processor's cache holds it.
//!
//! The transport names bytes of a window; here it is known which run each of them is. What these digests cannot tell (bytes that came
//! twice, a device that wrote them) a mover finds out from the pages, as before.

use std::ops::Range;
use std::sync::OnceLock;
use std::time::Instant;

use bytes::Bytes;
use kvferry_kernels::copy::WindowDigests;
use kvferry_protocol::BlockId;
use kvferry_protocol::codec;
use kvferry_protocol::digest::Digest;
use kvferry_protocol::layout::{CacheView, CopyPlan, WindowShape};
use kvferry_protocol::message::Wrote;
use kvferry_protocol::pages::Extent;
use kvferry_transport::{Landing, Leaving};

use crate::pd::caches::Caches;
use crate::trace::{Kind, Span, Tracer};

/// Digests of what lands in a window.
#[derive(Debug)]
pub(super) struct LandingDigests {
    digests: WindowDigests,
    caches: Caches,
}

/// The digest of a write that is sent out of this worker's pages, and what the receiver is told of it.
#[derive(Debug)]
pub(super) struct LeavingDigest {
    digests: WindowDigests,
    caches: Caches,
    extents: Vec<Extent>,
    /// Its digest is filled in at the end.
    wrote: Wrote,
    /// The version of the session.
    version: u16,
    bytes: u64,
    tracer: Tracer,
    began: OnceLock<Instant>,
}

/// The only part of the only write that a [`LeavingDigest`] sees.
const WHOLE: u32 = 0;

impl LandingDigests {
    /// For a window onto blocks whose first token is `first_token`; `None` if its layout is not one that can be followed.
    pub(super) fn new(caches: &Caches, window: &WindowShape, blocks: &[BlockId], first_token: u32) -> Option<Self> {
        let digests = WindowDigests::new(window, &caches.view(blocks, first_token))?;
        Some(Self { digests, caches: caches.clone() })
    }

    /// The digest of a write, if exactly these bytes of the window came with it and with no other. They are sealed: what it was taken
    /// of is what is there.
    pub(super) fn take(&self, sequence: u32, sealed: &[Extent]) -> Option<Digest> {
        self.digests.take(sequence, sealed)
    }
}

impl Landing for LandingDigests {
    fn landed(&self, sequence: u32, stretch: Range<u64>) {
        self.digests.passed(sequence, stretch, || self.caches.table());
    }
}

impl LeavingDigest {
    /// For a write by `plan` out of the request's blocks, of which the first is that of token 0, into a window.
    pub(super) fn new(
        caches: &Caches,
        window: &WindowShape,
        blocks: &[BlockId],
        plan: &CopyPlan,
        (wrote, version): (Wrote, u16),
        tracer: &Tracer,
    ) -> Option<Self> {
        let (tokens, per_block) = (&plan.selection().tokens, caches.tokens_per_block());
        let held = tokens.start / per_block..tokens.end.div_ceil(per_block);
        let blocks = blocks.get(held.start as usize..held.end as usize)?;
        let digests = WindowDigests::new(window, &caches.view(blocks, held.start * per_block))?;
        let (caches, tracer) = (caches.clone(), tracer.clone());
        let (extents, bytes, began) = (plan.window_extents().ok()?, plan.bytes(), OnceLock::new());
        Some(Self { digests, caches, extents, wrote, version, bytes, tracer, began })
    }
}

impl Leaving for LeavingDigest {
    fn leaves(&self, stretch: Range<u64>) {
        if let Some(now) = self.tracer.start() {
            self.began.get_or_init(|| now);
        }
        self.digests.passed(WHOLE, stretch, || self.caches.table());
    }

    fn notification(&self) -> Result<Bytes, String> {
        let digest = self.digests.take(WHOLE, &self.extents).ok_or("what left is not what was planned")?;
        let wrote = Wrote { digest, ..self.wrote };
        if let Some(began) = self.began.get() {
            let Wrote { transfer, generation, sequence, rect, .. } = wrote;
            let span = || Span::since(*began, Kind::Pack).transfer(transfer).chunk(generation, sequence);
            self.tracer.record(|| span().rect(rect).bytes(self.bytes));
        }
        codec::encode_wrote(self.version, &wrote).map(Bytes::from).map_err(|error| error.to_string())
    }
}

impl Caches {
    fn view<'a>(&'a self, blocks: &'a [BlockId], first_token: u32) -> CacheView<'a> {
        CacheView { layout: self.layout(), shard: self.shard(), blocks, first_token }
    }
}
