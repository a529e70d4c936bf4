//! The posts of one session: what lanes pull from, and what waits for the receiver's word.
//!
//! Each post is *queued* (no frame pulled), *sending*, *sent* (waits for the word), or *cancelling* (waits for the word, and its
//! source is already let go), until it *ended* and is forgotten. Ends are reported under the outbox's lock, so that when
//! [`Outbox::close`] returns all of them were, but for what the peer may still read in place: that is *kept*, and its source is held.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Instant;

use kvferry_protocol::wire::MAX_PAYLOAD_BYTES;

use super::Core;
use super::counters::Counters;
use super::cut::FrameCut;
use super::planted::Planted;
use super::post::Post;
use crate::api::{Event, GrantKey, PostId};
use crate::error::TransportError;
use crate::share::Lender;

/// The least payload bytes of a frame that is cut short for its watch. A short post is cut in two, so that one half is looked at while
/// the other is sent; in a long one more frames only wake more threads.
const MIN_WATCHED_BYTES: u64 = 256 << 10;

/// Why no lane carries what lies in a device's memory.
pub(crate) fn not_by_processors(what: &'static str) -> TransportError {
    let problem = "processors carry this session's payload; stage it in host memory".to_owned();
    TransportError::DeviceMemory { what, problem }
}

/// Why a write cannot be handed over in place.
const NOT_LENT: &str = "its memory is not such that the peer has it mapped: allocate it as a memory file, and see the log for what the peer said";

pub(crate) struct Outbox {
    state: Mutex<State>,
}

struct State {
    is_open: bool,
    max_posts: usize,
    queue: VecDeque<Queued>,
    /// Watched posts of which a frame is being cut, and whether somebody found nothing else to send meanwhile.
    cutting: usize,
    is_missed: bool,
    live: HashMap<(GrantKey, u32), Live>,
    /// How many of them may be held in place.
    in_place: usize,
}

/// Which writes are to be asked back.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Recall {
    Post(PostId),
    HeldSince(Instant),
}

/// Somebody else is inside.
pub(crate) struct Busy;

struct Queued {
    post: Arc<Post>,
    from: u64,
    frame: u32,
}

struct Live {
    post: Arc<Post>,
    since: Instant,
    is_started: bool,
    is_cancelling: bool,
    /// Why this side gave it up.
    given_up: Option<TransportError>,
    /// The receiver has all of it, and reads it where it lies.
    is_held: bool,
    /// It was asked to let go.
    is_recalled: bool,
}

impl Outbox {
    pub(crate) fn new(max_posts: usize) -> Self {
        let (queue, cutting, is_missed, live, in_place) = Default::default();
        Self { state: Mutex::new(State { is_open: true, max_posts, queue, cutting, is_missed, live, in_place }) }
    }

    /// Queues a post.
    pub(crate) fn add(&self, core: &Core, peer: &str, post: Post) -> Result<(), TransportError> {
        let mut state = self.lock();
        if !state.is_open {
            return Err(TransportError::NotConnected { peer: peer.to_owned() });
        }
        if state.live.len() >= state.max_posts {
            let (found, limit) = (state.live.len() as u64 + 1, state.max_posts as u64);
            return Err(TransportError::Limit { what: "posts to one peer", found, limit });
        }
        let key = (post.grant, post.sequence);
        if state.live.contains_key(&key) {
            let reason = format!("write {} of this grant is under way", post.sequence);
            return Err(TransportError::Refused { reason });
        }
        if post.is_in_place {
            let (found, limit) = (state.in_place, state.max_posts / 2);
            if found >= limit {
                let (found, limit) = (found as u64 + 1, limit as u64);
                return Err(TransportError::Limit { what: "writes that one peer holds in place", found, limit });
            }
        }
        state.in_place += usize::from(post.is_in_place);
        let post = Arc::new(post);
        state.live.insert(
            key,
            Live {
                post: Arc::clone(&post),
                since: Instant::now(),
                is_started: false,
                is_cancelling: false,
                given_up: None,
                is_held: false,
                is_recalled: false,
            },
        );
        state.queue.push_back(Queued { post, from: 0, frame: 0 });
        Counters::add(&core.counters.posts_live, 1);
        Ok(())
    }

    /// Cuts the next frame. Watches look at watched posts outside the lock: meanwhile others cut the posts behind it.
    pub(crate) fn next_frame(
        &self,
        core: &Core,
        frame_bytes: u64,
        version: u16,
        lender: Option<&Lender>,
    ) -> Option<FrameCut> {
        loop {
            let mut state = self.lock();
            let Some(front) = state.queue.front() else {
                state.is_missed |= state.cutting > 0;
                return None;
            };
            if front.post.is_of_device {
                // Such a post is taken only where a device cuts its frames; that no processor does is seen to here again.
                let (grant, sequence) = front.key();
                drop(state);
                self.finish(core, grant, sequence, Err(not_by_processors("the source")));
                continue;
            }
            if front.post.is_in_place && !lender.is_some_and(|lender| lender.is_settled(&core.regions)) {
                return None; // whoever takes the peer's answer calls again
            }
            if !front.post.is_watched && !front.post.is_in_place {
                return Self::cut(&mut state, frame_bytes, version, lender);
            }
            let mut queued = state.queue.pop_front()?;
            state.start(&queued.post);
            state.cutting += 1;
            drop(state);
            let frame_bytes = match queued.post.is_in_place {
                true => MAX_PAYLOAD_BYTES as u64,
                false => frame_bytes.min((queued.post.bytes / 2).max(MIN_WATCHED_BYTES)),
            };
            let cut = FrameCut::new(&queued.post, queued.from, queued.frame, frame_bytes, version, lender);
            let cut = cut.and_then(|cut| match cut {
                Some(cut) if queued.post.is_in_place && !cut.is_lent => Err(NOT_LENT.to_owned()),
                cut => Ok(cut),
            });
            let mut state = self.lock();
            state.cutting -= 1;
            match cut {
                Ok(Some(cut)) => {
                    queued.from += cut.payload_bytes;
                    queued.frame += 1;
                    let is_live = state.live.get(&queued.key()).is_some_and(|live| !live.is_cancelling);
                    if is_live && queued.from < queued.post.bytes {
                        state.queue.push_front(queued);
                    }
                    return Some(cut);
                }
                Ok(None) => {}
                Err(reason) => {
                    drop(state);
                    let (grant, sequence) = queued.key();
                    self.finish(core, grant, sequence, Err(TransportError::Refused { reason }));
                }
            }
        }
    }

    /// Whether somebody found nothing to send while a frame was cut, and there is something now; they are to be called then.
    pub(crate) fn take_missed(&self) -> bool {
        let mut state = self.lock();
        !state.queue.is_empty() && std::mem::take(&mut state.is_missed)
    }

    /// The same for a thread that completes reads of devices, for which another may wait under this lock: `Err` if one holds it.
    /// No post is watched where there is such a thread.
    pub(crate) fn try_next_frame(&self, frame_bytes: u64, version: u16) -> Result<Option<FrameCut>, Busy> {
        match self.state.try_lock() {
            Ok(mut state) => Ok(Self::cut(&mut state, frame_bytes, version, None)),
            Err(TryLockError::Poisoned(state)) => Ok(Self::cut(&mut state.into_inner(), frame_bytes, version, None)),
            Err(TryLockError::WouldBlock) => Err(Busy),
        }
    }

    fn cut(state: &mut State, frame_bytes: u64, version: u16, lender: Option<&Lender>) -> Option<FrameCut> {
        loop {
            let queued = state.queue.front_mut()?;
            let (post, from, frame) = (&queued.post, queued.from, queued.frame);
            // What is not watched has no error.
            let Ok(Some(cut)) = FrameCut::new(post, from, frame, frame_bytes, version, lender) else {
                state.queue.pop_front();
                continue;
            };
            queued.from += cut.payload_bytes;
            queued.frame += 1;
            if queued.from >= queued.post.bytes {
                state.queue.pop_front();
            }
            state.start(&cut.post);
            return Some(cut);
        }
    }

    /// When the post that waits longest was taken.
    pub(crate) fn oldest_post(&self) -> Option<Instant> {
        self.lock().live.values().filter(|live| !live.is_held).map(|live| live.since).min()
    }

    /// Ends a post; does nothing if it ended before.
    pub(crate) fn finish(&self, core: &Core, grant: GrantKey, sequence: u32, outcome: Result<(), TransportError>) {
        let mut state = self.lock();
        if let Some(live) = state.live.remove(&(grant, sequence)) {
            state.in_place -= usize::from(live.post.is_in_place);
            state.queue.retain(|queued| !Arc::ptr_eq(&queued.post, &live.post));
            if core.bug.is(Planted::PostCreditLost) {
                state.max_posts = state.max_posts.saturating_sub(1);
            }
            // It cannot have all of what was given up: a word that it has is about an earlier write of that number.
            let outcome = live.given_up.map_or(outcome, Err);
            end(core, &live.post, outcome);
        }
    }

    /// Gives up a post of which nothing can carry the rest. Returns whether the receiver is to be told: its answer ends the post, with
    /// `reason`. The source is let go only then: devices may read it meanwhile.
    pub(crate) fn give_up(&self, grant: GrantKey, sequence: u32, reason: TransportError) -> bool {
        let mut state = self.lock();
        state.queue.retain(|queued| queued.key() != (grant, sequence));
        let Some(live) = state.live.get_mut(&(grant, sequence)).filter(|live| !live.is_cancelling) else {
            return false; // it is over, or the receiver was asked
        };
        (live.is_cancelling, live.is_started, live.given_up) = (true, true, Some(reason));
        true
    }

    /// Ends what was not started under a grant, and stops the rest. Returns the numbers that the receiver has to be asked about.
    pub(crate) fn cancel(&self, core: &Core, grant: GrantKey) -> Vec<u32> {
        let mut state = self.lock();
        state.queue.retain(|queued| queued.post.grant != grant);
        let of_grant = |key: &(GrantKey, u32)| key.0 == grant;
        let idle: Vec<_> = state.live.extract_if(|key, live| of_grant(key) && !live.is_started).collect();
        state.in_place -= idle.iter().filter(|(_, live)| live.post.is_in_place).count();
        for (_, live) in idle {
            end(core, &live.post, Err(TransportError::Cancelled));
        }
        let mut asked = Vec::new();
        let is_meant = |(key, live): &(&(GrantKey, u32), &mut Live)| {
            of_grant(key) && (!live.is_cancelling || live.given_up.is_some())
        };
        for (key, live) in state.live.iter_mut().filter(is_meant) {
            // What the receiver may read in place stays until it says that it does not.
            if !live.post.is_in_place {
                live.post.release_source();
            }
            // Of what was given up it was asked before.
            if !std::mem::replace(&mut live.is_cancelling, true) {
                asked.push(key.1);
            }
        }
        asked.sort_unstable();
        asked
    }

    /// The receiver has all of a write that it reads in place.
    pub(crate) fn held(&self, core: &Core, grant: GrantKey, sequence: u32) {
        let mut state = self.lock();
        let Some(live) = state.live.get_mut(&(grant, sequence)).filter(|live| live.post.is_in_place) else { return };
        if live.is_started && !std::mem::replace(&mut live.is_held, true) {
            live.since = Instant::now();
            let post = live.post.id;
            Counters::add(&core.counters.handed_bytes, live.post.bytes);
            core.events.push(Event::Held { post });
        }
    }

    /// Which writes to ask back: those that are held since `before`, or a certain one. Each is asked for once.
    pub(crate) fn recall(&self, of: Recall) -> Vec<(GrantKey, u32)> {
        let mut state = self.lock();
        if state.in_place == 0 {
            return Vec::new();
        }
        let is_meant = |live: &Live| match of {
            Recall::Post(post) => live.post.id == post,
            Recall::HeldSince(before) => live.is_held && live.since <= before,
        };
        let of_peer = state.live.iter_mut().filter(|(_, live)| live.post.is_in_place && live.is_started);
        let meant = of_peer.filter(|(_, live)| is_meant(live) && !live.is_recalled);
        meant
            .map(|(key, live)| {
                live.is_recalled = true;
                *key
            })
            .collect()
    }

    /// Ends all posts but those whose source the receiver may read in place, which are returned; none is taken any more.
    pub(crate) fn close(&self, core: &Core, reason: &TransportError) -> Vec<Arc<Post>> {
        let mut state = self.lock();
        state.is_open = false;
        state.queue.clear();
        state.in_place = 0;
        let mut ended: Vec<_> = state.live.drain().map(|(_, live)| live).collect();
        ended.sort_unstable_by_key(|live| live.post.id);
        let is_kept =
            |live: &mut Live| live.post.is_in_place && live.is_started && !core.bug.is(Planted::CutForgetsHeld);
        let kept: Vec<_> = ended.extract_if(.., is_kept).collect();
        for live in ended {
            let outcome = match live.given_up {
                Some(given_up) => given_up,
                None if live.is_cancelling => TransportError::Cancelled,
                None => reason.clone(),
            };
            end(core, &live.post, Err(outcome));
        }
        kept.into_iter().map(|live| live.post).collect()
    }

    /// Ends a post that was kept beyond its session.
    pub(crate) fn end_kept(core: &Core, post: &Arc<Post>, reason: TransportError) {
        end(core, post, Err(reason));
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// The receiver is going to hear of a post.
    fn start(&mut self, post: &Post) {
        if let Some(live) = self.live.get_mut(&(post.grant, post.sequence)) {
            live.is_started = true;
        }
    }
}

impl Queued {
    fn key(&self) -> (GrantKey, u32) {
        (self.post.grant, self.post.sequence)
    }
}

fn end(core: &Core, post: &Arc<Post>, outcome: Result<(), TransportError>) {
    if core.bug.is(Planted::SlabKept) {
        std::mem::forget(Arc::clone(post));
    } else {
        post.release_source();
    }
    post.note_verdict();
    if post.is_in_place {
        Counters::give_back(&core.counters.held_bytes, post.bytes);
    }
    core.counters.posts_live.fetch_sub(1, std::sync::atomic::Ordering::Relaxed);
    if core.bug.is(Planted::PostedTwice) {
        core.events.push(Event::Posted { post: post.id, outcome: outcome.clone() });
    }
    core.events.push(Event::Posted { post: post.id, outcome });
}

#[cfg(test)]
mod tests {
    use std::ptr::NonNull;
    use std::time::Duration;

    use bytes::Bytes;
    use kvferry_protocol::RegionId;
    use kvferry_protocol::pages::{Extent, Pages, Piece};

    use super::*;
    use crate::api::{Memory, MemoryKind, Source, Write};
    use crate::core::Bug;
    use crate::device_memory::DeviceAccess;

    const BYTES: u64 = 4096;

    fn core() -> Core {
        let core = Core::new(8, 64, Bug::default());
        // Where nothing is mapped: whoever touches it dies.
        let address = NonNull::new(std::ptr::without_provenance_mut(4096)).unwrap();
        let kind = MemoryKind::Device(DeviceAccess::default());
        core.regions.add_of_device(Memory { address, bytes: BYTES as usize, kind, file: None }).unwrap();
        core
    }

    fn add(core: &Core, outbox: &Outbox, sequence: u32) -> PostId {
        let piece = Piece { region: RegionId::new(0), offset: 0, loops: vec![], run_bytes: BYTES };
        let write = Write {
            grant: GrantKey(8),
            sequence,
            extents: vec![Extent::contiguous(0, BYTES)],
            source: Source::Pages(vec![Pages { bases: vec![0], pieces: vec![piece] }]),
            notification: Bytes::new(),
        };
        let id = core.next_post();
        outbox.add(core, "a", Post::new(id, &write, &core.regions, 8, 8).unwrap()).unwrap();
        id
    }

    /// How posts ended: each with its reason.
    fn ends(core: &Core) -> Vec<(PostId, String)> {
        let mut events = Vec::new();
        core.events.poll(&mut events, Duration::ZERO);
        let end = |event| match event {
            Event::Posted { post, outcome } => {
                (post, outcome.map_or_else(|error| error.to_string(), |()| String::new()))
            }
            other => panic!("{other:?}"),
        };
        events.into_iter().map(end).collect()
    }

    fn reason(why: &str) -> TransportError {
        TransportError::Refused { reason: why.to_owned() }
    }

    #[test]
    fn a_post_that_is_given_up_ends_once_with_its_reason_whatever_the_receiver_says() {
        let (core, outbox, grant) = (core(), Outbox::new(8), GrantKey(8));
        for (sequence, word) in [Ok(()), Err(TransportError::Cancelled), Err(reason("another"))].into_iter().enumerate()
        {
            let sequence = sequence as u32;
            let post = add(&core, &outbox, sequence);
            assert!(outbox.give_up(grant, sequence, reason("no device")), "the receiver is told");
            assert!(!outbox.give_up(grant, sequence, reason("later")), "once");
            assert!(matches!(outbox.try_next_frame(BYTES, 3), Ok(None)), "nothing more of it is cut");
            assert_eq!(ends(&core), [], "the receiver has to say");
            outbox.finish(&core, grant, sequence, word);
            assert_eq!(ends(&core), [(post, reason("no device").to_string())]);
        }
        let (cut, kept) = (add(&core, &outbox, 7), add(&core, &outbox, 8));
        outbox.give_up(grant, 7, reason("no device"));
        outbox.close(&core, &reason("the session ended"));
        assert_eq!(
            ends(&core),
            [(cut, reason("no device").to_string()), (kept, reason("the session ended").to_string())]
        );
    }

    #[test]
    fn a_cancel_lets_go_of_what_was_given_up_and_asks_about_the_others() {
        let (core, outbox, grant) = (core(), Outbox::new(8), GrantKey(8));
        add(&core, &outbox, 0);
        outbox.give_up(grant, 0, reason("no device"));
        add(&core, &outbox, 1);
        let Ok(Some(cut)) = outbox.try_next_frame(BYTES, 3) else { panic!("a frame") };
        assert!(cut.is_of_device() && cut.post.read_source().is_some());
        let given_up = Arc::clone(&outbox.lock().live[&(grant, 0)].post);
        assert!(given_up.read_source().is_some(), "a device may read it");
        assert_eq!(outbox.cancel(&core, grant), [1]);
        assert!(given_up.read_source().is_none() && cut.post.read_source().is_none());
    }

    #[test]
    fn a_lane_that_finds_memory_of_a_device_ends_the_post_and_goes_on() {
        let (core, outbox) = (core(), Outbox::new(8));
        let posts = [0, 1].map(|sequence| add(&core, &outbox, sequence));
        assert!(outbox.next_frame(&core, BYTES, 3, None).is_none());
        let ends = ends(&core);
        assert_eq!(ends.iter().map(|(post, _)| *post).collect::<Vec<_>>(), posts);
        assert!(ends.iter().all(|(_, why)| why.contains("only RDMA devices read and write")), "{ends:?}");
    }
}
