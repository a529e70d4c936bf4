//! What travels on a connection between two endpoints: the handshake and the frames after it. No I/O.
//!
//! A connection is one lane: the control lane of a session, or one of its data lanes. On both the dialler speaks first:
//!
//! ```text
//! dialler                                   listener
//! Hello {versions, lane, nonce}        ─▶                       48 bytes
//!                                      ◀─   Challenge {version, nonce}    48 bytes
//! Proof                                ─▶                       32 bytes
//!                                      ◀─   Proof                         32 bytes
//! Identity, sealed                     ─▶   the first thing that is parsed and not of fixed size
//!                                      ◀─   Verdict, sealed
//! ```
//!
//! A proof is HMAC-SHA256 under the pre-shared key over all that was said before; a seal is one under a key that is derived
//! from the whole transcript. After the verdict both sides send frames: a [`FrameHeader`], a table, a payload. Frames are
//! not sealed: the key keeps strangers out, it does not hide or protect what is carried from someone inside the network path.
//! A connection inside TLS does; the same handshake takes place in it, under keys that are bound to that channel
//! ([`ClusterKeys::within`]).

mod auth;
mod error;
mod frame;
mod handshake;
mod hello;
mod identity;
mod lend;
mod offer;
mod slice;
mod table;

pub use auth::{ChannelSecret, ClusterKey, ClusterKeys, LaneSecret};
pub use error::{ClusterKeyError, HandshakeError, HandshakeStep, WireError};
pub use frame::{
    FrameHeader, FrameKind, MAX_CARD_BYTES, MAX_GOODBYE_BYTES, MAX_MESSAGE_BYTES, MAX_PAYLOAD_BYTES, MAX_TABLE_BYTES,
    Refusal,
};
pub use handshake::{Dialler, Established, Introduction, Listener, Step};
pub use hello::{Challenge, Hello, LaneKind, VERSIONS, VersionRange};
pub use identity::{Declined, Identity, LaneIdentity, MAX_GREETING_BYTES, MAX_LANES, PeerIdentity, Verdict};
pub use lend::{BOARD, LentRun, Loan, MAX_LENT_RUNS, MAX_MAPPED_BYTES, Reach, Share, TETHER, encode_loan};
pub use offer::{MAX_OFFER_BYTES, MAX_OFFERS, MAX_RAILS, Offer, OfferKind, put_rails, take_rails};
pub use slice::slice_extents;
pub use table::{MAX_NOTIFICATION_BYTES, check_extents, decode_table, encode_table, extent_table_bytes};
