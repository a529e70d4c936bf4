//! Bugs that tests plant in a machine.

/// A bug that tests put in, to see that they find it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Plant {
    /// A completion that comes twice is taken twice.
    DuplicateTaken,
    /// A receive that was consumed is not posted anew.
    ReceiveNotPosted,
    /// Writes begin though the peer has no place.
    WindowIgnored,
    /// More requests are posted than the send queue holds.
    DepthIgnored,
    /// The last request of a chain makes no completion.
    LastUnsignalled,
    /// The end is told, and queue pairs are left, while requests are in flight.
    ClosedBeforeDrained,
    /// Places are given back twice.
    PlacesReturnedTwice,
    /// A write has landed with its word and the first of its tags.
    LandedEarly,
    /// A tag that comes before its write's word is dropped.
    EarlyTagDropped,
    /// A failed request ends its write as if it had succeeded.
    FailureTakenForSuccess,
}

/// Which bug is planted; none outside of tests.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Planted(#[cfg(test)] pub(super) Option<Plant>);

impl Planted {
    #[cfg(test)]
    pub(super) fn is(self, bug: Plant) -> bool {
        self.0 == Some(bug)
    }

    #[cfg(not(test))]
    pub(super) const fn is(self, _: Plant) -> bool {
        false
    }
}
