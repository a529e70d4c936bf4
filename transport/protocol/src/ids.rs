//! Ids are types: no bare integer names a block, layer, region or engine.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

macro_rules! id {
    ($($(#[$doc:meta])* $name:ident($int:ty);)+) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name($int);

        impl $name {
            /// Wraps the number.
            #[must_use]
            pub const fn new(raw: $int) -> Self {
                Self(raw)
            }

            /// The number itself, for wire formats and indexing.
            #[must_use]
            pub const fn get(self) -> $int {
                self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }
    )+};
}

id! {
    /// A block's index in one pool of one engine; means nothing in another pool.
    BlockId(u32);
    /// A model layer, numbered from 0 across all pipeline stages.
    LayerId(u16);
    /// A registered memory region of one endpoint, numbered from 0 in the order of registration.
    RegionId(u32);
    /// One start of an engine: a restarted engine is a new peer with a new incarnation.
    Incarnation(u64);
    /// How many times a transfer's grant was made anew; nothing is re-sent under an older one.
    Generation(u32);
    /// A place in a tensor-parallel group.
    TpRank(u16);
    /// A place in a pipeline-parallel group.
    PpRank(u16);
}

/// One hand-over of one request's blocks: 128 random bits, made by the router or the decode side.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TransferId(u128);

impl TransferId {
    /// Wraps 128 bits that the caller drew at random.
    #[must_use]
    pub const fn new(random: u128) -> Self {
        Self(random)
    }

    /// The bits.
    #[must_use]
    pub const fn get(self) -> u128 {
        self.0
    }

    /// The id on the wire of what one rank of the sender hands to one rank of the receiver: its *part* of the hand-over, which is
    /// a transfer of its own between those two. Rank 0 to rank 0 keeps the id.
    #[must_use]
    pub const fn part(self, receiver: TpRank, sender: TpRank) -> Self {
        let receiver = (receiver.0 as u128).wrapping_mul(RECEIVER_STEP);
        let sender = (sender.0 as u128).wrapping_mul(SENDER_STEP);
        Self(self.0.wrapping_add(receiver).wrapping_add(sender))
    }

    /// The hand-over of which this is the part between two ranks: what [`part`](Self::part) made it of.
    #[must_use]
    pub const fn whole(self, receiver: TpRank, sender: TpRank) -> Self {
        let receiver = (receiver.0 as u128).wrapping_mul(RECEIVER_STEP);
        let sender = (sender.0 as u128).wrapping_mul(SENDER_STEP);
        Self(self.0.wrapping_sub(receiver).wrapping_sub(sender))
    }
}

/// What a rank of each side adds to an id: odd, large and unrelated (the fractions of the golden ratio and of the square root of 2),
/// so that the parts of ids that follow one another, as tests and careless routers draw them, never meet.
const RECEIVER_STEP: u128 = 0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835;
const SENDER_STEP: u128 = 0x6a09_e667_f3bc_c908_b2fb_1366_ea95_7d3f;

impl fmt::Display for TransferId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for TransferId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TransferId({self})")
    }
}

/// The name of one serving instance: 1 to 64 characters out of `A-Z a-z 0-9 . _ -`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct EngineId(Arc<str>);

/// Why a string cannot name an engine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name:?} cannot name an engine: use 1 to {max} characters out of A-Z a-z 0-9 . _ -", max = EngineId::MAX_LEN)]
pub struct EngineIdError {
    /// The refused name, cut to the allowed length.
    pub name: String,
}

impl EngineId {
    /// The longest name, in bytes.
    pub const MAX_LEN: usize = 64;

    /// Checks and wraps a name.
    ///
    /// # Errors
    /// [`EngineIdError`] if the name is empty, too long, or has another character.
    pub fn new(name: &str) -> Result<Self, EngineIdError> {
        let legal = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
        if name.is_empty() || name.len() > Self::MAX_LEN || !name.bytes().all(legal) {
            return Err(EngineIdError { name: name.chars().take(Self::MAX_LEN).collect() });
        }
        Ok(Self(name.into()))
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for EngineId {
    type Error = EngineIdError;

    fn try_from(name: String) -> Result<Self, Self::Error> {
        Self::new(&name)
    }
}

impl From<EngineId> for String {
    fn from(id: EngineId) -> Self {
        id.0.as_ref().to_owned()
    }
}

impl fmt::Display for EngineId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// One worker's endpoint: an engine, which start of it, and which rank.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct PeerId {
    /// The serving instance.
    pub engine: EngineId,
    /// Which start of it.
    pub incarnation: Incarnation,
    /// The worker's place in the pipeline-parallel group.
    pub pp_rank: PpRank,
    /// The worker's place in the tensor-parallel group.
    pub tp_rank: TpRank,
}

impl fmt::Display for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{:x}/pp{}tp{}", self.engine, self.incarnation.get(), self.pp_rank, self.tp_rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_name_is_checked_where_it_enters() {
        for bad in ["", "a b", "ä", &"x".repeat(65)] {
            assert!(EngineId::new(bad).is_err(), "{bad:?}");
        }
        assert_eq!(EngineId::new("prefill-0.rack_1").unwrap().as_str(), "prefill-0.rack_1");
    }

    #[test]
    fn parts_of_neighbouring_transfers_never_meet() {
        let mut seen = std::collections::BTreeSet::new();
        for id in 0..64 {
            assert_eq!(TransferId::new(id).part(TpRank::new(0), TpRank::new(0)), TransferId::new(id));
            for (receiver, sender) in (0..16).flat_map(|receiver| (0..16).map(move |sender| (receiver, sender))) {
                let part = TransferId::new(id).part(TpRank::new(receiver), TpRank::new(sender));
                assert!(seen.insert(part), "{id}, {receiver} from {sender}");
                assert_eq!(part.whole(TpRank::new(receiver), TpRank::new(sender)), TransferId::new(id));
            }
        }
    }

    #[test]
    fn a_transfer_is_shown_with_all_its_bits() {
        assert_eq!(TransferId::new(0xab).to_string(), "000000000000000000000000000000ab");
    }
}
