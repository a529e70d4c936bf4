//! Bugs that the simulator plants to prove that its checks see them; without the feature `sim` there are none.

/// A bug to plant in a machine.
#[cfg_attr(not(feature = "sim"), expect(unreachable_pub, reason = "exported with the feature `sim` only"))]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Planted {
    /// The receiver frees its blocks without waiting for the fence.
    FinishBeforeFence,
    /// The receiver makes bytes visible when they land, not when their digest matched.
    VisibleBeforeDigest,
    /// The receiver takes a wrong digest for a right one.
    DigestIgnored,
    /// The receiver grants anew under the old generation.
    GenerationReused,
    /// The receiver asks again for what is already verified.
    VerifiedAskedAgain,
    /// The receiver takes the sender's abort for done.
    AbortIsDone,
    /// The receiver forgets its deadline.
    NoDeadline,
    /// The receiver finishes again whenever it is told to.
    FinishedTwice,
    /// The sender releases its lease while posts read the blocks.
    ReleaseBeforeDrain,
    /// The sender is done when all is posted, without the receiver's word.
    DoneWithoutWord,
    /// The sender posts a rectangle again when its post was lost, under the same grant.
    RepostUnderSameGrant,
    /// The sender posts what is not computed yet.
    PostUncomputed,
    /// The sender takes grants of older generations.
    OldGrantTaken,
    /// The sender says that nothing is posted while something is.
    StoppedTooEarly,
    /// The receiver goes on as if its grant were revoked, and does not revoke it.
    GrantNotRevoked,
    /// The receiver calls all wanted tokens good, whatever was verified.
    GoodOverReported,
    /// The receiver names the moment until when it wants the lease, not how long.
    AbsoluteTime,
    /// The sender takes a lease that ran out for released.
    ExpiryIsRelease,
    /// The sender waits for the receiver's word without end.
    NoWordDeadline,
    /// The sender has one post more in flight than it may.
    PostsBeyondLimit,
    /// The receiver waits for yet another session after a cut.
    RegrantForgotten,
    /// An early message is kept until somebody comes for it.
    EarlyKeptForever,
    /// Early messages are kept beyond their limit.
    EarlyUnbounded,
    /// The receiver takes a write outside its grant.
    OutsideGrantTaken,
    /// The receiver takes a write over bytes that landed before.
    OverlapTaken,
    /// The receiver takes a write's number twice.
    SequenceTwice,
    /// The receiver takes an abort that says done for done.
    AbortDoneTaken,
    /// The receiver takes the sender's end that says done for its own.
    EndedDoneTaken,
    /// A peer's refusals push out those of others.
    DeclinedUnshared,
    /// A load is good as far as its best part is.
    BestPartCounts,
    /// A part that failed leaves its siblings alone, and the load is over with it.
    SiblingsForgotten,
    /// A layer is complete when one of its parts is.
    LayerOfOnePart,
}

#[cfg(feature = "sim")]
impl Planted {
    /// All of them.
    pub const ALL: [Self; 32] = [
        Self::FinishBeforeFence,
        Self::VisibleBeforeDigest,
        Self::DigestIgnored,
        Self::GenerationReused,
        Self::VerifiedAskedAgain,
        Self::AbortIsDone,
        Self::NoDeadline,
        Self::FinishedTwice,
        Self::ReleaseBeforeDrain,
        Self::DoneWithoutWord,
        Self::RepostUnderSameGrant,
        Self::PostUncomputed,
        Self::OldGrantTaken,
        Self::StoppedTooEarly,
        Self::GrantNotRevoked,
        Self::GoodOverReported,
        Self::AbsoluteTime,
        Self::ExpiryIsRelease,
        Self::NoWordDeadline,
        Self::PostsBeyondLimit,
        Self::RegrantForgotten,
        Self::EarlyKeptForever,
        Self::EarlyUnbounded,
        Self::OutsideGrantTaken,
        Self::OverlapTaken,
        Self::SequenceTwice,
        Self::AbortDoneTaken,
        Self::EndedDoneTaken,
        Self::DeclinedUnshared,
        Self::BestPartCounts,
        Self::SiblingsForgotten,
        Self::LayerOfOnePart,
    ];
}

/// The planted bug of one machine, if any.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Bug {
    #[cfg(feature = "sim")]
    planted: Option<Planted>,
}

impl Bug {
    #[cfg(feature = "sim")]
    pub(super) const fn plant(planted: Option<Planted>) -> Self {
        Self { planted }
    }

    /// Whether this bug is planted.
    #[cfg(feature = "sim")]
    pub(super) fn is(self, bug: Planted) -> bool {
        self.planted == Some(bug)
    }

    /// Whether this bug is planted: never.
    #[cfg(not(feature = "sim"))]
    pub(super) const fn is(self, _: Planted) -> bool {
        false
    }
}
