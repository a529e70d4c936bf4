//! One endpoint of a test: a transport, its memory, and the events that nobody has asked for yet.

use std::cell::Cell;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kvferry_protocol::pages::{Extent, Pages, Piece};
use kvferry_protocol::{EngineId, Incarnation, PeerId, PpRank, RegionId, TpRank};

use super::arena::Arena;
use crate::api::{Event, GrantKey, PostId, Source, Transport, Write};
use crate::error::TransportError;

/// How long a test waits for an event: far longer than any takes, so that only a hang reaches it.
pub const PATIENCE: Duration = Duration::from_secs(30);

thread_local! {
    static SHORTER: Cell<Option<Duration>> = const { Cell::new(None) };
}

/// Runs something with less patience on this thread: for what is expected to hang.
pub fn with_patience<T>(patience: Duration, run: impl FnOnce() -> T) -> T {
    struct Restored;
    impl Drop for Restored {
        fn drop(&mut self) {
            SHORTER.set(None);
        }
    }
    SHORTER.set(Some(patience));
    let _restored = Restored;
    run()
}

/// How long this thread waits: [`PATIENCE`], unless it was told otherwise.
#[must_use]
pub fn patience() -> Duration {
    SHORTER.get().unwrap_or(PATIENCE)
}

/// Makes an endpoint of the transport under test.
pub type Make<'a> = dyn Fn(PeerId, Bytes) -> Box<dyn Transport> + 'a;

/// The peer called `name`, in its `incarnation`-th start.
///
/// # Panics
/// If `name` cannot name an engine.
#[must_use]
pub fn peer(name: &str, incarnation: u64) -> PeerId {
    PeerId {
        engine: EngineId::new(name).expect("a legal name"),
        incarnation: Incarnation::new(incarnation),
        pp_rank: PpRank::new(0),
        tp_rank: TpRank::new(0),
    }
}

/// An endpoint with one registered arena.
pub struct Node {
    /// The endpoint; dropped before the memory.
    pub transport: Box<dyn Transport>,
    /// Who it is.
    pub peer: PeerId,
    /// Region 0.
    pub memory: Arena,
    waiting: VecDeque<Event>,
}

impl Node {
    /// Makes an endpoint with `bytes` of memory, all zero.
    ///
    /// # Panics
    /// If the memory cannot be registered.
    #[must_use]
    pub fn new(make: &Make<'_>, peer: PeerId, bytes: usize) -> Self {
        let greeting = Bytes::from(format!("I am {peer}"));
        let transport = make(peer.clone(), greeting);
        let memory = Arena::new(bytes, 0);
        #[expect(unsafe_code, reason = "registering is the caller's promise")]
        // SAFETY: the node drops the transport before the arena; tests look only at what no live grant or post covers, or by
        // atomics.
        let region = unsafe { transport.register(memory.memory()) }.expect("the memory is registered");
        assert_eq!(region, RegionId::new(0));
        Self { transport, peer, memory, waiting: VecDeque::new() }
    }

    /// Two nodes with a session between them; the first one dialled.
    #[must_use]
    pub fn pair(make: &Make<'_>, bytes: usize) -> (Self, Self) {
        let mut a = Self::new(make, peer("a", 1), bytes);
        let mut b = Self::new(make, peer("b", 1), bytes);
        a.meet(&mut b);
        (a, b)
    }

    /// Dials the other node and waits until both are up.
    ///
    /// # Panics
    /// If that does not happen.
    pub fn meet(&mut self, other: &mut Self) {
        let address = other.transport.local_address();
        self.transport.connect(&address).expect("the address is one of this transport's");
        let (own_peer, other_peer) = (self.peer.clone(), other.peer.clone());
        for (node, who) in [(&mut *self, other_peer), (&mut *other, own_peer)] {
            let Event::Up { greeting, .. } = node.wait_up(&who) else { unreachable!("wait_up gives Up") };
            assert_eq!(greeting, Bytes::from(format!("I am {who}")));
        }
    }

    /// Waits for a session with `who`.
    pub fn wait_up(&mut self, who: &PeerId) -> Event {
        self.wait("Up", |event| matches!(event, Event::Up { peer, .. } if peer == who))
    }

    /// Waits for the end of a session with `who`.
    pub fn wait_down(&mut self, who: &PeerId) -> Event {
        self.wait("Down", |event| matches!(event, Event::Down { peer: Some(peer), .. } if peer == who))
    }

    /// Waits for the end of a post.
    ///
    /// # Errors
    /// What the post ended with.
    pub fn wait_posted(&mut self, id: PostId) -> Result<(), TransportError> {
        match self.wait("Posted", |event| matches!(event, Event::Posted { post, .. } if *post == id)) {
            Event::Posted { outcome, .. } => outcome,
            _ => unreachable!("the filter takes only Posted"),
        }
    }

    /// Waits for a write under `grant`; gives its number, bytes and notification.
    pub fn wait_landed(&mut self, key: GrantKey) -> (u32, u64, Bytes) {
        match self.wait("Landed", |event| matches!(event, Event::Landed { grant, .. } if *grant == key)) {
            Event::Landed { sequence, bytes, notification, .. } => (sequence, bytes, notification),
            _ => unreachable!("the filter takes only Landed"),
        }
    }

    /// Waits for the first event that `wanted` likes; the others stay for later.
    ///
    /// # Panics
    /// If none comes.
    pub fn wait(&mut self, what: &str, mut wanted: impl FnMut(&Event) -> bool) -> Event {
        let deadline = Instant::now() + patience();
        let mut looked_at = 0;
        loop {
            if let Some(at) = self.waiting.iter().skip(looked_at).position(&mut wanted) {
                return self.waiting.remove(looked_at + at).expect("it was just found");
            }
            looked_at = self.waiting.len();
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "{}: {what} did not come; there are {:?}", self.peer, self.waiting);
            self.poll(left);
        }
    }

    /// All events that are there now, without waiting.
    pub fn drain(&mut self) -> Vec<Event> {
        self.poll(Duration::ZERO);
        self.waiting.drain(..).collect()
    }

    /// Polls until `done` holds for the counters.
    ///
    /// # Panics
    /// If that does not happen.
    pub fn wait_stats(&mut self, what: &str, done: impl Fn(&crate::api::TransportStats) -> bool) {
        let deadline = Instant::now() + patience();
        while !done(&self.transport.stats()) {
            assert!(Instant::now() < deadline, "{}: {what}: {:?}", self.peer, self.transport.stats());
            self.poll(Duration::from_millis(1));
        }
    }

    fn poll(&mut self, timeout: Duration) {
        let mut events = Vec::new();
        self.transport.poll(&mut events, timeout);
        self.waiting.extend(events);
    }

    /// Grants `bytes` bytes of this node's memory from `offset` on.
    ///
    /// # Panics
    /// If the transport refuses.
    #[must_use]
    pub fn grant(&self, to: &PeerId, offset: u64, bytes: u64) -> GrantKey {
        self.transport.grant(to, contiguous(offset, bytes)).expect("a grant")
    }

    /// Posts `bytes` bytes of this node's memory from `source` on to the start of a window at `offset`.
    ///
    /// # Panics
    /// If the transport refuses.
    pub fn post(&self, to: &PeerId, grant: GrantKey, sequence: u32, source: u64, offset: u64, bytes: u64) -> PostId {
        self.transport.post(to, write(grant, sequence, source, offset, bytes)).expect("a post")
    }
}

/// A contiguous piece of region 0.
#[must_use]
pub(crate) fn contiguous(offset: u64, bytes: u64) -> Pages {
    let piece = Piece { region: RegionId::new(0), offset, loops: Vec::new(), run_bytes: bytes };
    Pages { bases: vec![0], pieces: vec![piece] }
}

/// A contiguous write whose notification is its number.
#[must_use]
pub(crate) fn write(grant: GrantKey, sequence: u32, source: u64, offset: u64, bytes: u64) -> Write {
    Write {
        grant,
        sequence,
        extents: vec![Extent::contiguous(offset, bytes)],
        source: Source::Pages(vec![contiguous(source, bytes)]),
        notification: Bytes::copy_from_slice(&sequence.to_le_bytes()),
    }
}
