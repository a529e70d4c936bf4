//! The endpoint that callers hold.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use kvferry_protocol::pages::{Extent, Pages};
use kvferry_protocol::wire::{FrameHeader, FrameKind, MAX_GREETING_BYTES, MAX_MESSAGE_BYTES, MAX_NOTIFICATION_BYTES};
use kvferry_protocol::{PeerId, RegionId};

use super::accept::Listeners;
use super::beside::{refuse_plain, start_ucx, start_verbs};
use super::calls::Calls;
use super::config::TcpConfig;
use super::data::DataThread;
use super::driver;
use super::path::Local;
use super::poller::Poller;
use super::session::Session;
use super::socket;
use super::ucx::Ucx;
use super::verbs::Verbs;
use crate::api::{
    Capabilities, Event, GrantKey, Memory, MemoryKind, PeerAddress, PostError, PostId, Transport, TransportStats, Write,
};
use crate::core::{Bug, Core, Counters, Post, Recall, SessionKey};
use crate::credentials::Credentials;
use crate::error::TransportError;
use crate::share::Lender;
use crate::watch::{Landing, Leaving};

/// The most extents of one post.
const MAX_EXTENTS: usize = 1 << 16;
/// Runs shorter than this are packed first. An estimate: no bench has compared the two ways yet.
const DIRECT_RUN_BYTES: u64 = 4 << 10;
/// The same where the receiver copies out of our memory: packing would be a second copy. An estimate, too.
const DIRECT_LENT_RUN_BYTES: u64 = 256;
/// The same where the sender's device gathers: what is packed is not registered, and goes over TCP lanes. An estimate as well.
const DIRECT_DEVICE_RUN_BYTES: u64 = 256;

/// A TCP endpoint. Dropping it shuts it down.
pub struct Tcp {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// What callers, the control thread and the data threads share.
pub(crate) struct Shared {
    pub(crate) core: Core,
    pub(crate) config: TcpConfig,
    credentials: Mutex<Credentials>,
    pub(crate) peer: PeerId,
    pub(crate) greeting: Bytes,
    pub(crate) address: SocketAddr,
    pub(crate) local: Local,
    /// RDMA devices, where they are allowed and there are some.
    pub(crate) verbs: Option<Arc<Verbs>>,
    pub(crate) ucx: Option<Ucx>,
    pub(crate) state: Mutex<State>,
    /// Calls the control thread, by the numbers of sessions.
    pub(crate) waker: Arc<Calls>,
    pub(crate) data: Vec<DataThread>,
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) sessions: HashMap<PeerId, Arc<Session>>,
    /// Addresses that callers want reached.
    pub(crate) wanted: Vec<SocketAddr>,
    pub(crate) commands: VecDeque<Command>,
    pub(crate) is_stopping: bool,
}

/// What the control thread is told.
pub(crate) enum Command {
    Connect(SocketAddr),
    Forget(SocketAddr),
    Disconnect {
        peer: PeerId,
        reason: String,
    },
    Broken {
        session: SessionKey,
        reason: TransportError,
    },
    /// Nothing can carry the rest of a post; the receiver is to be asked about it.
    GiveUp {
        session: SessionKey,
        grant: GrantKey,
        sequence: u32,
        reason: TransportError,
    },
    /// Whether a session's RDMA path may be used, or why not.
    Proved {
        session: SessionKey,
        outcome: Result<(), String>,
    },
    /// Whether a session's link over UCX is ready, or why there is none.
    Linked {
        session: SessionKey,
        outcome: Result<(), String>,
    },
}

impl Tcp {
    /// Listens, as `peer`; `greeting` is told to every peer that proves itself. `credentials` are the cluster's.
    ///
    /// # Errors
    /// [`TransportError::Io`] if the address cannot be listened on; [`TransportError::Limit`] if the greeting is too long;
    /// [`TransportError::Plain`] if lanes are encrypted and a path is named that is not.
    pub fn bind(
        config: TcpConfig,
        credentials: impl Into<Credentials>,
        peer: PeerId,
        greeting: Bytes,
    ) -> Result<Self, TransportError> {
        Self::bind_with(config, credentials.into(), peer, greeting, Bug::default())
    }

    /// The same with a bug, so that a test can prove that it is seen.
    ///
    /// # Errors
    /// As [`Tcp::bind`].
    #[cfg(feature = "planted")]
    pub fn bind_planted(
        config: TcpConfig,
        key: kvferry_protocol::wire::ClusterKey,
        peer: PeerId,
        greeting: Bytes,
        bug: crate::Planted,
    ) -> Result<Self, TransportError> {
        Self::bind_with(config, key.into(), peer, greeting, Bug::plant(bug))
    }

    fn bind_with(
        config: TcpConfig,
        credentials: Credentials,
        peer: PeerId,
        greeting: Bytes,
        bug: Bug,
    ) -> Result<Self, TransportError> {
        refuse_plain(&config, &credentials)?;
        limit("bytes of a greeting", greeting.len(), MAX_GREETING_BYTES)?;
        let broken = |operation| {
            let peer = config.listen.to_string();
            move |source| TransportError::Io { peer, operation, source: Arc::new(source) }
        };
        let listener = socket::listen(config.listen).map_err(broken("listen"))?;
        let bound = listener.local_addr().map_err(broken("listen"))?;
        let address = match config.advertise {
            Some(advertised) if advertised.port() == 0 => SocketAddr::new(advertised.ip(), bound.port()),
            Some(advertised) => advertised,
            None => bound,
        };
        let mut rails = Vec::new();
        for &rail in &config.rails {
            let refused = |source| {
                let (peer, operation) = (rail.to_string(), "listen on a rail");
                TransportError::Io { peer, operation, source: Arc::new(source) }
            };
            let listener = socket::listen(rail).map_err(refused)?;
            rails.push((listener.local_addr().map_err(refused)?, listener));
        }
        let verbs = start_verbs(&config);
        let ucx = start_ucx(&config);
        let local = Local::new(
            &config.paths,
            verbs.as_ref().map(|_| ()).map_err(Clone::clone),
            ucx.as_ref().map(|_| ()).map_err(Clone::clone),
        )
        .with_rails(rails.iter().map(|(address, _)| *address).collect())
        .with_in_place(config.in_place);
        let unix = local
            .rendezvous
            .as_deref()
            .map(socket::listen_unix)
            .transpose()
            .map_err(broken("listen for Unix lanes"))?;
        let data = (0..config.data_threads).map(|_| DataThread::new()).collect::<Result<Vec<_>, _>>();
        let waker = Calls::new().map_err(broken("make an eventfd"))?;
        let poller = Poller::new(waker.waker()).map_err(broken("make an epoll descriptor"))?;
        let shared = Arc::new(Shared {
            core: Core::new(config.max_grants, config.max_events, bug),
            data: data.map_err(broken("make an epoll descriptor"))?,
            waker,
            credentials: Mutex::new(credentials),
            peer,
            greeting,
            address,
            local,
            verbs: verbs.ok(),
            ucx: ucx.ok(),
            state: Mutex::default(),
            config: config.clone(),
        });
        if let Some(ucx) = &shared.ucx {
            ucx.belongs_to(&shared);
        }
        let tcp = Self { shared, threads: Mutex::default() };
        tcp.start(Listeners { tcp: listener, rails, unix }, poller).map_err(broken("start a thread"))?;
        Ok(tcp)
    }

    fn start(&self, listeners: Listeners, poller: Poller) -> std::io::Result<()> {
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        for index in 0..self.shared.data.len() {
            let shared = Arc::clone(&self.shared);
            let thread = std::thread::Builder::new().name(format!("tcp-data-{index}"));
            threads.push(thread.spawn(move || shared.data[index].run(&shared))?);
        }
        if let Some(verbs) = self.shared.verbs.clone() {
            let shared = Arc::clone(&self.shared);
            let thread = std::thread::Builder::new().name("rdma".to_owned());
            threads.push(thread.spawn(move || verbs.run(&shared))?);
        }
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new().name("tcp-control".to_owned());
        threads.push(thread.spawn(move || driver::run(&shared, listeners, poller))?);
        Ok(())
    }
}

impl Shared {
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why memory of another device is not taken, if it is not; whether the cards register it is seen when they do.
    fn why_no_device_memory(&self, memory: &Memory) -> Option<String> {
        let lanes = "it is a device's, and processors serve the other ways (tcp, uds, shm, cma, ucx)";
        match &self.verbs {
            None => {
                Some(format!("{lanes}: name rdma among the paths, on a host with a card, or stage it in host memory"))
            }
            Some(verbs) if !cfg!(feature = "device-memory") => {
                let cards = verbs.device_memory();
                Some(format!(
                    "{lanes}; this is a build without the feature `device-memory`, and the cards could: {cards}"
                ))
            }
            Some(_) if memory.file.is_some() => Some("it is a device's, of which no process maps a file".to_owned()),
            Some(_) => None,
        }
    }

    pub(crate) fn credentials(&self) -> Credentials {
        self.credentials.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn command(&self, command: Command) {
        self.lock().commands.push_back(command);
        self.waker.wake();
    }

    /// Makes a session known.
    pub(crate) fn begin(&self, session: &Arc<Session>) {
        let insert = || drop(self.lock().sessions.insert(session.peer.clone(), Arc::clone(session)));
        match session.verbs() {
            Some(verbs) => verbs.begin(session, insert),
            None => insert(),
        }
    }

    fn session(&self, peer: &PeerId) -> Result<Arc<Session>, TransportError> {
        let session = self.lock().sessions.get(peer).cloned();
        session.ok_or_else(|| TransportError::NotConnected { peer: peer.to_string() })
    }

    /// Calls the data threads to all lanes: there is something to tell every peer.
    fn ring_all_lanes(&self) {
        self.data.iter().for_each(|thread| thread.calls.ring_all());
        self.wake_verbs();
    }

    /// Somebody polled: what waited for room goes on.
    fn tell_room(&self) {
        self.data.iter().for_each(|thread| thread.calls.tell_room());
        self.waker.tell_room();
        self.wake_verbs();
    }

    pub(crate) fn wake_verbs(&self) {
        if let Some(verbs) = &self.verbs {
            verbs.wake();
        }
    }

    fn grant(&self, peer: &PeerId, pages: Pages, watch: Option<Arc<dyn Landing>>) -> Result<GrantKey, TransportError> {
        let session = self.session(peer)?;
        let mut is_of_device = false;
        let by_devices = || {
            is_of_device = true;
            session.reaches_device_memory("a granted page")
        };
        let grant = self.core.grant(peer, session.key, &pages, watch, by_devices)?;
        if let Some(verbs) = session.verbs() {
            let told_bytes = verbs.tell_window(&session, grant, pages);
            if is_of_device && told_bytes > MAX_MESSAGE_BYTES {
                // Lanes carry what is not told, but not this.
                self.core.grants.revoke(grant);
                let (found, limit) = (told_bytes as u64, MAX_MESSAGE_BYTES as u64);
                return Err(TransportError::Limit { what: "bytes of a window of a device's memory", found, limit });
            }
            self.waker.wake();
        }
        Ok(grant)
    }

    fn grant_in_place(&self, peer: &PeerId, bytes: u64) -> Result<GrantKey, TransportError> {
        let session = self.session(peer)?;
        if !session.is_in_place {
            let reason = format!(
                "no memory of {peer} is read in place: the session does not share memory files, or the peer cannot do it"
            );
            return Err(TransportError::Refused { reason });
        }
        // Its peer could not fulfil it, and would say so only when all is computed.
        if let Some(problem) = session.sharing.as_ref().and_then(|sharing| sharing.borrower.problem()) {
            return Err(TransportError::Refused { reason: format!("memory of {peer} cannot be read here: {problem}") });
        }
        self.core.grant_in_place(peer, session.key, bytes)
    }

    fn recall(&self, peer: &PeerId, post: PostId) {
        let Ok(session) = self.session(peer) else { return };
        session.ask_back(&self.core, &session.outbox.recall(Recall::Post(post)));
        self.waker.wake();
    }

    /// Queues a post; what may be held in place counts against the limit until its end.
    fn add(&self, session: &Session, post: Post) -> Result<(), TransportError> {
        let held = &self.core.counters.held_bytes;
        let (bytes, limit) = (post.bytes, self.config.max_held_bytes);
        if !post.is_in_place {
            return session.outbox.add(&self.core, &session.name, post);
        }
        Counters::reserve(held, bytes, limit).map_err(|found| TransportError::Limit {
            what: TransportError::HELD_BYTES,
            found,
            limit,
        })?;
        if let Some(Err(source)) = session.lender().map(Lender::want_tether) {
            Counters::give_back(held, bytes);
            let (peer, operation) = (session.name.clone(), "make a pipe for what it holds in place");
            return Err(TransportError::Io { peer, operation, source: Arc::new(source) });
        }
        session.outbox.add(&self.core, &session.name, post).inspect_err(|_| Counters::give_back(held, bytes))
    }

    fn try_post(
        &self,
        peer: &PeerId,
        write: &Write,
        watch: Option<Arc<dyn Leaving>>,
    ) -> Result<PostId, TransportError> {
        let session = self.session(peer)?;
        // A frame that a device sends is not looked at, and a link over UCX looks at it under its lock.
        if watch.is_some() && session.verbs().is_some() {
            return Err(TransportError::Refused { reason: format!("payload to {peer} is not watched here") });
        }
        if self.core.events.is_full() {
            let limit = self.core.events.limit() as u64;
            return Err(TransportError::Limit { what: "events that nobody polls", found: limit, limit });
        }
        let id = self.core.next_post();
        let post = Post::new(id, write, &self.core.regions, MAX_EXTENTS, MAX_NOTIFICATION_BYTES)?;
        if post.is_of_device {
            session.reaches_device_memory("the source")?;
        }
        let mut post = post.watched(watch);
        post.is_in_place = session.is_in_place && write.grant.is_in_place();
        self.add(&session, post)?;
        match session.ucx.get().filter(|lane| lane.carries()) {
            Some(lane) => {
                if let Err(reason) = lane.pump(&self.core) {
                    self.command(Command::Broken { session: session.key, reason });
                }
            }
            None => {
                session.ring_lanes();
                self.wake_verbs();
            }
        }
        Ok(id)
    }
}

impl Transport for Tcp {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            max_message_bytes: MAX_MESSAGE_BYTES,
            max_notification_bytes: MAX_NOTIFICATION_BYTES,
            max_extents: MAX_EXTENTS,
        }
    }

    fn local_address(&self) -> PeerAddress {
        PeerAddress::Tcp(self.shared.address)
    }

    #[expect(unsafe_code, reason = "the caller vouches for raw memory")]
    unsafe fn register(&self, memory: Memory) -> Result<RegionId, TransportError> {
        let is_of_device = matches!(memory.kind, MemoryKind::Device(_));
        if let Some(problem) = is_of_device.then(|| self.shared.why_no_device_memory(&memory)).flatten() {
            return Err(TransportError::Memory { bytes: memory.bytes, problem });
        }
        // A receiver copies out of slots, and a put out of a device's memory would fall back to lanes with the link.
        if let Some(ucx) = self.shared.ucx.as_ref().filter(|_| !is_of_device) {
            #[expect(unsafe_code, reason = "the caller vouches for raw memory")]
            // SAFETY: the caller's promise, which is the same; UCX is shut down with this transport.
            let registered = unsafe { ucx.node.register(memory.clone()) };
            if let Err(error) = registered {
                tracing::warn!(%error, "UCX has to register this memory whenever it sends from it");
            }
        }
        let region = match &self.shared.verbs {
            Some(verbs) => verbs.register(&self.shared, memory)?,
            None => self.shared.core.register(memory)?,
        };
        self.shared.ring_all_lanes(); // peers on this host are told
        Ok(region)
    }

    fn connect(&self, address: &PeerAddress) -> Result<(), TransportError> {
        let PeerAddress::Tcp(address) = *address else {
            let problem = "this endpoint speaks TCP only; give an IP address and a port".to_owned();
            return Err(TransportError::Protocol { peer: format!("{address:?}"), problem });
        };
        let mut state = self.shared.lock();
        if state.is_stopping || state.wanted.contains(&address) {
            return Ok(());
        }
        limit("addresses to reach", state.wanted.len() + 1, self.shared.config.max_peers)?;
        state.wanted.push(address);
        state.commands.push_back(Command::Connect(address));
        drop(state);
        self.shared.waker.wake();
        Ok(())
    }

    fn forget(&self, address: &PeerAddress) {
        let PeerAddress::Tcp(address) = *address else { return };
        let mut state = self.shared.lock();
        state.wanted.retain(|wanted| *wanted != address);
        state.commands.push_back(Command::Forget(address));
        drop(state);
        self.shared.waker.wake();
    }

    fn disconnect(&self, peer: &PeerId, reason: &str) {
        self.shared.command(Command::Disconnect { peer: peer.clone(), reason: reason.to_owned() });
    }

    fn send(&self, peer: &PeerId, message: Bytes) -> Result<(), TransportError> {
        limit("bytes of a message", message.len(), MAX_MESSAGE_BYTES)?;
        let session = self.shared.session(peer)?;
        let header = FrameHeader::with_body(FrameKind::Message, &message);
        if session.send_control(header, &message, self.shared.config.max_queued_message_bytes)? {
            self.shared.waker.wake();
        }
        Ok(())
    }

    fn grant(&self, peer: &PeerId, pages: Pages) -> Result<GrantKey, TransportError> {
        self.shared.grant(peer, pages, None)
    }

    fn grant_watched(&self, peer: &PeerId, pages: Pages, watch: Arc<dyn Landing>) -> Result<GrantKey, TransportError> {
        self.shared.grant(peer, pages, Some(watch))
    }

    fn reaches_device_memory(&self, peer: &PeerId) -> Result<(), TransportError> {
        self.shared.session(peer)?.reaches_device_memory("the payload")
    }

    fn grant_in_place(&self, peer: &PeerId, bytes: u64) -> Result<GrantKey, TransportError> {
        self.shared.grant_in_place(peer, bytes)
    }

    fn recall(&self, peer: &PeerId, post: PostId) {
        self.shared.recall(peer, post);
    }

    fn revoke(&self, grant: GrantKey) {
        if let Some(verbs) = &self.shared.verbs {
            verbs.fence(grant, None);
        }
        self.shared.core.grants.revoke(grant);
    }

    fn seal(&self, grant: GrantKey, extents: &[Extent]) {
        if let Some(verbs) = &self.shared.verbs {
            verbs.fence(grant, Some(extents.to_vec()));
        }
        self.shared.core.grants.seal(grant, extents);
    }

    fn post(&self, peer: &PeerId, write: Write) -> Result<PostId, Box<PostError>> {
        self.shared.try_post(peer, &write, None).map_err(|reason| Box::new(PostError { write, reason }))
    }

    fn is_in_place(&self, peer: &PeerId, grant: GrantKey) -> bool {
        self.shared.session(peer).is_ok_and(|session| session.is_in_place && grant.is_in_place())
    }

    fn watches(&self, peer: &PeerId) -> bool {
        self.shared.session(peer).is_ok_and(|session| session.is_by_lanes())
    }

    fn post_watched(&self, peer: &PeerId, write: Write, watch: Arc<dyn Leaving>) -> Result<PostId, Box<PostError>> {
        self.shared.try_post(peer, &write, Some(watch)).map_err(|reason| Box::new(PostError { write, reason }))
    }

    fn cancel(&self, peer: &PeerId, grant: GrantKey) {
        let Ok(session) = self.shared.session(peer) else { return };
        if let Some(lane) = session.ucx.get() {
            lane.cancel(grant);
        }
        for sequence in session.outbox.cancel(&self.shared.core, grant) {
            let header = FrameHeader::about(FrameKind::Cancel, None, grant.0, sequence);
            // There are no more of these than posts. A session that is over has ended its posts.
            let _ = session.queue_control(header, &[], usize::MAX);
        }
        self.shared.waker.wake();
    }

    fn direct_run_bytes(&self, peer: &PeerId) -> u64 {
        match self.shared.session(peer) {
            Ok(session) if session.sharing.is_some() => DIRECT_LENT_RUN_BYTES,
            Ok(session) if session.verbs().is_some() => DIRECT_DEVICE_RUN_BYTES,
            _ => DIRECT_RUN_BYTES,
        }
    }

    fn interrupt(&self) {
        self.shared.core.events.interrupt();
    }

    fn poll(&self, events: &mut Vec<Event>, timeout: Duration) {
        if self.shared.core.events.poll(events, timeout) {
            if let Some(ucx) = &self.shared.ucx {
                ucx.node.wake();
            }
            self.shared.tell_room();
        }
    }

    fn set_credentials(&self, credentials: Credentials) {
        let mut known = self.shared.credentials.lock().unwrap_or_else(PoisonError::into_inner);
        if known.is_tls() != credentials.is_tls() {
            tracing::warn!("whether lanes are encrypted cannot change while a node runs; the old credentials stay");
            return;
        }
        *known = credentials;
    }

    fn stats(&self) -> TransportStats {
        self.shared.core.stats()
    }

    fn shutdown(&self) {
        self.shared.lock().is_stopping = true;
        self.shared.waker.wake();
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        // The control thread is the last one; it ends the sessions, and then the data threads have nothing left.
        while let Some(thread) = threads.pop() {
            // One that panicked has said so; there is nothing left to wait for.
            let _ = thread.join();
            for data in &self.shared.data {
                data.stop();
            }
            self.shared.verbs.iter().for_each(|verbs| verbs.stop());
        }
        if let Some(ucx) = &self.shared.ucx {
            ucx.node.shutdown();
        }
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        self.shutdown();
    }
}

fn limit(what: &'static str, found: usize, limit: usize) -> Result<(), TransportError> {
    let (found, limit) = (found as u64, limit as u64);
    if found <= limit { Ok(()) } else { Err(TransportError::Limit { what, found, limit }) }
}
