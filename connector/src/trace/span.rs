//! What is recorded.

use std::time::Instant;

use kvferry_protocol::transfer::Rect;
use kvferry_protocol::{Generation, TransferId};

use crate::contract::RequestId;

/// What happened in a span of time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[non_exhaustive]
pub enum Kind {
    /// The model thread computed a step, from `begin_step` to `wait_saved`.
    Step,
    /// The model thread computed layers that were then handed over.
    Compute,
    /// The model thread waited for a layer to land.
    Wait,
    /// A hand-over on its sending side, from the request's first step to the verdict.
    Send,
    /// Bytes were digested, and packed where their runs are short.
    Pack,
    /// A write was under way: from its post to the receiver's word that it landed.
    Ship,
    /// A hand-over on its receiving side, from the load to the verdict.
    Load,
    /// A write's last byte was found in place; its bytes arrived since the write was shipped.
    Land,
    /// The digest of what landed was computed.
    Verify,
    /// What landed was copied on to a device's pages, until it was there.
    Upload,
    /// A block was copied to the tier.
    WriteBack,
    /// A block was brought from the tier, or found to be there.
    Bring,
}

impl Kind {
    /// All, in the order of their tracks.
    pub const ALL: [Self; 12] = [
        Self::Step,
        Self::Compute,
        Self::Wait,
        Self::Send,
        Self::Pack,
        Self::Ship,
        Self::Load,
        Self::Land,
        Self::Verify,
        Self::Upload,
        Self::WriteBack,
        Self::Bring,
    ];

    /// Its name in the file.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Step => "step",
            Self::Compute => "compute",
            Self::Wait => "wait",
            Self::Send => "send",
            Self::Pack => "pack",
            Self::Ship => "ship",
            Self::Load => "load",
            Self::Land => "land",
            Self::Verify => "verify",
            Self::Upload => "upload",
            Self::WriteBack => "write-back",
            Self::Bring => "bring",
        }
    }
}

/// A span of time, and whose it was. Fields that do not apply stay empty.
#[derive(Clone, Debug)]
pub struct Span {
    /// What happened.
    pub kind: Kind,
    /// From.
    pub start: Instant,
    /// Until; not before `start`.
    pub end: Instant,
    /// For which request. Where only the transfer is known, the file names the request that another span of it names.
    pub request: Option<RequestId>,
    /// For which hand-over.
    pub transfer: Option<TransferId>,
    /// Which write of it: the grant's generation, and the write's number under it. Equal on both sides.
    pub chunk: Option<(Generation, u32)>,
    /// Which tokens and layers.
    pub rect: Option<Rect>,
    /// How many bytes of K/V.
    pub bytes: u64,
}

impl Span {
    /// What happened from `start` until now.
    #[must_use]
    pub fn since(start: Instant, kind: Kind) -> Self {
        let (request, transfer, chunk, rect) = (None, None, None, None);
        Self { kind, start, end: Instant::now(), request, transfer, chunk, rect, bytes: 0 }
    }

    /// Names the request.
    #[must_use]
    pub fn request(self, request: &RequestId) -> Self {
        Self { request: Some(request.clone()), ..self }
    }

    /// Names the hand-over.
    #[must_use]
    pub fn transfer(self, transfer: TransferId) -> Self {
        Self { transfer: Some(transfer), ..self }
    }

    /// Names the write of the hand-over.
    #[must_use]
    pub fn chunk(self, generation: Generation, sequence: u32) -> Self {
        Self { chunk: Some((generation, sequence)), ..self }
    }

    /// Names the tokens and layers.
    #[must_use]
    pub fn rect(self, rect: Rect) -> Self {
        Self { rect: Some(rect), ..self }
    }

    /// Counts the bytes.
    #[must_use]
    pub fn bytes(self, bytes: u64) -> Self {
        Self { bytes, ..self }
    }
}
