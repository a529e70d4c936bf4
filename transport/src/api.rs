//! What every transport offers: register, connect, send, grant, post, poll, revoke.

use std::fmt;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kvferry_protocol::pages::{Extent, Pages};
use kvferry_protocol::{PeerId, RegionId};

use crate::credentials::Credentials;
use crate::device_memory::DeviceAccess;
use crate::error::TransportError;
use crate::share::Adopted;
use crate::watch::{Landing, Leaving};

/// One way of moving bytes between this endpoint and its peers.
///
/// All calls return at once, except [`revoke`](Transport::revoke) and [`seal`](Transport::seal), which wait for a lane that is inside a read into the grant
/// (one system call, and the look of a [`Landing`] at what it brought), and [`poll`](Transport::poll), which waits up to its time-out. Any thread may call; events come out in the
/// order in which the transport learned of them, to whoever polls.
pub trait Transport: Send + Sync + 'static {
    /// What this transport is called on command lines, in metrics and in logs.
    fn name(&self) -> &'static str;

    /// What it can do and its limits.
    fn capabilities(&self) -> Capabilities;

    /// Where peers reach this endpoint, as bound (port 0 is resolved).
    fn local_address(&self) -> PeerAddress;

    /// Registers memory; regions are numbered from 0 in the order of registration.
    ///
    /// # Safety
    /// The memory is what [`Memory::kind`] says, and stays mapped until [`shutdown`](Transport::shutdown) returned or the transport is dropped. While a grant over a part of it is live, nobody
    /// else writes or reads that part; while a post reads a part of it, nobody writes that part.
    ///
    /// # Errors
    /// [`TransportError::Memory`] if the kind is not supported, with what is missing, or the table of regions is full.
    #[expect(unsafe_code, reason = "the caller vouches for raw memory")]
    unsafe fn register(&self, memory: Memory) -> Result<RegionId, TransportError>;

    /// Starts to reach a peer and keeps trying, with back-off, until [`disconnect`](Transport::disconnect). The outcome is an
    /// event: [`Event::Up`], [`Event::Found`], or [`Event::Down`] with the reason for each failed attempt. Asking again is harmless.
    ///
    /// # Errors
    /// [`TransportError::Limit`] if too many peers are being reached.
    fn connect(&self, address: &PeerAddress) -> Result<(), TransportError>;

    /// Stops trying to reach an address. A session with who is there stays; when it ends it is not dialled again.
    fn forget(&self, address: &PeerAddress);

    /// Ends the session with a peer and stops trying to reach it. Posts to it fail, grants to it are revoked.
    fn disconnect(&self, peer: &PeerId, reason: &str);

    /// Sends a message on the control lane, which never queues behind payload. Messages of one session arrive in order, at most
    /// once; those of a session that is cut may be lost.
    ///
    /// # Errors
    /// [`TransportError::NotConnected`], or [`TransportError::Limit`] if the message or the queue is too long.
    fn send(&self, peer: &PeerId, message: Bytes) -> Result<(), TransportError>;

    /// Permits one peer to fill the window that `pages` describe, until revoked or the session with that peer ends (which
    /// revokes it).
    ///
    /// # Errors
    /// [`TransportError::NotConnected`]; [`TransportError::Range`] if a page lies outside its region; [`TransportError::Limit`]
    /// if there are too many grants; [`TransportError::DeviceMemory`] if pages are a device's, and the peer's devices cannot write them.
    fn grant(&self, peer: &PeerId, pages: Pages) -> Result<GrantKey, TransportError>;

    /// The same with a watch over what lands. It is let go when the grant is revoked. A transport whose payload no thread of ours carries
    /// shows it nothing, or not all: who needs to know counts.
    ///
    /// # Errors
    /// As [`grant`](Transport::grant).
    fn grant_watched(&self, peer: &PeerId, pages: Pages, watch: Arc<dyn Landing>) -> Result<GrantKey, TransportError> {
        drop(watch);
        self.grant(peer, pages)
    }

    /// Whether grants to a peer may be of a device's memory, and posts to it may come from there.
    ///
    /// # Errors
    /// [`TransportError::DeviceMemory`] says why not, and how to mend it; [`TransportError::NotConnected`].
    fn reaches_device_memory(&self, peer: &PeerId) -> Result<(), TransportError> {
        let _ = peer;
        let problem = "processors carry all of this transport's payload; stage it in host memory".to_owned();
        Err(TransportError::DeviceMemory { what: "the payload", problem })
    }

    /// Permits one peer to hand over a window of `bytes` bytes without moving it: what it posts stays in its memory, and
    /// [`Event::Lent`] says where this side reads it. Between processes of one host whose session shares memory.
    ///
    /// # Errors
    /// [`TransportError::Refused`] if the session with the peer is not such, with the reason; else as [`grant`](Transport::grant).
    fn grant_in_place(&self, peer: &PeerId, bytes: u64) -> Result<GrantKey, TransportError> {
        let _ = bytes;
        Err(TransportError::Refused { reason: format!("{peer}'s memory is not read in place by this transport") })
    }

    /// Whether a post under this grant of a peer would be handed over in place. Of a peer without a session nothing would.
    fn is_in_place(&self, peer: &PeerId, grant: GrantKey) -> bool {
        let _ = (peer, grant);
        false
    }

    /// Asks a peer to let go of a post that it holds in place, once; it hears [`Event::Recalled`]. The post ends when it has.
    fn recall(&self, peer: &PeerId, post: PostId) {
        let _ = (peer, post);
    }

    /// Withdraws a grant. After this returns no byte of it lands, ever; it needs no word from the peer. Revoking again, or a
    /// grant that ended with its session, returns at once.
    fn revoke(&self, grant: GrantKey);

    /// Closes parts of a grant's window while the rest stays open. After this returns no byte of these extents is written any
    /// more, so what was verified there may be read. Each must be a nest that does not overlap itself, as a plan gives them.
    fn seal(&self, grant: GrantKey, extents: &[Extent]);

    /// Writes into a peer's window: `write.source` flows into `write.extents` in order. Its one completion is
    /// [`Event::Posted`]; at the receiver it becomes one [`Event::Landed`] with the notification, after all bytes landed.
    ///
    /// A source in a device's memory is read by RDMA devices only. If they cannot carry it after all, the post ends in
    /// [`TransportError::DeviceMemory`]: no processor does it for them.
    ///
    /// # Errors
    /// The write is handed back in [`PostError`]; nothing was sent then.
    fn post(&self, peer: &PeerId, write: Write) -> Result<PostId, Box<PostError>>;

    /// Whether the threads that carry payload to this peer can look at it ([`post_watched`](Transport::post_watched)).
    fn watches(&self, peer: &PeerId) -> bool {
        let _ = peer;
        false
    }

    /// Posts with a watch over what leaves, which says last what the notification is; that of `write` is not used. It is let go when the
    /// post ends. If it has nothing to tell the post ends with [`TransportError::Refused`].
    ///
    /// # Errors
    /// As [`post`](Transport::post); and where the peer's payload cannot be watched.
    fn post_watched(&self, peer: &PeerId, write: Write, watch: Arc<dyn Leaving>) -> Result<PostId, Box<PostError>> {
        drop(watch);
        let reason = TransportError::Refused { reason: format!("payload to {peer} is not watched here") };
        Err(Box::new(PostError { write, reason }))
    }

    /// Stops all posts under one grant of a peer: what was not handed to the network is dropped. After this returns none of their
    /// sources is read any more, or, where the receiver copies out of them itself, nothing that it copies counts. What it may hold in place is
    /// recalled, and stays as it is until the post ends. Each ends in its one [`Event::Posted`], which may have to wait for the receiver's answer.
    fn cancel(&self, peer: &PeerId, grant: GrantKey);

    /// To this peer, runs shorter than this are cheaper to pack into one run first; in bytes.
    fn direct_run_bytes(&self, peer: &PeerId) -> u64;

    /// Moves events into `events`; waits up to `timeout` if there are none.
    fn poll(&self, events: &mut Vec<Event>, timeout: Duration);

    /// Makes the [`poll`](Transport::poll) that waits, or else the next one, return without waiting on.
    fn interrupt(&self);

    /// Changes the keys or certificates by which peers prove themselves. Sessions that are up stay; what is dialled or accepted from
    /// now on uses these. Whether lanes are encrypted does not change. A transport without proofs does nothing.
    fn set_credentials(&self, credentials: Credentials);

    /// Counters since the start.
    fn stats(&self) -> TransportStats;

    /// Ends all sessions; after this returns nothing is read from or written to registered memory, except by peers that hold it in place:
    /// what they read from here on does not count, and they can see that ([`Adopted::is_intact`]).
    fn shutdown(&self);
}

/// Where an endpoint can be reached.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, serde::Serialize, serde::Deserialize)]
pub enum PeerAddress {
    /// A listener of this process's loopback network.
    Loopback(u64),
    /// A TCP listener.
    Tcp(SocketAddr),
}

/// A way for payload to go from one endpoint to another; the best first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub enum PathKind {
    /// Inside one process. No configuration asks for it.
    #[serde(rename = "loopback")]
    Loopback,
    /// On one host: the receiver maps the sender's memory and copies out of it.
    #[serde(rename = "shm")]
    SharedMemory,
    /// On one host: the receiver copies out of the sender's process by a system call (cross-memory attach).
    #[serde(rename = "cma")]
    ProcessMemory,
    /// On one host: lanes over Unix sockets.
    #[serde(rename = "uds")]
    UnixSocket,
    /// The sender's RDMA device writes into the receiver's memory.
    #[serde(rename = "rdma")]
    Rdma,
    /// A link over UCX, by whatever transports it finds; see [`ucx`](crate::ucx).
    #[serde(rename = "ucx")]
    Ucx,
    /// Lanes over TCP.
    #[serde(rename = "tcp")]
    Tcp,
}

impl PathKind {
    /// All that join processes and need nothing that has to be installed, the best first.
    pub const ALL: [Self; 4] = [Self::SharedMemory, Self::ProcessMemory, Self::UnixSocket, Self::Tcp];

    /// All that a configuration can name, the best first: also those that need devices or libraries.
    pub const NAMED: [Self; 6] =
        [Self::SharedMemory, Self::ProcessMemory, Self::UnixSocket, Self::Rdma, Self::Ucx, Self::Tcp];

    /// What it is called in configurations, logs and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Loopback => "loopback",
            Self::SharedMemory => "shm",
            Self::ProcessMemory => "cma",
            Self::UnixSocket => "uds",
            Self::Rdma => "rdma",
            Self::Ucx => "ucx",
            Self::Tcp => "tcp",
        }
    }
}

impl fmt::Display for PathKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Which way a session's payload goes, and why no better one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PathReport {
    /// What was taken, for memory that has a file which other processes may map ([`Memory::file`]).
    pub kind: PathKind,
    /// The same for all other memory, such as what an engine allocated itself.
    pub plain: PathKind,
    /// What would be better, each with the reason against it.
    pub not: Vec<(PathKind, String)>,
}

impl PathReport {
    /// What was taken, in words.
    #[must_use]
    pub fn taken(&self) -> String {
        match (self.kind, self.plain) {
            (kind, plain) if kind == plain => kind.to_string(),
            (kind, plain) => format!("{kind} for memory files, {plain} for other memory"),
        }
    }

    /// Why no RDMA device carries the payload, in words; `None` if one does.
    pub(crate) fn why_not_by_device(&self) -> Option<String> {
        let of_rdma = self.not.iter().find(|(kind, _)| *kind == PathKind::Rdma);
        match self.kind {
            PathKind::Rdma => None,
            kind if kind < PathKind::Rdma => {
                Some(format!("it goes by {kind}, inside one host: leave that out of the paths of one side"))
            }
            _ => Some(of_rdma.map_or_else(|| "rdma is not among this side's paths".to_owned(), |(_, why)| why.clone())),
        }
    }

    /// What was not taken, and why, in words; `none` if there is nothing better.
    #[must_use]
    pub fn not_taken(&self) -> String {
        let reasons: Vec<String> = self.not.iter().map(|(kind, why)| format!("{kind}: {why}")).collect();
        if reasons.is_empty() { "none".to_owned() } else { reasons.join("; ") }
    }
}

/// Memory to register.
#[derive(Clone, Debug)]
pub struct Memory {
    /// The first byte.
    pub address: NonNull<u8>,
    /// How many bytes.
    pub bytes: usize,
    /// Where they are, and how they are reached there.
    pub kind: MemoryKind,
    /// The file that is mapped there, if other processes may map it too; none for memory of a device.
    pub file: Option<MemoryFile>,
}

/// The file behind registered memory. It must be sealed against shrinking (`F_SEAL_SHRINK`), or peers refuse to map it: reading
/// past the end of a file that became shorter kills a process.
#[derive(Clone, Debug)]
pub struct MemoryFile {
    /// The file, as memfd_create(2) makes it.
    pub file: Arc<OwnedFd>,
    /// Where in the file the memory begins; a multiple of the page size.
    pub offset: u64,
}

/// Where memory is.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum MemoryKind {
    /// Ordinary host memory.
    Host,
    /// Memory of another device, as a GPU's, by an address that this process's processors cannot use. RDMA devices alone carry it, in
    /// builds with the feature `device-memory`, and in sessions whose path that is ([`Transport::reaches_device_memory`]). A grant's pages
    /// and a post's source lie either in host memory or in a device's, not in both, and neither is watched: a digest of such bytes is a
    /// kernel's to make. What kernels wrote there is posted once they are done, and the flush ([`DeviceAccess::flush`]) shows them what came.
    /// Transports that cannot keep all that refuse it with their reason, and an engine stages such memory in host memory.
    Device(DeviceAccess),
}

/// What a transport can do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Capabilities {
    /// The longest control message, in bytes.
    pub max_message_bytes: usize,
    /// The longest notification of a post, in bytes.
    pub max_notification_bytes: usize,
    /// The most extents in one post.
    pub max_extents: usize,
}

/// The peer's permission to write one window. Unguessable, and useless to any other peer or session.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct GrantKey(pub u128);

impl fmt::Debug for GrantKey {
    /// Shows only enough to tell grants apart in a log: the key is a secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GrantKey({:04x}..)", self.0 >> 112)
    }
}

/// Numbers a post of this endpoint.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PostId(pub u64);

/// A batch of runs with one completion and one notification.
#[derive(Debug)]
pub struct Write {
    /// The peer's grant.
    pub grant: GrantKey,
    /// Numbers the writes of a grant; the receiver takes each number once.
    pub sequence: u32,
    /// Where in the window the bytes go, in order.
    pub extents: Vec<Extent>,
    /// Where the bytes come from; as many as the extents hold.
    pub source: Source,
    /// What the receiver's event carries.
    pub notification: Bytes,
}

/// Where a write's bytes come from.
#[derive(Debug, Clone)]
pub enum Source {
    /// Registered memory, read in place. The caller keeps it unchanged until the post's completion.
    Pages(Vec<Pages>),
    /// A packed slab, owned by the post until its completion.
    Packed(Arc<dyn Slab>),
}

/// Packed bytes that a post reads and then lets go.
pub trait Slab: Send + Sync + fmt::Debug {
    /// The bytes.
    fn bytes(&self) -> &[u8];
}

/// What happened.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event {
    /// A session with a peer is up (again); `session` grows with each.
    Up {
        /// Who.
        peer: PeerId,
        /// Which session with it.
        session: u64,
        /// Which address was dialled, if this side dialled.
        address: Option<PeerAddress>,
        /// The protocol version of the session: what both sides say in it, messages and notifications too, is written in that.
        version: u16,
        /// What the peer said of itself when it proved who it is (an application's bytes).
        greeting: Bytes,
        /// Which way payload goes.
        path: PathReport,
    },
    /// Who is at an address that was dialled: a peer with which there is a session already, which stays. The address is tried again when
    /// that has ended.
    Found {
        /// Who.
        peer: PeerId,
        /// Which address.
        address: PeerAddress,
    },
    /// A session ended, or an attempt to reach an address failed. All grants to the peer are revoked and all posts to it have
    /// ended before this event, except those whose source it may hold in place: each ends when the peer has let go of all that it holds of
    /// that session, or its process is gone.
    Down {
        /// Who, if it proved who it is.
        peer: Option<PeerId>,
        /// Which address was dialled, if this side dialled.
        address: Option<PeerAddress>,
        /// Why.
        reason: TransportError,
    },
    /// A control message.
    Message {
        /// Who sent it.
        peer: PeerId,
        /// Its bytes.
        message: Bytes,
    },
    /// The receiver has all of a post under a grant in place, and reads it where it lies until the post ends. A post that ends at once may
    /// do so without this.
    Held {
        /// Which.
        post: PostId,
    },
    /// The sender wants its memory back: copy what is still needed, and drop what [`Event::Lent`] gave.
    Recalled {
        /// Who wrote.
        peer: PeerId,
        /// Under which grant.
        grant: GrantKey,
        /// Which write of the grant.
        sequence: u32,
    },
    /// All bytes of a peer's write may be read where they lie.
    Lent {
        /// Who wrote.
        peer: PeerId,
        /// Under which grant.
        grant: GrantKey,
        /// Which write of the grant.
        sequence: u32,
        /// How many bytes.
        bytes: u64,
        /// The write's notification.
        notification: Bytes,
        /// Where they lie; the sender holds them until this is dropped.
        adopted: Adopted,
    },
    /// A post ended: the receiver took all its bytes, or will never take another.
    Posted {
        /// Which.
        post: PostId,
        /// How.
        outcome: Result<(), TransportError>,
    },
    /// All bytes of a peer's write are in place.
    Landed {
        /// Who wrote.
        peer: PeerId,
        /// Under which grant.
        grant: GrantKey,
        /// Which write of the grant.
        sequence: u32,
        /// How many bytes.
        bytes: u64,
        /// The write's notification.
        notification: Bytes,
    },
}

/// A post that was not taken, with the write.
#[derive(Debug, thiserror::Error)]
#[error("write {} was not posted", write.sequence)]
pub struct PostError {
    /// The write, unchanged.
    pub write: Write,
    /// Why.
    #[source]
    pub reason: TransportError,
}

/// Counters since the start; all monotonic but the gauges that say so.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TransportStats {
    /// Payload bytes handed to the network.
    pub sent_bytes: u64,
    /// Of these, bytes that stayed where they are for the receiver to copy.
    pub lent_bytes: u64,
    /// Payload bytes that peers took where they lie; not among those that were sent.
    pub handed_bytes: u64,
    /// Payload bytes that went over UCX, either way: a session that took it may have fallen back to lanes.
    pub ucx_bytes: u64,
    /// Payload bytes placed into granted memory.
    pub landed_bytes: u64,
    /// Payload bytes that peers handed over in place, and nobody copied.
    pub adopted_bytes: u64,
    /// Payload bytes that came under a dead grant and were thrown away.
    pub dropped_bytes: u64,
    /// Writes refused: unknown or revoked grant, out of range, taken before.
    pub refused_writes: u64,
    /// Sessions that came up.
    pub sessions_up: u64,
    /// Sessions and attempts that ended.
    pub sessions_down: u64,
    /// Peers that failed to prove who they are.
    pub refused_peers: u64,
    /// Gauge: live grants.
    pub grants_live: u64,
    /// Writes that were asked back: from this side's peers.
    pub recalled_writes: u64,
    /// Gauge: posts that have not ended.
    pub posts_live: u64,
    /// Gauge: bytes of posts that peers hold in place, or are about to.
    pub held_bytes: u64,
}
