//! Grants: who may place bytes where, until when.
//!
//! Lock order: the table, then a grant's guard, then its progress. A lane holds the guard for reading while it is inside one
//! system call that places bytes; `revoke` takes it for writing, so it waits for exactly those calls.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use bytes::Bytes;
use kvferry_protocol::PeerId;
use kvferry_protocol::pages::Extent;
use kvferry_protocol::wire::Refusal;

use super::adopting::Adopting;
use super::planted::{Bug, Planted};
use super::progress::{FrameWords, Progress};
use super::random;
use super::runs::RunList;
use super::seals::{Seals, SealsSeen};
use super::window::Window;
use crate::api::GrantKey;
use crate::device_memory::Flush;
use crate::error::TransportError;
use crate::raw::RawRun;
use crate::watch::Landing;

/// Numbers the sessions of one endpoint.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct SessionKey(pub(crate) u64);

/// One grant.
pub(crate) struct Grant {
    pub(crate) key: GrantKey,
    session: SessionKey,
    target: Target,
    life: RwLock<Life>,
    progress: Mutex<Progress>,
    pub(crate) bug: Bug,
}

/// Where a grant's bytes go.
pub(crate) enum Target {
    Pages(Window),
    /// Into memory of a device, by devices of the peer alone; `flushes` make it visible.
    Device {
        bytes: u64,
        flushes: Vec<Arc<dyn Flush>>,
    },
    /// Nowhere: they stay where they are.
    InPlace(Adopting),
}

/// Who places a frame's bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Carrier {
    /// A thread of this side.
    Processor,
    /// A device of the peer: they are in place.
    Device,
}

/// What may still be placed under a grant.
struct Life {
    alive: bool,
    seals: Seals,
    /// Let go when the grant dies.
    watch: Option<Arc<dyn Landing>>,
}

/// Proof that the grant is alive and stays so while this is held.
pub(crate) struct Placing<'a>(RwLockReadGuard<'a, Life>);

impl Placing<'_> {
    /// Who looks at what was placed.
    pub(crate) fn watch(&self) -> Option<&Arc<dyn Landing>> {
        self.0.watch.as_ref()
    }
}

impl Grant {
    pub(crate) fn window_bytes(&self) -> u64 {
        match &self.target {
            Target::Pages(window) => window.bytes(),
            Target::Device { bytes, .. } => *bytes,
            Target::InPlace(adopting) => adopting.bytes,
        }
    }

    /// What is handed over under it, if that is in place.
    pub(super) fn adopting(&self) -> Option<&Adopting> {
        match &self.target {
            Target::Pages(_) | Target::Device { .. } => None,
            Target::InPlace(adopting) => Some(adopting),
        }
    }

    /// Whether who carries a frame may place it here.
    pub(super) fn takes(&self, carrier: Carrier) -> Result<(), Refusal> {
        match (&self.target, carrier) {
            (Target::Device { .. }, Carrier::Processor) => Err(Refusal::DeviceMemory),
            _ => Ok(()),
        }
    }

    /// What makes visible what devices wrote under it.
    pub(super) fn flushes(&self) -> &[Arc<dyn Flush>] {
        match &self.target {
            Target::Device { flushes, .. } => flushes,
            Target::Pages(_) | Target::InPlace(_) => &[],
        }
    }

    /// Takes a frame, or says why not. The caller has checked its extents against the window.
    pub(crate) fn admit(&self, words: FrameWords, notification: &[u8]) -> Result<(), Refusal> {
        let _alive = self.alive()?;
        self.progress().admit(words, notification)
    }

    /// Permits to place bytes of a frame for as long as the result is held: for one system call.
    pub(crate) fn place(
        &self,
        sequence: u32,
        extents: &[Extent],
        seen: &mut SealsSeen,
    ) -> Result<Placing<'_>, Refusal> {
        let alive = self.alive()?;
        if alive.seals.meet(extents, seen) {
            return Err(Refusal::Sealed);
        }
        if !self.progress().is_open(sequence) {
            return Err(Refusal::Cancelled);
        }
        Ok(Placing(alive))
    }

    /// A frame's payload is in place; `complete` is called with the notification if it was the write's last, before a revoke
    /// that begins meanwhile returns.
    pub(crate) fn land(&self, words: FrameWords, complete: impl FnOnce(Bytes)) -> Result<bool, Refusal> {
        let _alive = self.alive()?;
        let notification = self.progress().land(words)?;
        let is_complete = notification.is_some();
        if let Some(notification) = notification {
            complete(notification);
        }
        Ok(is_complete)
    }

    pub(crate) fn refuse(&self, sequence: u32) {
        self.progress().refuse(sequence);
        self.forget_adopted(sequence);
    }

    fn forget_adopted(&self, sequence: u32) {
        if let Target::InPlace(adopting) = &self.target {
            drop(adopting.take(sequence));
        }
    }

    /// Ends a write at the sender's wish: after this none of its bytes is placed. Returns whether it was complete before.
    pub(crate) fn cancel(&self, sequence: u32) -> bool {
        if self.bug.is(Planted::CancelUnheard) {
            return false;
        }
        let complete = self.progress().cancel(sequence);
        // Waits for a lane that looked before and is still placing.
        drop(self.change());
        self.forget_adopted(sequence);
        complete
    }

    /// Appends the memory of the extents' bytes from `done` on, at most `max_runs` runs. Returns how many bytes.
    pub(crate) fn append_runs(&self, extents: &RunList, done: u64, max_runs: usize, out: &mut Vec<RawRun>) -> u64 {
        let Target::Pages(window) = &self.target else { return 0 };
        let mut appended = 0;
        extents.walk(done, extents.bytes(), |_, offset, bytes| {
            let got = window.append_runs(offset, offset + bytes, max_runs, out);
            appended += got;
            if got == bytes && out.len() < max_runs {
                std::ops::ControlFlow::Continue(())
            } else {
                std::ops::ControlFlow::Break(())
            }
        });
        appended
    }

    /// Waits for the lanes that are placing; none places after it.
    fn die(&self) {
        let mut life = self.change();
        life.alive = false;
        let watch = life.watch.take();
        drop(life);
        drop(watch); // outside the lock: it may have a drop of its own
    }

    fn alive(&self) -> Result<RwLockReadGuard<'_, Life>, Refusal> {
        let life = self.life.read().unwrap_or_else(PoisonError::into_inner);
        if life.alive { Ok(life) } else { Err(Refusal::UnknownGrant) }
    }

    /// Waits for the lanes that are placing.
    fn change(&self) -> RwLockWriteGuard<'_, Life> {
        self.life.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn progress(&self) -> std::sync::MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// All live grants of an endpoint, by key and by session.
pub(crate) struct GrantTable {
    state: RwLock<State>,
    bug: Bug,
}

struct State {
    max_grants: usize,
    grants: HashMap<GrantKey, Arc<Grant>>,
    sessions: HashMap<SessionKey, HashSet<GrantKey>>,
}

impl GrantTable {
    pub(crate) fn new(max_grants: usize, bug: Bug) -> Self {
        let (grants, sessions) = Default::default();
        Self { state: RwLock::new(State { max_grants, grants, sessions }), bug }
    }

    pub(crate) fn open_session(&self, session: SessionKey) {
        self.write().sessions.insert(session, HashSet::new());
    }

    /// Revokes all that was granted to a session; nothing more can be.
    pub(crate) fn close_session(&self, session: SessionKey) {
        let keys = self.write().sessions.remove(&session).unwrap_or_default();
        for key in keys {
            match self.bug.is(Planted::CutKeepsGrants) {
                true => self.forget(key, session),
                false => self.revoke(key),
            }
        }
    }

    pub(crate) fn add(
        &self,
        peer: &PeerId,
        session: SessionKey,
        target: Target,
        watch: Option<Arc<dyn Landing>>,
    ) -> Result<GrantKey, TransportError> {
        let key = GrantKey(u128::from_le_bytes(random())).marked(matches!(target, Target::InPlace(_)));
        let life = RwLock::new(Life { alive: true, seals: Seals::default(), watch });
        let progress = Mutex::new(Progress::new(self.bug));
        let grant = Grant { key, session, target, life, progress, bug: self.bug };
        let mut state = self.write();
        if state.grants.len() >= state.max_grants {
            let (found, limit) = (state.grants.len() as u64 + 1, state.max_grants as u64);
            return Err(TransportError::Limit { what: "live grants", found, limit });
        }
        let of_session = state.sessions.get_mut(&session);
        let of_session = of_session.ok_or_else(|| TransportError::NotConnected { peer: peer.to_string() })?;
        of_session.insert(key);
        state.grants.insert(key, Arc::new(grant));
        Ok(key)
    }

    /// The grant, if it is live and was given to this session.
    pub(crate) fn find(&self, key: u128, session: SessionKey) -> Option<Arc<Grant>> {
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        let is_theirs = |grant: &&Arc<Grant>| grant.session == session || self.bug.is(Planted::SessionUnchecked);
        state.grants.get(&GrantKey(key)).filter(is_theirs).cloned()
    }

    /// After this returns nothing is placed under the grant.
    ///
    /// The grant stays in the table until it is dead, so that a second caller waits as long as the first.
    pub(crate) fn revoke(&self, key: GrantKey) {
        let Some(grant) = self.get(key) else { return };
        if self.bug.is(Planted::RevokeNotWaited) {
            let grant = Arc::clone(&grant);
            std::thread::spawn(move || grant.die());
        } else if !self.bug.is(Planted::RevokeSkipped) {
            grant.die();
        }
        self.forget(key, grant.session);
    }

    fn forget(&self, key: GrantKey, session: SessionKey) {
        let mut state = self.write();
        state.grants.remove(&key);
        if let Some(of_session) = state.sessions.get_mut(&session) {
            of_session.remove(&key);
        }
        if self.bug.is(Planted::GrantCreditLost) {
            state.max_grants = state.max_grants.saturating_sub(1);
        }
    }

    /// After this returns nothing is placed into these parts of the grant's window.
    pub(crate) fn seal(&self, key: GrantKey, extents: &[Extent]) {
        let Some(grant) = self.get(key) else { return };
        if self.bug.is(Planted::SealNotWaited) {
            let extents = extents.to_vec();
            std::thread::spawn(move || grant.change().seals.add(&extents));
        } else if !self.bug.is(Planted::SealSkipped) {
            grant.change().seals.add(extents);
        }
    }

    fn get(&self, key: GrantKey) -> Option<Arc<Grant>> {
        self.state.read().unwrap_or_else(PoisonError::into_inner).grants.get(&key).cloned()
    }

    pub(crate) fn live(&self) -> u64 {
        self.state.read().unwrap_or_else(PoisonError::into_inner).grants.len() as u64
    }

    fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }
}
