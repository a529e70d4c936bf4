//! Looking at payload where it passes: in the threads that carry it, while the processor's cache holds it.
//!
//! A watch knows what the bytes mean; the transport tells it which bytes of a window they are, and keeps them still meanwhile.

use std::fmt;
use std::ops::Range;

use bytes::Bytes;

/// Sees what lands under a grant.
pub trait Landing: Send + Sync + fmt::Debug {
    /// These bytes of the window are in place, by a write that may still be refused. They stay as they are for as long as this runs: a
    /// revoke and a seal wait for it. Other writes of the grant may land elsewhere, or here, at the same time.
    ///
    /// Each byte of a write is shown once, in stretches of any length, by any thread that carries payload.
    fn landed(&self, sequence: u32, stretch: Range<u64>);
}

/// Sees what a post sends, and says last what the receiver is told.
pub trait Leaving: Send + Sync + fmt::Debug {
    /// What goes to these bytes of the window is about to be read. It may be read for as long as this runs: who ends the post waits for it.
    ///
    /// Each byte of the post is shown once, in the order of its extents, by one thread after another.
    fn leaves(&self, stretch: Range<u64>);

    /// All of it was shown: what the receiver is told with the write, no longer than
    /// [`max_notification_bytes`](crate::Capabilities::max_notification_bytes).
    ///
    /// # Errors
    /// Why it cannot be told; the post ends then.
    fn notification(&self) -> Result<Bytes, String>;
}
