//! One block on its own: its type says what may be done with it.

use std::fmt;

use kvferry_protocol::BlockId;

use super::hash::BlockHash;
use super::table::Held;

/// A block that only its holder can reach, and may write.
///
/// Dropping it, on any thread, frees it at the pool's next call, as one of the first to be reused: nothing of it is kept.
///
/// ```compile_fail,E0382
/// # use kvferry::pool::{BlockHash, BlockPool};
/// let mut pool = BlockPool::new(1)?;
/// let block = pool.mutable()?;
/// let complete = block.complete(BlockHash::new([7; 32]));
/// block.id(); // it is complete, so nobody may write it
/// # Ok::<(), kvferry::pool::PoolError>(())
/// ```
pub struct MutableBlock(pub(super) Held);

/// A block whose tokens are all in place, under the hash that names them; nobody else can reach it yet.
///
/// Dropping it, on any thread, frees it at the pool's next call, as one of the first to be reused: its content is lost.
pub struct CompleteBlock {
    pub(super) held: Held,
    pub(super) hash: BlockHash,
}

/// A block that others can find by its hash, and nobody may write.
///
/// Holds one reference. Dropping it, on any thread, gives that back at the pool's next call; after the last one the block is cached: it
/// can be found until it is reused, as one of the last.
pub struct RegisteredBlock {
    pub(super) held: Held,
    pub(super) hash: BlockHash,
}

impl MutableBlock {
    /// Says which tokens the block holds. The caller vouches that all of them are in place, and that nobody writes it from now on.
    #[must_use]
    pub fn complete(self, hash: BlockHash) -> CompleteBlock {
        CompleteBlock { held: self.0, hash }
    }

    /// The block.
    #[must_use]
    pub fn id(&self) -> BlockId {
        self.0.ids[0]
    }
}

macro_rules! named {
    ($name:ident) => {
        impl $name {
            /// The block.
            #[must_use]
            pub fn id(&self) -> BlockId {
                self.held.ids[0]
            }

            /// What names its tokens.
            #[must_use]
            pub fn hash(&self) -> BlockHash {
                self.hash
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({}, {})"), self.id(), self.hash)
            }
        }
    };
}

named!(CompleteBlock);
named!(RegisteredBlock);

impl fmt::Debug for MutableBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MutableBlock({})", self.id())
    }
}

/// A block on its own, in whatever state; each converts into it.
#[derive(Debug)]
pub enum OneBlock {
    /// Only its holder can reach it, and may write it.
    Mutable(MutableBlock),
    /// Its tokens are in place.
    Complete(CompleteBlock),
    /// Others can find it.
    Registered(RegisteredBlock),
}

impl OneBlock {
    pub(super) fn held(&self) -> &Held {
        match self {
            Self::Mutable(MutableBlock(held))
            | Self::Complete(CompleteBlock { held, .. })
            | Self::Registered(RegisteredBlock { held, .. }) => held,
        }
    }

    pub(super) fn into_held(self) -> Held {
        match self {
            Self::Mutable(MutableBlock(held))
            | Self::Complete(CompleteBlock { held, .. })
            | Self::Registered(RegisteredBlock { held, .. }) => held,
        }
    }
}

impl From<MutableBlock> for OneBlock {
    fn from(block: MutableBlock) -> Self {
        Self::Mutable(block)
    }
}

impl From<CompleteBlock> for OneBlock {
    fn from(block: CompleteBlock) -> Self {
        Self::Complete(block)
    }
}

impl From<RegisteredBlock> for OneBlock {
    fn from(block: RegisteredBlock) -> Self {
        Self::Registered(block)
    }
}
