//! What holds blocks: a request's table, and a transfer's lease.

use std::fmt;
use std::sync::Arc;

use kvferry_protocol::BlockId;

use super::returns::Returns;

/// References that a holder let go.
pub(super) type ReturnedBlocks = Returns<(HeldBy, Vec<BlockId>)>;

/// Who holds a reference.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum HeldBy {
    Request,
    Transfer,
    Pin,
}

/// References to blocks, one per entry; dropping gives them back.
pub(super) struct Held {
    pub(super) ids: Vec<BlockId>,
    pub(super) returns: Arc<ReturnedBlocks>,
    pub(super) by: HeldBy,
}

impl Held {
    pub(super) fn new(by: HeldBy, ids: Vec<BlockId>, returns: &Arc<ReturnedBlocks>) -> Self {
        Self { ids, returns: Arc::clone(returns), by }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if !self.ids.is_empty() {
            self.returns.push((self.by, std::mem::take(&mut self.ids)));
        }
    }
}

/// The blocks of one request, in the order of its tokens.
///
/// Holds one reference to each; where it has the null block ([`BlockPool::with_null`](super::BlockPool::with_null)) it holds nothing. Dropping it, on any thread, frees the blocks in reverse order at the pool's next call;
/// [`BlockPool::release`](super::BlockPool::release) does the same at once.
pub struct BlockTable(pub(super) Held);

/// Blocks that a transfer still reads or writes, whatever becomes of the request.
///
/// Holds one reference to each. Dropping it, on any thread, gives them back at the pool's next call. A lease has no clock: who
/// holds it drops it on completion, or at its deadline once the last write has drained.
pub struct Lease(pub(super) Held);

/// Registered blocks that are kept, whoever needs room: the prompts of a service that must always be quick.
///
/// Holds one reference to each. Dropping it, on any thread, gives them back at the pool's next call; they are cached then like others.
pub struct Pin(pub(super) Held);

macro_rules! holder {
    ($name:ident) => {
        impl $name {
            /// The blocks, in the order of the request's tokens.
            #[must_use]
            pub fn ids(&self) -> &[BlockId] {
                &self.0.ids
            }

            /// How many blocks are held.
            #[must_use]
            pub fn len(&self) -> usize {
                self.0.ids.len()
            }

            /// Whether no block is held.
            #[must_use]
            pub fn is_empty(&self) -> bool {
                self.0.ids.is_empty()
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_tuple(stringify!($name)).field(&self.0.ids).finish()
            }
        }
    };
}

holder!(BlockTable);
holder!(Lease);
holder!(Pin);
