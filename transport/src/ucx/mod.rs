//! Bytes over UCX: puts into a peer's memory, a flush, then a note by active message. libucp is opened at run time.
//!
//! A [`UcxNode`] has one context and one thread. For each session with a peer, which is made over an authenticated control lane
//! elsewhere, both sides [`open`](UcxNode::open) a link and tell each other its card; when both [`connect`](UcxNode::connect)ed,
//! each says [`Ready`](UcxEvent::Ready). The receiver of a grant tells its [`window`](UcxNode::window); the sender
//! [`post`](UcxNode::post)s into it, and the receiver hears the post's note once all bytes are in place.
//!
//! Inside [`Tcp`](crate::Tcp) links carry frames into slots instead of pages (`tcp::ucx`), so that a grant is revoked without a fence;
//! where no device puts, note and bytes go in one active message, a *load*, which the receiver copies while UCX has it.
//!
//! **Fencing.** A link has a worker of its own. [`fence`](UcxNode::fence) closes the endpoint by force and destroys the worker, and
//! with it every socket and queue pair through which the peer could write; it needs no word from the peer. That is enough only
//! because `lanes` keeps out transports by which a sender writes the receiver's memory itself, and because what each endpoint uses
//! is read back before the first put.
//!
//! **Memory.** What UCX may touch is owned by the link's tables until UCX ended the operation or the worker is destroyed. A
//! thread that gives up waiting frees nothing.
//!
//! Lock order: `registering`, then the tables of regions; the state is a leaf. No lock is held in a call of UCX.

mod card;
mod config;
mod engine;
mod error;
mod events;
mod ffi;
mod lanes;
mod link;
mod node;
mod regions;
mod survey;
mod ticket;
mod window;
mod work;

pub use config::{Setting, UcxConfig, UcxConfigFile};
pub use error::UcxError;
pub use events::{UcxEvent, UcxEvents, UcxSink};
pub use node::{LinkId, UcxNode};
pub use survey::{UcxFacts, survey};
pub use ucx_sys::{LIBRARY_VARIABLE as UCX_LIBRARY_VARIABLE, LoadError as UcxLoadError};
pub use window::RemoteWindow;
pub(crate) use work::{Cargo, Load, Work};
