//! Payload that stays in the sender's memory, on one host: the receiver copies it out.
//!
//! The sender *shares* its regions (by descriptor or by address) and a *board* of words, one for each post. A frame *lends* runs of
//! them. The receiver copies straight into the granted pages, so nobody but the receiver ever writes there, and a sender that is
//! stopped cannot be late. Then it looks at the post's word on the board: when a post ends, its word is cleared before its source may
//! change, so bytes that were copied while the word stood are those that were posted.
//!
//! Under a grant *in place* the receiver does not copy: it reads the runs where they lie ([`Adopted`]), and the post stands until it lets go.

mod adopted;
mod board;
mod borrower;
mod foreign;
mod lender;
mod process;
mod raw;

use std::io;
use std::os::fd::BorrowedFd;

pub use adopted::{Adopted, AdoptedRun};
pub(crate) use adopted::{Adoption, LetGo};
pub(crate) use board::OpenLoan;
pub(crate) use borrower::{Borrowed, Borrower};
pub(crate) use lender::Lender;
#[cfg(feature = "testing")]
pub(crate) use raw::{Mapping, memory_file};

/// Both directions of a session.
pub(crate) struct Sharing {
    pub(crate) lender: Lender,
    pub(crate) borrower: Borrower,
}

impl Sharing {
    /// `socket` is a Unix lane of the session: it tells who the peer's process is.
    pub(crate) fn new(
        by_descriptor: bool,
        by_address: bool,
        in_place: bool,
        socket: BorrowedFd<'_>,
        max_posts: usize,
    ) -> io::Result<Self> {
        let lender = Lender::new(by_descriptor, by_address, in_place, max_posts)?;
        Ok(Self { lender, borrower: Borrower::new(by_descriptor, by_address, in_place, socket) })
    }
}
