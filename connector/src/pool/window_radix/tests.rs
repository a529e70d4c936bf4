//! The cache against a model that keeps one entry per cached block and searches them, and what it must do in words.

use std::collections::BTreeSet;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

const BLOCKS: usize = 16;
const WINDOW_BLOCKS: usize = 9;

#[derive(Clone, Debug)]
enum Op {
    Admit {
        namespace: u8,
        prompt: Vec<u32>,
    },
    Extend {
        sequence: usize,
        more: usize,
    },
    /// The window moves on to so many tokens before the last.
    Pass {
        sequence: usize,
        back: usize,
    },
    Keep {
        sequence: usize,
    },
    Finish {
        sequence: usize,
    },
    Drop {
        sequence: usize,
    },
    Evict {
        blocks: usize,
    },
    EvictWindows {
        blocks: usize,
    },
    Clear,
}

fn any_op() -> impl Strategy<Value = Op> {
    let which = 0..4_usize;
    // Few tokens, so that prefixes meet and part anywhere.
    let prompt = prop_oneof![vec(0..2_u32, 0..14), (0..14_usize).prop_map(|len| vec![0; len])];
    prop_oneof![
        5 => (0..2_u8, prompt).prop_map(|(namespace, prompt)| Op::Admit { namespace, prompt }),
        6 => (which.clone(), 0..7_usize).prop_map(|(sequence, more)| Op::Extend { sequence, more }),
        5 => (which.clone(), 0..3_usize).prop_map(|(sequence, back)| Op::Pass { sequence, back }),
        3 => which.clone().prop_map(|sequence| Op::Keep { sequence }),
        4 => which.clone().prop_map(|sequence| Op::Finish { sequence }),
        2 => which.prop_map(|sequence| Op::Drop { sequence }),
        1 => (0..4_usize).prop_map(|blocks| Op::Evict { blocks }),
        1 => (0..4_usize).prop_map(|blocks| Op::EvictWindows { blocks }),
        1 => Just(Op::Clear),
    ]
}

/// One cached block.
#[derive(Clone, Debug)]
struct Entry {
    namespace: u8,
    epoch: u64,
    /// All tokens up to the block's end.
    prefix: Vec<u32>,
    full: BlockId,
    window: Option<BlockId>,
    used: u64,
    window_used: u64,
}

/// What a sequence holds.
#[derive(Clone, Debug)]
struct Held {
    namespace: u8,
    epoch: u64,
    tokens: Vec<u32>,
    shared: usize,
    full: Vec<BlockId>,
    window: Vec<Option<BlockId>>,
    passed: usize,
}

struct Model {
    size: usize,
    window: usize,
    entries: Vec<Entry>,
    held: Vec<Held>,
    clock: u64,
    epoch: u64,
}

impl Model {
    fn needed(&self) -> usize {
        (self.window - 1).div_ceil(self.size)
    }

    fn find(&self, namespace: u8, prefix: &[u32]) -> Option<usize> {
        let same = |entry: &Entry| entry.namespace == namespace && entry.epoch == self.epoch && entry.prefix == prefix;
        self.entries.iter().position(same)
    }

    fn path(&self, namespace: u8, tokens: &[u32]) -> Vec<usize> {
        let ends = (1..=tokens.len() / self.size).map(|blocks| blocks * self.size);
        ends.map_while(|end| self.find(namespace, &tokens[..end])).collect()
    }

    /// The longest prefix whose last window is there.
    fn usable(&self, path: &[usize]) -> usize {
        let whole = |len: &usize| {
            path[len.saturating_sub(self.needed())..*len].iter().all(|at| self.entries[*at].window.is_some())
        };
        (0..=path.len()).rev().find(whole).unwrap_or(0)
    }

    fn touch(&mut self, path: &[usize], window_from: usize) {
        self.clock += 1;
        for (at, entry) in path.iter().enumerate() {
            let entry = &mut self.entries[*entry];
            entry.used = self.clock;
            if at >= window_from {
                entry.window_used = self.clock;
            }
        }
    }

    /// Whether a sequence has an entry, and whether its window reaches it.
    fn locks(&self, entry: &Entry) -> (bool, bool) {
        let of = |held: &&Held| {
            (held.namespace, held.epoch) == (entry.namespace, entry.epoch)
                && held.tokens[..held.shared * self.size].starts_with(&entry.prefix)
        };
        let at = entry.prefix.len() / self.size - 1;
        let locked = self.held.iter().any(|held| of(&held));
        (locked, self.held.iter().any(|held| of(&held) && at >= held.passed))
    }

    fn is_leaf(&self, entry: &Entry) -> bool {
        let below = |other: &Entry| {
            (other.namespace, other.epoch) == (entry.namespace, entry.epoch)
                && other.prefix.len() > entry.prefix.len()
                && other.prefix.starts_with(&entry.prefix)
        };
        !self.entries.iter().any(below)
    }

    /// Takes leaves out that serve nobody.
    fn prune(&mut self) {
        let useless = |model: &Self| {
            model
                .entries
                .iter()
                .position(|entry| entry.window.is_none() && !model.locks(entry).0 && model.is_leaf(entry))
        };
        while let Some(at) = useless(self) {
            self.entries.swap_remove(at);
        }
    }

    fn evict(&mut self) -> Option<usize> {
        let free = |at: &usize| !self.locks(&self.entries[*at]).0 && self.is_leaf(&self.entries[*at]);
        let oldest = (0..self.entries.len()).filter(free).min_by_key(|at| self.entries[*at].used)?;
        let before = self.entries.len();
        self.entries.swap_remove(oldest);
        self.prune();
        Some(before - self.entries.len())
    }

    fn windows(&self) -> usize {
        self.entries.iter().filter(|entry| entry.window.is_some()).count()
    }

    fn evict_window(&mut self) -> Option<usize> {
        let free = |at: &usize| self.entries[*at].window.is_some() && !self.locks(&self.entries[*at]).1;
        let order = |at: &usize| (self.entries[*at].window_used, self.entries[*at].prefix.len());
        let oldest = (0..self.entries.len()).filter(free).min_by_key(order)?;
        let before = self.windows();
        self.entries[oldest].window = None;
        self.prune();
        Some(before - self.windows())
    }

    fn evict_until(&mut self, blocks: usize, step: fn(&mut Self) -> Option<usize>) -> usize {
        let mut evicted = 0;
        while evicted < blocks
            && let Some(more) = step(self)
        {
            evicted += more;
        }
        evicted
    }

    /// Blocks of the full and the window pool that are somewhere, each once.
    fn places(&self) -> (BTreeSet<BlockId>, BTreeSet<BlockId>) {
        let own = |held: &Held| held.full[held.shared..].to_vec();
        let own_window = |held: &Held| held.window[held.shared..].iter().flatten().copied().collect::<Vec<_>>();
        let full: Vec<BlockId> =
            self.entries.iter().map(|entry| entry.full).chain(self.held.iter().flat_map(own)).collect();
        let windows = self.entries.iter().filter_map(|entry| entry.window);
        let window: Vec<BlockId> = windows.chain(self.held.iter().flat_map(own_window)).collect();
        let sets = (full.iter().copied().collect::<BTreeSet<_>>(), window.iter().copied().collect::<BTreeSet<_>>());
        assert_eq!((sets.0.len(), sets.1.len()), (full.len(), window.len()), "a block in two places");
        sets
    }
}

struct World {
    cache: WindowRadixCache,
    sequences: Vec<WindowSequence>,
    model: Model,
}

impl World {
    fn apply(&mut self, op: &Op) {
        match op {
            Op::Admit { namespace, prompt } => self.admit(*namespace, prompt),
            Op::Evict { blocks } => {
                assert_eq!(self.cache.evict(*blocks), self.model.evict_until(*blocks, Model::evict));
            }
            Op::EvictWindows { blocks } => {
                assert_eq!(self.cache.evict_windows(*blocks), self.model.evict_until(*blocks, Model::evict_window));
            }
            Op::Clear => {
                self.model.epoch += 1;
                assert_eq!(self.cache.clear(), self.model.evict_until(usize::MAX, Model::evict));
            }
            Op::Extend { sequence, .. }
            | Op::Pass { sequence, .. }
            | Op::Keep { sequence }
            | Op::Finish { sequence }
            | Op::Drop { sequence }
                if *sequence >= self.sequences.len() => {}
            Op::Extend { sequence, more } => self.extend(*sequence, *more),
            Op::Pass { sequence, back } => self.pass(*sequence, *back),
            Op::Keep { sequence } => self.keep(*sequence),
            Op::Finish { sequence } => {
                self.keep(*sequence);
                let (sequence, held) = (self.sequences.swap_remove(*sequence), self.model.held.swap_remove(*sequence));
                let kept = self.cache.finish(sequence, &held.tokens).unwrap();
                assert_eq!((kept.registered, kept.matched), (0, held.shared), "all was kept just before");
                self.model.prune();
            }
            Op::Drop { sequence } => {
                drop(self.sequences.swap_remove(*sequence));
                self.model.held.swap_remove(*sequence);
                self.model.prune();
            }
        }
    }

    fn admit(&mut self, namespace: u8, prompt: &[u32]) {
        let wanted = &prompt[..prompt.len().saturating_sub(1)];
        let mut path = self.model.path(namespace, wanted);
        path.truncate(self.model.usable(&path));
        assert_eq!(self.cache.lookup(&[namespace], prompt), path.len() * self.model.size);
        let passed = path.len().saturating_sub(self.model.needed());
        self.model.touch(&path, passed);
        let sequence = self.cache.admit(&[namespace], prompt);
        let (entries, shared) = (&self.model.entries, path.len());
        let window = |(at, entry): (usize, &usize)| if at < passed { None } else { entries[*entry].window };
        let held = Held {
            namespace,
            epoch: self.model.epoch,
            tokens: prompt[..shared * self.model.size].to_vec(),
            shared,
            full: path.iter().map(|at| entries[*at].full).collect(),
            window: path.iter().enumerate().map(window).collect(),
            passed,
        };
        assert!(held.window[passed..].iter().all(Option::is_some), "a whole window");
        self.model.held.push(held);
        self.sequences.push(sequence);
    }

    fn extend(&mut self, which: usize, more: usize) {
        let (held, size) = (&self.model.held[which], self.model.size);
        let tokens = held.tokens.len() + more;
        let wanted = tokens.div_ceil(size).saturating_sub(held.full.len());
        let evictable = self.model.entries.iter().filter(|entry| !self.model.locks(entry).0).count();
        let windows = self.model.entries.iter().filter(|entry| entry.window.is_some() && !self.model.locks(entry).1);
        let evictable_windows = windows.count();
        let (full, window) = self.model.places();
        let (free, window_free) = (BLOCKS - full.len(), WINDOW_BLOCKS - window.len());
        let fits = wanted <= free + evictable && wanted <= window_free + evictable_windows;
        let done = self.cache.extend(&mut self.sequences[which], tokens);
        assert_eq!(done.is_ok(), fits, "{done:?}: {wanted} of {free} and {window_free}");
        if !fits {
            return;
        }
        self.model.evict_until(wanted.saturating_sub(window_free), Model::evict_window);
        let full = self.model.places().0.len();
        self.model.evict_until(wanted.saturating_sub(BLOCKS - full), Model::evict);
        let (full, window) = self.model.places();
        let (sequence, held) = (&self.sequences[which], &mut self.model.held[which]);
        let had = held.full.len();
        assert!(sequence.blocks()[had..].iter().all(|id| !full.contains(id)), "given twice");
        assert!(sequence.window_blocks()[had..].iter().all(|id| !window.contains(id)), "given twice");
        held.full.extend(&sequence.blocks()[had..]);
        held.window.extend(sequence.window_blocks()[had..].iter().copied().map(Some));
        let last = held.tokens.last().copied().unwrap_or_default();
        held.tokens.resize(tokens, last);
    }

    fn pass(&mut self, which: usize, back: usize) {
        let (held, size, window) = (&mut self.model.held[which], self.model.size, self.model.window);
        let computed = held.tokens.len().saturating_sub(back);
        let passed = ((computed + 1).saturating_sub(window) / size).min(held.full.len());
        let own = held.shared.max(held.passed).min(passed)..passed;
        let freed = held.window[own].iter().flatten().count();
        if passed > held.passed {
            held.window[..passed].fill(None);
            held.passed = passed;
        }
        assert_eq!(self.cache.pass(&mut self.sequences[which], computed), Ok(freed));
    }

    fn keep(&mut self, which: usize) {
        let (held, size) = (self.model.held[which].clone(), self.model.size);
        let kept = self.cache.keep(&mut self.sequences[which], &held.tokens).unwrap();
        assert_eq!(kept.matched, held.shared);
        if held.epoch != self.model.epoch {
            assert_eq!((kept.registered, kept.returned), (0, 0));
            return;
        }
        let whole = held.tokens.len() / size;
        let path = self.model.path(held.namespace, &held.tokens);
        let window_from = path.len().min(whole.saturating_sub(self.model.needed()));
        self.model.touch(&path, window_from);
        let (mut held, mut registered) = (held, 0);
        for at in 0..whole {
            let prefix = &held.tokens[..(at + 1) * size];
            match self.model.find(held.namespace, prefix) {
                Some(entry) => {
                    let entry = &mut self.model.entries[entry];
                    if at >= held.shared && entry.window.is_none() && held.window[at].is_some() {
                        (entry.window, entry.window_used) = (held.window[at], self.model.clock);
                    }
                    held.full[at] = entry.full;
                    held.window[at] = if at < held.passed { None } else { entry.window };
                }
                None => {
                    registered += 1;
                    let (namespace, epoch, used) = (held.namespace, held.epoch, self.model.clock);
                    let (prefix, full, window) = (prefix.to_vec(), held.full[at], held.window[at]);
                    self.model.entries.push(Entry { namespace, epoch, prefix, full, window, used, window_used: used });
                }
            }
        }
        assert_eq!((kept.registered, kept.returned), (registered, whole - held.shared - registered));
        held.shared = whole;
        self.model.held[which] = held;
        self.model.prune();
    }

    fn check(&mut self) {
        for (sequence, held) in self.sequences.iter().zip(&self.model.held) {
            assert_eq!(sequence.blocks(), held.full);
            let null = BlockId::new(0);
            let window: Vec<BlockId> = held.window.iter().map(|id| id.unwrap_or(null)).collect();
            assert_eq!(sequence.window_blocks(), window);
            assert_eq!(sequence.shared_tokens(), held.shared * self.model.size);
        }
        let (full, window) = self.model.places();
        let entries = &self.model.entries;
        let locks: Vec<(bool, bool)> = entries.iter().map(|entry| self.model.locks(entry)).collect();
        let counts = self.cache.counts();
        let want = WindowRadixCounts {
            total: BLOCKS,
            free: BLOCKS - full.len(),
            window_total: WINDOW_BLOCKS,
            window_free: WINDOW_BLOCKS - window.len(),
            cached: entries.len(),
            tombstones: entries.iter().filter(|entry| entry.window.is_none()).count(),
            locked: locks.iter().filter(|(locked, _)| *locked).count(),
            window_locked: locks.iter().filter(|(_, locked)| *locked).count(),
            ..counts
        };
        assert_eq!(counts, want);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 384, ..ProptestConfig::default() })]

    #[test]
    fn the_cache_agrees_with_its_model(size in 1..4_usize, window in 2..8_usize, ops in vec(any_op(), 0..150)) {
        let cache = WindowRadixCache::new(BLOCKS, WINDOW_BLOCKS, size, window).unwrap();
        let model = Model { size, window, entries: vec![], held: vec![], clock: 0, epoch: 0 };
        let mut world = World { cache, sequences: vec![], model };
        for op in ops {
            world.apply(&op);
            world.check();
        }
        world.sequences.clear();
        world.cache.clear();
        let counts = world.cache.counts();
        prop_assert_eq!((counts.free, counts.window_free, counts.cached), (BLOCKS, WINDOW_BLOCKS, 0), "nothing leaks");
    }
}

#[test]
fn a_tombstone_keeps_what_is_behind_it_findable() {
    let mut cache = WindowRadixCache::new(10, 10, 1, 3).unwrap();
    let prompt: Vec<u32> = (0..9).collect();
    let mut sequence = cache.admit(b"", &prompt);
    cache.extend(&mut sequence, 8).unwrap();
    cache.finish(sequence, &prompt[..8]).unwrap();
    assert_eq!(cache.evict_windows(5), 5, "from the start of the prefix on");
    assert_eq!((cache.lookup(b"", &prompt), cache.counts().tombstones), (8, 5));
    assert_eq!(cache.lookup(b"", &prompt[..7]), 0, "there a whole window is missing");
    assert_eq!(cache.evict_windows(2), 2);
    assert_eq!((cache.lookup(b"", &prompt), cache.counts().cached), (0, 8), "the end has its window part still");
    assert_eq!(cache.evict_windows(1), 1);
    assert_eq!((cache.counts().cached, cache.counts().free), (0, 10), "what serves nobody is gone");
}

#[test]
fn what_is_computed_again_gives_tombstones_their_window_back() {
    let mut cache = WindowRadixCache::new(12, 12, 2, 4).unwrap();
    let prompt: Vec<u32> = (0..12).collect();
    let mut first = cache.admit(b"", &prompt);
    cache.extend(&mut first, 12).unwrap();
    cache.finish(first, &prompt).unwrap();
    cache.evict_windows(4);
    assert_eq!(cache.lookup(b"", &prompt[..9]), 0);
    let mut second = cache.admit(b"", &prompt[..9]);
    cache.extend(&mut second, 8).unwrap();
    let kept = cache.finish(second, &prompt[..8]).unwrap();
    assert_eq!((kept.registered, kept.returned, cache.counts().tombstones), (0, 4, 0));
    assert_eq!(cache.lookup(b"", &prompt[..9]), 8);
}

#[test]
fn misuse_is_refused_and_changes_nothing() {
    for (blocks, window_blocks) in [(0, 1), (1, 0)] {
        assert!(matches!(WindowRadixCache::new(blocks, window_blocks, 1, 1), Err(PoolError::Size { .. })));
    }
    assert_eq!(WindowRadixCache::new(1, 1, 0, 1).err(), Some(PoolError::NoTokens));
    assert_eq!(WindowRadixCache::new(1, 1, 1, 0).err(), Some(PoolError::NoTokens));
    let mut cache = WindowRadixCache::new(8, 3, 1, 2).unwrap();
    let mut sequence = cache.admit(b"", &[1, 2]);
    let short = PoolError::Exhausted { wanted: 4, free: 3, total: 3 };
    assert_eq!(cache.extend(&mut sequence, 4), Err(short), "the window pool is short");
    cache.extend(&mut sequence, 3).unwrap();
    assert_eq!(cache.pass(&mut sequence, 3), Ok(2));
    let (mut full, mut window) = (vec![], vec![]);
    assert_eq!(sequence.slots(0..3, &mut full, &mut window), Err(PoolError::Null { position: 0 }));
    sequence.slots(2..3, &mut full, &mut window).unwrap();
    assert_eq!((full, window), (vec![2], vec![3]));
    let mut other = WindowRadixCache::new(8, 3, 1, 2).unwrap();
    assert_eq!(other.pass(&mut sequence, 3), Err(PoolError::ForeignTable { len: 3 }));
    let long = PoolError::Position { start: 0, end: 4, len: 3 };
    assert_eq!(cache.keep(&mut sequence, &[1, 2, 3, 4]).err(), Some(long));
    cache.keep(&mut sequence, &[1, 2, 3]).unwrap();
    assert_eq!(cache.keep(&mut sequence, &[7, 2, 3]).err(), Some(PoolError::OtherTokens { blocks: 3 }));
}
