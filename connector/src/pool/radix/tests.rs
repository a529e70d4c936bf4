//! The cache against a model that keeps one entry per cached block and searches them, and what it must do in words.

use std::collections::BTreeSet;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

const BLOCKS: usize = 14;

#[derive(Clone, Debug)]
enum Op {
    Admit {
        namespace: u8,
        prompt: Vec<u32>,
    },
    /// Slots for a prompt of so many more tokens than are there.
    Extend {
        sequence: usize,
        more: usize,
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
    Clear,
}

fn any_op() -> impl Strategy<Value = Op> {
    let which = 0..4_usize;
    // Few tokens, so that prefixes meet and part anywhere.
    let prompt = prop_oneof![vec(0..2_u32, 0..14), (0..14_usize).prop_map(|len| vec![0; len])];
    prop_oneof![
        5 => (0..2_u8, prompt).prop_map(|(namespace, prompt)| Op::Admit { namespace, prompt }),
        6 => (which.clone(), 0..9_usize).prop_map(|(sequence, more)| Op::Extend { sequence, more }),
        3 => which.clone().prop_map(|sequence| Op::Keep { sequence }),
        4 => which.clone().prop_map(|sequence| Op::Finish { sequence }),
        2 => which.prop_map(|sequence| Op::Drop { sequence }),
        1 => (0..6_usize).prop_map(|blocks| Op::Evict { blocks }),
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
    block: BlockId,
    used: u64,
    /// A node ends here.
    ends: bool,
}

/// What a sequence holds.
#[derive(Clone, Debug)]
struct Held {
    namespace: u8,
    epoch: u64,
    tokens: Vec<u32>,
    shared: usize,
    blocks: Vec<BlockId>,
}

struct Model {
    tokens_per_block: usize,
    entries: Vec<Entry>,
    held: Vec<Held>,
    clock: u64,
    epoch: u64,
}

impl Model {
    fn find(&self, namespace: u8, prefix: &[u32]) -> Option<usize> {
        let same = |entry: &Entry| entry.namespace == namespace && entry.epoch == self.epoch && entry.prefix == prefix;
        self.entries.iter().position(same)
    }

    fn reach(&mut self, namespace: u8, tokens: &[u32]) -> Vec<BlockId> {
        self.clock += 1;
        let ends = (1..=tokens.len() / self.tokens_per_block).map(|blocks| blocks * self.tokens_per_block);
        let found: Vec<usize> = ends.map_while(|end| self.find(namespace, &tokens[..end])).collect();
        found.iter().for_each(|at| self.entries[*at].used = self.clock);
        if let Some(last) = found.last() {
            self.entries[*last].ends = true;
        }
        found.iter().map(|at| self.entries[*at].block).collect()
    }

    fn is_locked(&self, entry: &Entry) -> bool {
        self.held.iter().any(|held| {
            let locked = held.shared * self.tokens_per_block;
            (held.namespace, held.epoch) == (entry.namespace, entry.epoch)
                && held.tokens[..locked].starts_with(&entry.prefix)
        })
    }

    fn parent(&self, of: &Entry) -> Option<usize> {
        let end = of.prefix.len() - self.tokens_per_block;
        let is_it = |entry: &Entry| {
            (entry.namespace, entry.epoch) == (of.namespace, of.epoch) && entry.prefix == of.prefix[..end]
        };
        self.entries.iter().position(is_it)
    }

    fn evict(&mut self, blocks: usize) -> usize {
        let mut evicted = 0;
        while evicted < blocks {
            let leaf = |entry: &&Entry| {
                !self
                    .entries
                    .iter()
                    .any(|other| self.parent(other).is_some_and(|at| std::ptr::eq(&self.entries[at], *entry)))
            };
            let leaves = self.entries.iter().filter(leaf).filter(|entry| !self.is_locked(entry));
            let Some(mut entry) = leaves.min_by_key(|entry| entry.used).cloned() else { break };
            loop {
                let parent = self.parent(&entry).map(|at| self.entries[at].clone());
                self.entries.retain(|other| other.block != entry.block);
                evicted += 1;
                match parent {
                    Some(parent) if !parent.ends => entry = parent,
                    _ => break,
                }
            }
        }
        evicted
    }

    fn admit(&mut self, namespace: u8, prompt: &[u32]) {
        let blocks = self.reach(namespace, without_last(prompt));
        let (epoch, tokens, shared) = (self.epoch, prompt.to_vec(), blocks.len());
        self.held.push(Held { namespace, epoch, tokens, shared, blocks });
    }

    /// Puts a sequence's whole blocks in; `tokens` are computed.
    fn keep(&mut self, at: usize, tokens: usize) -> Kept {
        let Held { namespace, epoch, tokens: text, shared, blocks } = self.held[at].clone();
        if epoch != self.epoch {
            return Kept { matched: shared, ..Kept::default() };
        }
        let whole = tokens / self.tokens_per_block;
        let there = self.reach(namespace, &text[..whole * self.tokens_per_block]);
        for at in there.len()..whole {
            let prefix = text[..(at + 1) * self.tokens_per_block].to_vec();
            let (block, used) = (blocks[at], self.clock);
            self.entries.push(Entry { namespace, epoch, prefix, block, used, ends: at + 1 == whole });
        }
        let held = &mut self.held[at];
        held.blocks[..there.len()].copy_from_slice(&there);
        held.shared = whole;
        Kept { matched: shared, registered: whole - there.len(), returned: there.len() - shared }
    }

    /// Every block that somebody has; fails if two do.
    fn owned(&self) -> BTreeSet<BlockId> {
        let own = self.held.iter().flat_map(|held| held.blocks[held.shared..].iter().copied());
        let all: Vec<BlockId> = self.entries.iter().map(|entry| entry.block).chain(own).collect();
        let owned: BTreeSet<BlockId> = all.iter().copied().collect();
        assert_eq!(owned.len(), all.len(), "a block is in two places: {all:?}");
        owned
    }
}

fn namespace(name: u8) -> &'static [u8] {
    if name == 0 { b"" } else { b"tenant" }
}

fn computed(sequence: &Sequence, held: &Held) -> usize {
    held.tokens.len().min(sequence.capacity_tokens())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 384, ..ProptestConfig::default() })]

    #[test]
    fn the_radix_cache_agrees_with_its_model(tokens_per_block in 1..4_usize, ops in vec(any_op(), 0..120)) {
        let mut cache = RadixCache::new(BLOCKS, tokens_per_block, Sharing::Radix).unwrap();
        let mut model = Model { tokens_per_block, entries: vec![], held: vec![], clock: 0, epoch: 0 };
        let mut sequences: Vec<Sequence> = vec![];
        for op in ops {
            match &op {
                Op::Extend { sequence, .. } | Op::Keep { sequence } | Op::Finish { sequence } | Op::Drop { sequence }
                    if *sequence >= sequences.len() => continue,
                Op::Admit { namespace: name, prompt } => {
                    let found = cache.lookup(namespace(*name), prompt);
                    let sequence = cache.admit(namespace(*name), prompt);
                    prop_assert_eq!(sequence.shared_tokens(), found, "lookup says what admit finds");
                    sequences.push(sequence);
                    model.admit(*name, prompt);
                }
                Op::Extend { sequence: at, more } => {
                    let sequence = &mut sequences[*at];
                    let have = sequence.blocks().len();
                    let held = &mut model.held[*at];
                    // What is generated behind the prompt is a part of the text.
                    let want = held.blocks.len() * tokens_per_block + more;
                    let grown = held.tokens.len().max(want);
                    held.tokens.resize(grown, 1);
                    let wanted = want.div_ceil(tokens_per_block).saturating_sub(have);
                    let unlocked = model.entries.iter().filter(|entry| !model.is_locked(entry)).count();
                    let owned = model.owned();
                    let free = BLOCKS - owned.len();
                    let got = cache.extend(sequence, want);
                    if wanted > free + unlocked {
                        prop_assert_eq!(got, Err(PoolError::Exhausted { wanted, free: free + unlocked, total: BLOCKS }));
                    } else {
                        prop_assert_eq!(got, Ok(()));
                        model.evict(wanted.saturating_sub(free));
                        let owned = model.owned();
                        let new = sequence.blocks()[have..].to_vec();
                        prop_assert_eq!(new.len(), wanted);
                        prop_assert!(new.iter().all(|block| !owned.contains(block)), "{:?} were not free", new);
                        model.held[*at].blocks.extend(new);
                    }
                }
                Op::Keep { sequence: at } => {
                    let tokens = computed(&sequences[*at], &model.held[*at]);
                    let want = model.keep(*at, tokens);
                    let text = model.held[*at].tokens[..tokens].to_vec();
                    prop_assert_eq!(cache.keep(&mut sequences[*at], &text), Ok(want));
                }
                Op::Finish { sequence: at } => {
                    let tokens = computed(&sequences[*at], &model.held[*at]);
                    let Kept { matched, registered, .. } = model.keep(*at, tokens);
                    let held = model.held.swap_remove(*at);
                    let returned = held.blocks.len() - matched - registered;
                    let got = cache.finish(sequences.swap_remove(*at), &held.tokens[..tokens]).map_err(|refused| refused.1);
                    prop_assert_eq!(got, Ok(Kept { matched, registered, returned }));
                }
                Op::Drop { sequence } => {
                    model.held.swap_remove(*sequence);
                    drop(sequences.swap_remove(*sequence));
                }
                Op::Evict { blocks } => prop_assert_eq!(cache.evict(*blocks), model.evict(*blocks)),
                Op::Clear => {
                    model.epoch += 1;
                    prop_assert_eq!(cache.clear(), model.evict(usize::MAX));
                }
            }
            for (sequence, held) in sequences.iter().zip(&model.held) {
                prop_assert_eq!((sequence.blocks(), sequence.shared), (&held.blocks[..], held.shared), "{:?}", op);
            }
            let got = cache.counts();
            let locked = model.entries.iter().filter(|entry| model.is_locked(entry)).count();
            let free = BLOCKS - model.owned().len();
            prop_assert_eq!((got.free, got.cached, got.locked), (free, model.entries.len(), locked), "{:?}", op);
        }
        drop(sequences);
        cache.clear();
        let RadixCounts { free, cached, locked, nodes, .. } = cache.counts();
        prop_assert_eq!((free, cached, locked, nodes), (BLOCKS, 0, 0, 0));
    }
}

fn finished(cache: &mut RadixCache, namespace: &[u8], tokens: &[u32]) -> Kept {
    let mut sequence = cache.admit(namespace, tokens);
    cache.extend(&mut sequence, tokens.len()).unwrap();
    cache.finish(sequence, tokens).unwrap()
}

#[test]
fn a_finished_sequence_is_split_in_three() {
    let mut cache = RadixCache::new(16, 2, Sharing::Radix).unwrap();
    let system: Vec<u32> = (0..4).collect();
    assert_eq!(finished(&mut cache, b"", &system), Kept { matched: 0, registered: 2, returned: 0 });
    let text = [0, 1, 2, 3, 10, 11, 12];
    let mut one = cache.admit(b"", &text);
    let mut two = cache.admit(b"", &text);
    cache.extend(&mut one, 7).unwrap();
    cache.extend(&mut two, 7).unwrap();
    assert_eq!(cache.finish(one, &text).unwrap(), Kept { matched: 2, registered: 1, returned: 1 });
    assert_eq!(cache.finish(two, &text).unwrap(), Kept { matched: 2, registered: 0, returned: 2 }, "a twin came first");
    assert_eq!(cache.lookup(b"", &text), 6);
    assert_eq!(cache.lookup(b"", &text[..6]), 4, "the last token of a prompt is computed");
    assert_eq!(cache.lookup(b"other", &text), 0);
    let RadixCounts { free, cached, locked, nodes, .. } = cache.counts();
    assert_eq!((free, cached, locked, nodes), (13, 3, 0, 3), "root, system prompt, and what follows it");
}

#[test]
fn chunks_of_a_prompt_are_shared_while_it_runs() {
    let mut cache = RadixCache::new(8, 2, Sharing::Radix).unwrap();
    let prompt: Vec<u32> = (0..8).collect();
    let mut first = cache.admit(b"", &prompt);
    let mut second = cache.admit(b"", &prompt);
    for sequence in [&mut first, &mut second] {
        cache.extend(sequence, 5).unwrap();
    }
    assert_eq!(cache.keep(&mut first, &prompt[..5]).unwrap(), Kept { matched: 0, registered: 2, returned: 0 });
    let before = second.blocks().to_vec();
    assert_eq!(cache.keep(&mut second, &prompt[..5]).unwrap(), Kept { matched: 0, registered: 0, returned: 2 });
    assert_eq!(second.blocks()[..2], first.blocks()[..2], "its own copies went back");
    assert_eq!(second.blocks()[2], before[2], "what is not whole stays its own");
    assert_eq!(cache.evict(8), 0, "both have it locked");
    let mut slots = vec![];
    second.slots(3..5, &mut slots).unwrap();
    let (block, own) = (u64::from(second.blocks()[1].get()), u64::from(second.blocks()[2].get()));
    assert_eq!(slots, [2 * block + 1, 2 * own]);
    assert_eq!(second.slots(5..7, &mut slots), Err(PoolError::Position { start: 5, end: 7, len: 6 }));
}

#[test]
fn leaves_go_first_the_least_recently_used_before_others() {
    let mut cache = RadixCache::new(7, 1, Sharing::Radix).unwrap();
    for text in [[1, 2, 3], [1, 2, 4], [5, 6, 7]] {
        finished(&mut cache, b"", &text);
    }
    // Used again, up to its second token: that of the branch is newer than its leaves.
    drop(cache.admit(b"", &[1, 2, 9]));
    assert_eq!(cache.evict(1), 1);
    assert_eq!((cache.lookup(b"", &[1, 2, 3, 0]), cache.lookup(b"", &[1, 2, 4, 0])), (2, 3));
    assert_eq!(cache.evict(2), 4, "the other leaf of the branch, then the lonely one, whole");
    assert_eq!(cache.lookup(b"", &[1, 2, 4, 0]), 2);
    let mut sequence = cache.admit(b"", &[1, 2, 9]);
    let all = cache.extend(&mut sequence, 8);
    assert_eq!(all, Err(PoolError::Exhausted { wanted: 6, free: 5, total: 7 }), "what it shares is locked");
    cache.extend(&mut sequence, 7).unwrap();
    drop(sequence);
    assert_eq!(cache.counts().free, 5, "a retracted sequence keeps nothing of its own");
}

#[test]
fn without_sharing_all_comes_back() {
    let mut cache = RadixCache::new(4, 2, Sharing::Off).unwrap();
    let text = [1, 2, 3, 4];
    for _ in 0..2 {
        assert_eq!(finished(&mut cache, b"", &text), Kept { matched: 0, registered: 0, returned: 2 });
    }
    assert_eq!((cache.counts().free, cache.counts().nodes), (4, 0));
}

#[test]
fn what_was_computed_with_other_weights_is_not_found() {
    let mut cache = RadixCache::new(8, 1, Sharing::Radix).unwrap();
    let text = [1, 2, 3];
    finished(&mut cache, b"", &text);
    let mut running = cache.admit(b"", &text);
    cache.extend(&mut running, 3).unwrap();
    assert_eq!(cache.clear(), 1, "the part that nobody has locked");
    assert_eq!(cache.lookup(b"", &text), 0);
    assert_eq!(cache.finish(running, &text).unwrap(), Kept { matched: 2, registered: 0, returned: 1 });
    assert_eq!(cache.lookup(b"", &text), 0);
    finished(&mut cache, b"", &text);
    assert_eq!(cache.lookup(b"", &text), 2);
    assert_eq!(cache.evict(8), 5);
}

#[test]
fn misuse_is_refused_and_keeps_the_sequence() {
    let mut cache = RadixCache::new(4, 1, Sharing::Radix).unwrap();
    let mut other = RadixCache::new(4, 1, Sharing::Radix).unwrap();
    finished(&mut cache, b"", &[1, 2, 3]);
    let mut sequence = cache.admit(b"", &[1, 2, 3]);
    assert_eq!(other.extend(&mut sequence, 3), Err(PoolError::ForeignTable { len: 0 }));
    let long = cache.keep(&mut sequence, &[1, 2, 3]);
    assert_eq!(long, Err(PoolError::Position { start: 0, end: 3, len: 2 }), "there is no slot for the third");
    for tokens in [&[1, 9][..], &[1], &[]] {
        assert_eq!(cache.keep(&mut sequence, tokens), Err(PoolError::OtherTokens { blocks: 2 }), "{tokens:?}");
    }
    let (sequence, error) = *cache.finish(sequence, &[9, 2]).unwrap_err();
    assert_eq!(error, PoolError::OtherTokens { blocks: 2 });
    assert_eq!(cache.finish(sequence, &[1, 2]).unwrap(), Kept { matched: 2, registered: 0, returned: 0 });
    assert_eq!(RadixCache::new(4, 0, Sharing::Radix).err(), Some(PoolError::NoTokens));
}
