//! Bugs that tests plant in a transport to prove that the contract suite sees them; without the feature `planted` there are none.

/// A bug to plant in an endpoint.
#[cfg_attr(not(feature = "planted"), expect(unreachable_pub, reason = "exported with the feature `planted` only"))]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Planted {
    /// A revoked grant is forgotten, but frames that were admitted go on.
    RevokeSkipped,
    /// A revoke does not wait for the lane that is inside a read into the grant.
    RevokeNotWaited,
    /// Nothing is sealed.
    SealSkipped,
    /// A seal does not wait for the lane that is inside a read into the grant.
    SealNotWaited,
    /// A grant of one peer or session serves another.
    SessionUnchecked,
    /// When a session ends its grants are forgotten, but frames that were admitted go on: late bytes after a cut.
    CutKeepsGrants,
    /// The receiver ignores that the sender cancelled a write, and says that it ended it.
    CancelUnheard,
    /// A write's number is taken again.
    SequenceTakenAgain,
    /// A write is reported when its first frame is in place.
    LandedEarly,
    /// A write is reported twice to its receiver.
    LandedTwice,
    /// A post ends twice.
    PostedTwice,
    /// A post that ended still counts against the limit.
    PostCreditLost,
    /// A grant that was revoked still counts against the limit.
    GrantCreditLost,
    /// A full queue of events that is emptied does not tell those who wait for room.
    RoomNotTold,
    /// A slab stays held after its post ended.
    SlabKept,
    /// What landed is looked at when the grant's guard was let go: a revoke does not wait for it.
    LookUnguarded,
    /// What fills up the frame of a cancelled post is sent before the receiver knows of the cancel.
    FillerAtOnce,
    /// The test pattern of an RDMA path is written with a flipped bit, as a device or a network that spoils bytes would.
    PatternSpoilt,
    /// A session's end ends what the peer holds in place, and lets go of its source.
    CutForgetsHeld,
    /// No bug, but what brings out those about waiting: a lane dawdles between the look at a grant and the copy into it.
    LaneSlow,
}

#[cfg(feature = "planted")]
impl Planted {
    /// All bugs.
    pub const ALL: [Self; 17] = [
        Self::RevokeSkipped,
        Self::RevokeNotWaited,
        Self::SealSkipped,
        Self::SealNotWaited,
        Self::SessionUnchecked,
        Self::CutKeepsGrants,
        Self::CancelUnheard,
        Self::SequenceTakenAgain,
        Self::LandedEarly,
        Self::LandedTwice,
        Self::PostedTwice,
        Self::PostCreditLost,
        Self::GrantCreditLost,
        Self::RoomNotTold,
        Self::SlabKept,
        Self::LookUnguarded,
        Self::FillerAtOnce,
    ];
}

/// The planted bug of one endpoint, if any.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Bug {
    #[cfg(feature = "planted")]
    planted: Option<Planted>,
}

impl Bug {
    #[cfg(feature = "planted")]
    pub(crate) const fn plant(planted: Planted) -> Self {
        Self { planted: Some(planted) }
    }

    /// Passes some time inside a lane, where a bug would be seen in it.
    #[cfg(feature = "planted")]
    pub(crate) fn dawdle(self) {
        use Planted::{CutKeepsGrants, LaneSlow, LookUnguarded, RevokeNotWaited, RevokeSkipped, SealNotWaited};
        let slow = [LaneSlow, RevokeSkipped, RevokeNotWaited, SealNotWaited, CutKeepsGrants, LookUnguarded];
        if self.planted.is_some_and(|planted| slow.contains(&planted)) {
            std::thread::park_timeout(std::time::Duration::from_micros(500));
        }
    }

    /// Passes no time.
    #[cfg(not(feature = "planted"))]
    pub(crate) const fn dawdle(self) {
        let _ = Planted::LaneSlow;
    }

    /// Whether this bug is planted.
    #[cfg(feature = "planted")]
    pub(crate) fn is(self, bug: Planted) -> bool {
        self.planted == Some(bug)
    }

    /// Whether this bug is planted: never.
    #[cfg(not(feature = "planted"))]
    pub(crate) const fn is(self, _: Planted) -> bool {
        false
    }
}
