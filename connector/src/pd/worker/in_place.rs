//! What this worker reads in place: which request reads whose memory, and how that ends.
//!
//! The driver enters what it verified, and says when it is to end; the model thread ends it, between two uses of the pages, since only it knows
//! that nobody reads them then. So pages change hands on one thread, and a step never meets a page whose owner goes.
//!
//! A request's reading is *open* while its load goes on, and *over* then. What is over ends by the engine's word (the request has no blocks
//! any more), by the owner's or the session's (it is copied first), or by the look at the end of each step, which finds an owner that gave up.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvferry_kernels::{AliasOwner, HostKvCache, Settle};
use kvferry_protocol::{BlockId, PeerId};
use kvferry_transport::{Adopted, GrantKey};

use super::PdWorker;
use crate::contract::{LoadFailure, RequestId};

/// All requests that read in place.
#[derive(Debug, Default)]
pub(super) struct InPlace {
    readings: Mutex<BTreeMap<RequestId, Reading>>,
}

#[derive(Debug)]
struct Reading {
    is_open: bool,
    writes: Vec<Lent>,
    /// It is to end, and how.
    wish: Option<Settle>,
    /// The engine was told that what is read is not what it was.
    is_told: bool,
}

/// One write of a peer's that is read where it lies.
#[derive(Debug)]
pub(super) struct Lent {
    pub(super) peer: PeerId,
    pub(super) grant: GrantKey,
    pub(super) sequence: u32,
    pub(super) adopted: Arc<Adopted>,
    /// The blocks that are aliased to it, in some layers.
    pub(super) blocks: Vec<BlockId>,
}

impl Lent {
    /// What keeps its memory.
    pub(super) fn owner(&self) -> AliasOwner {
        Arc::clone(&self.adopted) as AliasOwner
    }
}

/// What came of the readings that were to end.
#[derive(Debug, Default)]
pub(super) struct Settled {
    /// What was read is not what it was.
    pub(super) withdrawn: Vec<LoadFailure>,
    /// Pages that were copied.
    pub(super) copied_pages: usize,
}

impl InPlace {
    /// A request reads a write in place; its load goes on. It may be that it is to end already.
    pub(super) fn enter(&self, request: &RequestId, lent: Lent, wish: Option<Settle>) {
        let mut readings = self.lock();
        let reading = readings.entry(request.clone()).or_insert(Reading {
            is_open: true,
            writes: vec![],
            wish: None,
            is_told: false,
        });
        reading.writes.push(lent);
        reading.wish = reading.wish.or(wish);
    }

    /// A request's load is over. Returns whether it reads in place; if the load failed that ends, and nothing of it is good.
    pub(super) fn load_over(&self, request: &RequestId, failed: bool) -> bool {
        let mut readings = self.lock();
        let Some(reading) = readings.get_mut(request) else { return false };
        reading.is_open = false;
        if failed {
            reading.wish = Some(Settle::Forget);
        }
        true
    }

    /// What is read of a peer's, or one write of it, is to be copied and let go. Returns whether there is such.
    pub(super) fn ask_back(&self, peer: &PeerId, write: Option<(GrantKey, u32)>) -> bool {
        let mut found = false;
        let is_meant =
            |lent: &Lent| lent.peer == *peer && write.is_none_or(|write| write == (lent.grant, lent.sequence));
        for reading in self.lock().values_mut().filter(|reading| reading.writes.iter().any(is_meant)) {
            reading.wish.get_or_insert(Settle::Copy);
            found = true;
        }
        found
    }

    /// Ends what is to end. By the model thread, while it reads no page.
    pub(super) fn settle(&self, cache: &HostKvCache) -> Settled {
        let mut settled = Settled::default();
        for (request, mut reading) in self.take(|_, reading| !reading.is_open && reading.wish.is_some()) {
            let how = *reading.wish.get_or_insert(Settle::Copy);
            match end(cache, &request, &mut reading, how) {
                Some(pages) if how == Settle::Copy => {
                    settled.copied_pages += pages;
                    // After the copy: what it brought is what was verified.
                    settled.withdrawn.extend(reading.told_now().then(|| withdrawn(&request)));
                }
                Some(_) => {}
                None => drop(self.lock().insert(request, reading)),
            }
        }
        settled
    }

    /// The requests have no blocks any more. By the model thread, while it reads no page.
    pub(super) fn finished(&self, cache: &HostKvCache, requests: &[RequestId]) {
        if !requests.is_empty() {
            self.forget(cache, self.take(|request, _| requests.contains(request)));
        }
    }

    /// Ends all. By the model thread, which reads no page any more.
    pub(super) fn end_all(&self, cache: &HostKvCache) {
        self.forget(cache, self.take(|_, _| true));
    }

    /// Looks whether all that was read up to now is what it was; what is not ends, with its load if that goes on. By the model thread, after a step.
    pub(super) fn look(&self, cache: &HostKvCache) -> Vec<LoadFailure> {
        let told = |(request, reading): (&RequestId, &mut Reading)| reading.told_now().then(|| withdrawn(request));
        let failures = self.lock().iter_mut().filter_map(told).collect();
        self.forget(cache, self.take(|_, reading| !reading.is_open && reading.is_told));
        failures
    }

    /// Takes readings out. They end outside the lock: that copies pages, and tells owners.
    fn take(&self, is_meant: impl Fn(&RequestId, &Reading) -> bool) -> Vec<(RequestId, Reading)> {
        let mut readings = self.lock();
        let meant: Vec<_> = readings.iter().filter(|(request, reading)| is_meant(request, reading)).collect();
        let meant: Vec<_> = meant.into_iter().map(|(request, _)| request.clone()).collect();
        meant.into_iter().filter_map(|request| readings.remove_entry(&request)).collect()
    }

    fn forget(&self, cache: &HostKvCache, readings: Vec<(RequestId, Reading)>) {
        for (request, mut reading) in readings {
            if end(cache, &request, &mut reading, Settle::Forget).is_none() {
                (reading.is_open, reading.wish) = (false, Some(Settle::Forget));
                self.lock().insert(request, reading);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<RequestId, Reading>> {
        self.readings.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reading {
    fn is_intact(&self) -> bool {
        self.writes.iter().all(|lent| lent.adopted.is_intact())
    }

    /// Whether what was read is not what it was, and that is news.
    fn told_now(&mut self) -> bool {
        !self.is_told && {
            self.is_told = !self.is_intact();
            self.is_told
        }
    }
}

impl PdWorker {
    /// Ends what is not to be read in place any more, and looks whether what was read is what it was. Between uses of the pages.
    pub(super) fn settle_in_place(&mut self, finished: &[RequestId]) {
        let Some(cache) = &self.aliasing else { return };
        let in_place = &self.board.in_place;
        in_place.finished(cache, finished);
        let Settled { withdrawn, copied_pages } = in_place.settle(cache);
        self.board.metrics.in_place_copied_pages_total.add(copied_pages as u64);
        let before = self.withdrawn.len();
        self.withdrawn.extend(withdrawn);
        self.withdrawn.extend(in_place.look(cache));
        self.board.metrics.withdrawn_requests_total.add((self.withdrawn.len() - before) as u64);
    }
}

/// Has a request's blocks read from the cache's own memory again; `None` if somebody is in the way, and it is to be tried again.
fn end(cache: &HostKvCache, request: &RequestId, reading: &mut Reading, how: Settle) -> Option<usize> {
    let mut blocks: Vec<_> = reading.writes.iter().flat_map(|lent| &lent.blocks).copied().collect();
    blocks.sort_unstable();
    blocks.dedup();
    match cache.settle(&blocks, how) {
        Ok(pages) => {
            tracing::debug!(%request, pages, ?how, "what was read in place is let go");
            Some(pages)
        }
        Err(error) => {
            tracing::warn!(%request, %error, "what is read in place cannot be let go yet");
            // Blocks that are done may be another's by the next time.
            let layers = cache.layout().shape().layers;
            let is_left = |block: &BlockId| (0..layers).any(|layer| cache.is_aliased(layer, *block));
            reading.writes.iter_mut().for_each(|lent| lent.blocks.retain(is_left));
            None
        }
    }
}

fn withdrawn(request: &RequestId) -> LoadFailure {
    LoadFailure {
        request: request.clone(),
        good_tokens: 0,
        good_blocks: Vec::new(),
        reason: "the prefill engine gave up its memory while it was read in place".to_owned(),
    }
}
