//! A session with a peer, as all threads see it.
//!
//! Lock order: the control queue and the sockets are leaves; the outbox is the core's. Ended by the control thread alone.

use std::collections::{HashMap, VecDeque};
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use kvferry_protocol::PeerId;
use kvferry_protocol::wire::{FrameHeader, FrameKind, Refusal};

use super::calls::Bell;
use super::estate::Estate;
use super::rate::TokenBucket;
use super::stream::Socket;
use super::ucx::UcxLane;
use super::verbs::Verbs;
use crate::api::GrantKey;
use crate::core::{Core, Counters, FrameCut, Outbox, SessionInPlace, SessionKey};
use crate::error::TransportError;
use crate::ffi;
use crate::raw::RawRun;
use crate::share::{Lender, LetGo, Sharing};

/// How many refused writes are remembered, so that each is counted and answered once.
const MAX_REFUSED: usize = 256;

pub(crate) struct Session {
    pub(crate) key: SessionKey,
    pub(crate) peer: PeerId,
    /// The peer in errors and logs.
    pub(crate) name: String,
    pub(crate) version: u16,
    /// Which address this side dialled.
    pub(crate) address: Option<SocketAddr>,
    /// Memory that the two read in each other, if they do.
    pub(crate) sharing: Option<Sharing>,
    /// Whether they may read it where it lies.
    pub(crate) is_in_place: bool,
    /// Writes of the peer that this side holds in place, and whether they were asked back.
    held: Mutex<HashMap<(u128, u32), bool>>,
    /// The thread that carries payload by RDMA devices, on sessions that may take that path.
    pub(crate) rdma: Option<Arc<Verbs>>,
    /// It was proved, and is taken.
    is_by_device: AtomicBool,
    /// What it leaves to the lanes.
    for_lanes: Mutex<VecDeque<FrameCut>>,
    /// Whether the peer knows regions that are memory of a device.
    pub(crate) knows_device_memory: bool,
    /// Why the session does not take that path, once it is known that it does not.
    not_by_device: OnceLock<String>,
    /// The link over UCX, if there is one.
    pub(crate) ucx: OnceLock<Arc<UcxLane>>,
    pub(crate) outbox: Outbox,
    pub(crate) bucket: Option<Mutex<TokenBucket>>,
    control: Mutex<ControlQueue>,
    /// Calls the control thread.
    control_bell: Bell,
    /// Call the data threads to its lanes, once those were given to them.
    lane_bells: OnceLock<Vec<Bell>>,
    sockets: Mutex<Vec<Arc<Socket>>>,
    refused: Mutex<VecDeque<(u128, u32)>>,
    is_over: AtomicBool,
    born: Instant,
    /// Milliseconds after birth at which a data lane last moved a byte.
    moved_ms: AtomicU64,
}

/// Frames for the control lane.
#[derive(Default)]
struct ControlQueue {
    frames: VecDeque<Vec<u8>>,
    bytes: usize,
    /// What the socket did not take of a frame that [`Session::send_control`] began: goes before all others.
    rest: Vec<u8>,
    /// How many bytes have their place in the lane: those that were written, or are about to be.
    placed: u64,
    /// The control thread is in the middle of some bytes.
    is_writing: bool,
    /// Where who sends may write a frame itself, if the control thread writes nothing; not with TLS, and not when the session is over.
    socket: Option<Arc<Socket>>,
}

pub(crate) struct SessionSetup {
    pub(crate) key: SessionKey,
    pub(crate) peer: PeerId,
    pub(crate) version: u16,
    pub(crate) address: Option<SocketAddr>,
    pub(crate) max_posts: usize,
    pub(crate) link_bytes_per_second: Option<f64>,
    pub(crate) sharing: Option<Sharing>,
    pub(crate) is_in_place: bool,
    pub(crate) rdma: Option<Arc<Verbs>>,
    pub(crate) knows_device_memory: bool,
    pub(crate) sockets: Vec<Arc<Socket>>,
    /// The control lane's, if frames may be written to it as they are.
    pub(crate) control_socket: Option<Arc<Socket>>,
    pub(crate) control_bell: Bell,
}

impl Session {
    pub(crate) fn new(setup: SessionSetup, now: Instant) -> Self {
        Self {
            key: setup.key,
            name: setup.peer.to_string(),
            peer: setup.peer,
            version: setup.version,
            address: setup.address,
            sharing: setup.sharing,
            is_in_place: setup.is_in_place,
            held: Mutex::default(),
            rdma: setup.rdma,
            is_by_device: AtomicBool::new(false),
            for_lanes: Mutex::default(),
            knows_device_memory: setup.knows_device_memory,
            not_by_device: OnceLock::new(),
            ucx: OnceLock::new(),
            outbox: Outbox::new(setup.max_posts),
            bucket: setup.link_bytes_per_second.map(|rate| Mutex::new(TokenBucket::new(rate, now))),
            control: Mutex::new(ControlQueue { socket: setup.control_socket, ..ControlQueue::default() }),
            control_bell: setup.control_bell,
            lane_bells: OnceLock::new(),
            sockets: Mutex::new(setup.sockets),
            refused: Mutex::default(),
            is_over: AtomicBool::new(false),
            born: now,
            moved_ms: AtomicU64::new(0),
        }
    }

    /// Since when it is up.
    pub(crate) const fn born(&self) -> Instant {
        self.born
    }

    /// Lets the peer read payload where it lies, if that was agreed.
    pub(crate) fn lender(&self) -> Option<&Lender> {
        self.sharing.as_ref().map(|sharing| &sharing.lender)
    }

    /// The next frame for a lane.
    pub(crate) fn next_frame(&self, core: &Core, frame_bytes: u64) -> Option<FrameCut> {
        let Some(verbs) = self.verbs() else {
            let cut = self.outbox.next_frame(core, frame_bytes, self.version, self.lender());
            if cut.is_some() && self.outbox.take_missed() {
                self.ring_lanes();
            }
            return cut;
        };
        let cut = lock(&self.for_lanes).pop_front();
        if cut.is_some() {
            verbs.wake();
        }
        cut
    }

    /// The thread that carries payload by RDMA devices, if the session's path is that.
    pub(crate) fn verbs(&self) -> Option<&Arc<Verbs>> {
        self.rdma.as_ref().filter(|_| self.is_by_device.load(Ordering::SeqCst))
    }

    /// Whether lanes carry all payload.
    pub(crate) fn is_by_lanes(&self) -> bool {
        self.verbs().is_none() && !self.ucx_carries()
    }

    /// Takes the path by RDMA devices, which was proved; before that the session is not known to those who post and grant.
    pub(crate) fn take_device(&self) {
        self.is_by_device.store(true, Ordering::SeqCst);
    }

    /// Says why the path by RDMA devices is not taken.
    pub(crate) fn set_not_by_device(&self, reason: String) {
        // Once, by the thread that made the session.
        let _ = self.not_by_device.set(reason);
    }

    /// Whether memory of devices can be granted and posted from; `what` lies there.
    pub(crate) fn reaches_device_memory(&self, what: &'static str) -> Result<(), TransportError> {
        let name = &self.name;
        let problem = match self.verbs() {
            Some(_) if self.knows_device_memory => return Ok(()),
            Some(_) => {
                format!("the release of {name} does not know of it: bring it to this one, or stage in host memory")
            }
            None => {
                let why = self.not_by_device.get().map_or("", String::as_str);
                let ucx = if self.ucx.get().is_some() {
                    "; UCX puts into slots of host memory, which processors empty"
                } else {
                    ""
                };
                format!(
                    "no RDMA link carries the session with {name} ({why}{ucx}): mend that, or stage it in host memory"
                )
            }
        };
        Err(TransportError::DeviceMemory { what, problem })
    }

    /// Leaves a frame to the lanes.
    pub(crate) fn give_to_lanes(&self, cut: FrameCut) {
        lock(&self.for_lanes).push_back(cut);
        self.ring_lanes();
    }

    /// Says what calls its lanes; before these are given to their threads, so that none begins without.
    pub(crate) fn set_lane_bells(&self, bells: Vec<Bell>) {
        // Once, by the thread that made the session.
        let _ = self.lane_bells.set(bells);
    }

    /// Calls its lanes: there is something to send, or the session is over. A lane's first turn needs no call.
    pub(crate) fn ring_lanes(&self) {
        self.lane_bells.get().into_iter().flatten().for_each(Bell::ring);
    }

    pub(crate) fn waiting_for_lanes(&self) -> usize {
        lock(&self.for_lanes).len()
    }

    /// Whether frames go over UCX.
    pub(crate) fn ucx_carries(&self) -> bool {
        self.ucx.get().is_some_and(|lane| lane.carries())
    }

    pub(crate) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }

    /// Queues a frame of `body` for the control lane, if there is room for it. The control thread sends it when it is woken.
    pub(crate) fn queue_control(
        &self,
        header: FrameHeader,
        body: &[u8],
        max_bytes: usize,
    ) -> Result<(), TransportError> {
        let mut control = lock(&self.control);
        let frame = self.control_frame(&control, header, body, max_bytes)?;
        control.push(frame);
        drop(control);
        self.control_bell.note();
        Ok(())
    }

    /// The same, but the frame is written here and now if the control thread writes nothing and the socket takes it: that spares the way
    /// over that thread, which sleeps most of the time. Returns whether it has to be woken.
    pub(crate) fn send_control(
        &self,
        header: FrameHeader,
        body: &[u8],
        max_bytes: usize,
    ) -> Result<bool, TransportError> {
        let mut control = lock(&self.control);
        let mut frame = self.control_frame(&control, header, body, max_bytes)?;
        let is_free = !control.is_writing && control.rest.is_empty() && control.frames.is_empty();
        let sent = match control.socket.as_ref().filter(|_| is_free) {
            // What is wrong with the socket the control thread finds out, too.
            Some(socket) => ffi::send_runs(socket.as_fd(), &[RawRun::of(&frame)]).unwrap_or(0),
            None => 0,
        };
        if sent > 0 {
            control.placed += frame.len() as u64;
        }
        if sent == frame.len() {
            return Ok(false);
        }
        if sent > 0 {
            control.rest = frame.split_off(sent);
            control.bytes += control.rest.len();
        } else {
            control.push(frame);
        }
        drop(control);
        self.control_bell.note();
        Ok(true)
    }

    fn control_frame(
        &self,
        control: &ControlQueue,
        header: FrameHeader,
        body: &[u8],
        max_bytes: usize,
    ) -> Result<Vec<u8>, TransportError> {
        if self.is_over() {
            return Err(TransportError::NotConnected { peer: self.name.clone() });
        }
        let found = control.bytes + FrameHeader::BYTES + body.len();
        if found > max_bytes {
            let (found, limit) = (found as u64, max_bytes as u64);
            return Err(TransportError::Limit { what: "bytes of messages to one peer", found, limit });
        }
        Ok([&header.encode(self.version)[..], body].concat())
    }

    /// Puts the session's end before all that waits.
    pub(crate) fn queue_goodbye(&self, reason: &str) {
        let header = FrameHeader::with_body(FrameKind::Goodbye, reason.as_bytes());
        let frame = [&header.encode(self.version)[..], reason.as_bytes()].concat();
        let mut control = lock(&self.control);
        control.bytes += frame.len();
        control.frames.push_front(frame);
    }

    /// What the control thread writes next, `answers` before what others queued. Until it asks again and there is nothing, nobody else
    /// writes.
    pub(crate) fn next_control(&self, answers: &mut Vec<FrameHeader>) -> Option<Vec<u8>> {
        let mut control = lock(&self.control);
        let next = if !control.rest.is_empty() {
            // It had its place when it was begun.
            let rest = std::mem::take(&mut control.rest);
            control.bytes -= rest.len();
            Some(rest)
        } else {
            let next = match answers.is_empty() {
                true => control.frames.pop_front().inspect(|frame| control.bytes -= frame.len()),
                false => Some(self.encode_answers(control.placed, answers)),
            };
            control.placed += next.as_ref().map_or(0, |next| next.len() as u64);
            next
        };
        control.is_writing = next.is_some();
        next
    }

    /// The bytes of answers that go to a place of the lane. A ping and a pong say which it is, so that the peer finds out if bytes before
    /// them were lost.
    fn encode_answers(&self, mut place: u64, answers: &mut Vec<FrameHeader>) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(answers.len() * FrameHeader::BYTES);
        for mut header in answers.drain(..) {
            if matches!(header.kind, FrameKind::Ping | FrameKind::Pong) {
                header.write_bytes = place;
            }
            bytes.extend_from_slice(&header.encode(self.version));
            place += FrameHeader::BYTES as u64;
        }
        bytes
    }

    /// Ends a post at the receiver's word.
    pub(crate) fn verdict(&self, core: &Core, grant: u128, sequence: u32, refusal: Option<Refusal>) {
        let outcome = match refusal {
            None => Ok(()),
            Some(Refusal::Cancelled) => Err(TransportError::Cancelled),
            Some(refusal) => Err(TransportError::Refused { reason: refusal.reason().to_owned() }),
        };
        self.outbox.finish(core, GrantKey(grant), sequence, outcome);
    }

    /// Whether this refusal is the first of its write.
    pub(crate) fn is_new_refusal(&self, grant: u128, sequence: u32) -> bool {
        let mut refused = lock(&self.refused);
        if refused.contains(&(grant, sequence)) {
            return false;
        }
        if refused.len() >= MAX_REFUSED {
            refused.pop_front();
        }
        refused.push_back((grant, sequence));
        true
    }

    pub(crate) fn note_moved(&self, now: Instant) {
        let ms = now.saturating_duration_since(self.born).as_millis() as u64;
        self.moved_ms.store(ms, Ordering::Relaxed);
    }

    /// How long no data lane moved a byte.
    pub(crate) fn idle_for(&self, now: Instant) -> Duration {
        let moved = self.born + Duration::from_millis(self.moved_ms.load(Ordering::Relaxed));
        now.saturating_duration_since(moved)
    }

    /// Whether the peer's write is held here in place; if it was not asked back before, it is now.
    pub(crate) fn recall_held(&self, grant: u128, sequence: u32) -> Option<bool> {
        let mut held = lock(&self.held);
        held.get_mut(&(grant, sequence)).map(|was_asked| !std::mem::replace(was_asked, true))
    }

    /// Asks the peer for writes that it holds in place.
    pub(crate) fn ask_back(&self, core: &Core, writes: &[(GrantKey, u32)]) {
        for (grant, sequence) in writes {
            Counters::add(&core.counters.recalled_writes, 1);
            let header = FrameHeader::about(FrameKind::Recall, None, grant.0, *sequence);
            // There are no more of these than posts; a session that is over has nobody to ask.
            let _ = self.queue_control(header, &[], usize::MAX);
        }
    }

    /// Ends the session: nothing of it is read from or written to memory after this, its grants are gone and its posts ended, but for those
    /// whose source the peer may read in place, which are returned.
    pub(crate) fn finish(&self, core: &Core, reason: &TransportError) -> Option<Estate> {
        {
            let mut control = lock(&self.control);
            self.is_over.store(true, Ordering::SeqCst);
            control.socket = None;
        }
        for socket in std::mem::take(&mut *lock(&self.sockets)) {
            // It fails if the peer was quicker.
            let _ = socket.shutdown(Shutdown::Both);
        }
        if let Some(verbs) = &self.rdma {
            verbs.close(self.key);
        }
        lock(&self.for_lanes).clear();
        if let Some(lane) = self.ucx.get() {
            lane.close();
        }
        core.grants.close_session(self.key);
        let posts = self.outbox.close(core, reason);
        let sharing = self.sharing.as_ref()?;
        sharing.borrower.let_go();
        // A peer that was lent something in place has its end.
        let tether = sharing.lender.take_tether()?;
        (!posts.is_empty()).then(|| Estate { peer: self.name.clone(), tether, posts })
    }
}

impl SessionInPlace for Session {
    fn tether(&self) -> Option<Arc<OwnedFd>> {
        self.sharing.as_ref()?.borrower.tether()
    }

    fn hold(&self, grant: GrantKey, sequence: u32) {
        lock(&self.held).insert((grant.0, sequence), false);
    }

    fn let_go(self: Arc<Self>) -> Arc<dyn LetGo> {
        Arc::new(Holder(Arc::downgrade(&self)))
    }
}

impl LetGo for Session {
    fn let_go(&self, grant: u128, sequence: u32) {
        if lock(&self.held).remove(&(grant, sequence)).is_none() {
            return;
        }
        let header = FrameHeader::about(FrameKind::Ack, None, grant, sequence);
        // When the session is over the tether tells it.
        if self.send_control(header, &[], usize::MAX).unwrap_or(false) {
            self.control_bell.ring();
        }
    }
}

/// Does not keep the session, nor what it has mapped.
struct Holder(Weak<Session>);

impl LetGo for Holder {
    fn let_go(&self, grant: u128, sequence: u32) {
        if let Some(session) = self.0.upgrade() {
            LetGo::let_go(&*session, grant, sequence);
        }
    }
}

impl ControlQueue {
    fn push(&mut self, frame: Vec<u8>) {
        self.bytes += frame.len();
        self.frames.push_back(frame);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
