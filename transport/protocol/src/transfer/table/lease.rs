//! Which input fits a [`Lease`](crate::transfer::Lease) in which state.

use super::kinds;

kinds! {
    /// The state of a lease.
    LeaseState {
        /// Until it is released or runs out.
        Held = "Held",
        /// It is over, but posts still read the blocks.
        Draining = "Draining",
        /// The blocks are free.
        Released = "Released",
    }
}

kinds! {
    /// An input of a lease.
    LeaseInput {
        /// The receiver still wants it.
        Renew = "renew",
        /// A post begins to read the blocks.
        BeginRead = "begin_read",
        /// A post that read the blocks ended.
        EndRead = "end_read",
        /// The promise ends: asked for, or because it ran out.
        Release = "release",
    }
}

#[cfg(feature = "sim")]
impl LeaseState {
    /// Whether a lease in this state takes the input.
    #[must_use]
    pub const fn takes(self, input: LeaseInput) -> bool {
        match (self, input) {
            (Self::Held, LeaseInput::Renew | LeaseInput::BeginRead | LeaseInput::EndRead | LeaseInput::Release)
            | (Self::Draining, LeaseInput::EndRead) => true,
            (Self::Draining, LeaseInput::Renew | LeaseInput::BeginRead | LeaseInput::Release)
            | (Self::Released, LeaseInput::Renew | LeaseInput::BeginRead | LeaseInput::EndRead | LeaseInput::Release) => {
                false
            }
        }
    }
}
