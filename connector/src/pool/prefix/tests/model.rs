//! An engine that does what it is told with a cache, and beside it the model: which prefixes can be found, in which blocks, and what
//! stands in every token's place. It learns what came and went from events alone, as a router does.

use std::collections::{BTreeMap, BTreeSet};

use kvferry_protocol::BlockId;

use super::*;
use crate::events::{BlockName, Removed, Stored};

const TENANTS: [&[u8]; 2] = [b"", b"tenant"];

/// So that operations, which draw a request's place, meet every one.
const MOST_RUNNING: usize = 5;

/// What stands in one token's place: whose, and the tokens up to it.
type Content = (usize, Vec<u32>);

struct Running {
    number: usize,
    tenant: usize,
    text: Text,
    table: RequestTable,
    computed: usize,
    matched: usize,
    kept: usize,
    epoch: usize,
}

/// What has happened.
#[derive(Default, Debug)]
pub(super) struct Seen {
    pub(super) hits: usize,
    pub(super) evicted: usize,
    pub(super) twins: usize,
    pub(super) put_back: usize,
    pub(super) refused: usize,
    pub(super) leased: usize,
}

pub(super) struct Engine {
    cache: PrefixCache,
    hashers: Vec<Arc<BlockHasher>>,
    size: usize,
    running: Vec<Running>,
    put_back: Vec<(usize, usize, Text)>,
    leases: Vec<(PrefixLease, usize, Vec<Content>)>,
    next: usize,
    epoch: usize,
    memory: Vec<Option<Content>>,
    found: BTreeMap<BlockName, BlockId>,
    /// Every name that was ever told, and what it says.
    told: BTreeMap<BlockName, Content>,
    /// Blocks of a radix cache that were forgotten while somebody held them: nobody finds them, and they are evicted like others.
    stale: usize,
    seen: Seen,
}

impl Engine {
    pub(super) fn new(kind: PrefixKind, blocks: usize, size: usize) -> Self {
        let mut cache = PrefixCache::new(kind, blocks, size).unwrap();
        let hashers: Vec<_> = TENANTS.iter().map(|salt| names(salt, size)).collect();
        cache.record_events(&hashers[0], None);
        let (running, put_back, leases, found, told, seen) = Default::default();
        let memory = vec![None; blocks * size];
        Self { cache, hashers, size, running, put_back, leases, next: 0, epoch: 0, memory, found, told, stale: 0, seen }
    }

    pub(super) fn apply(&mut self, op: &Op) {
        match op {
            Op::Open { tenant, prompt, spare } => {
                let text = Text::new(Some(&self.hashers[*tenant]), prompt.clone());
                self.next += 1;
                self.open(self.next, *tenant, text, *spare);
            }
            Op::Reopen => {
                if !self.put_back.is_empty() {
                    let (number, tenant, text) = self.put_back.remove(0);
                    self.open(number, tenant, text, 0);
                }
            }
            Op::EndLease { lease } => {
                if *lease < self.leases.len() {
                    drop(self.leases.swap_remove(*lease));
                }
            }
            Op::Clear => {
                self.cache.clear();
                self.epoch += 1;
                assert_eq!(self.cache.take_events(), [KvEvent::Cleared]);
                self.found.clear();
            }
            Op::Compute { request, .. }
            | Op::Grow { request, .. }
            | Op::Register { request }
            | Op::Finish { request }
            | Op::Lease { request }
            | Op::Abort { request } => {
                if *request < self.running.len() {
                    self.apply_to(*request, op);
                }
            }
        }
        self.check(op);
    }

    fn apply_to(&mut self, at: usize, op: &Op) {
        match op {
            Op::Compute { tokens, token, .. } => self.compute(at, *tokens, *token),
            Op::Grow { more, .. } => self.grow(at, *more),
            Op::Register { .. } => self.register(at),
            Op::Finish { .. } | Op::Lease { .. } => {
                // The engine's step registers what it has computed, and then it is over.
                self.register(at);
                let Running { tenant, text, table, computed, matched, kept, .. } = self.running.swap_remove(at);
                let want = Kept { matched, registered: kept, returned: table.len() - matched - kept };
                if let Op::Finish { .. } = op {
                    assert_eq!(self.cache.finish(table, &text, computed).unwrap(), want);
                } else {
                    let contents = (1..=computed).map(|end| (tenant, text.tokens()[..end].to_vec())).collect();
                    let replaced = table.replaced();
                    let lease = self.cache.lease(table, &text, computed).unwrap();
                    self.leases.push((lease, replaced, contents));
                    self.seen.leased += 1;
                }
                assert_eq!(self.cache.take_events(), [], "all was registered");
            }
            Op::Abort { .. } => drop(self.running.swap_remove(at)),
            _ => unreachable!("{op:?} is not about a request"),
        }
    }

    fn name(&self, name: &BlockHash) -> BlockName {
        self.hashers[0].event_id(name).into()
    }

    fn event_names(&self, text: &Text) -> Vec<BlockName> {
        text.names().iter().map(|name| self.name(name)).collect()
    }

    fn held(&self) -> BTreeSet<BlockId> {
        let tables = self.running.iter().flat_map(|running| running.table.ids());
        tables.chain(self.leases.iter().flat_map(|(lease, ..)| lease.ids())).copied().collect()
    }

    fn free(&self) -> usize {
        let replaced = self.running.iter().map(|running| running.table.replaced()).sum::<usize>()
            + self.leases.iter().map(|(_, replaced, _)| replaced).sum::<usize>();
        BLOCKS - self.held().len() - replaced
    }

    /// Those that can be found and that nobody holds.
    fn cached(&self) -> usize {
        let held = self.held();
        self.found.values().filter(|block| !held.contains(block)).count()
    }

    fn prefix(&self, text: &Text) -> Vec<BlockId> {
        let most = (text.tokens().len() - 1) / self.size;
        let names = self.event_names(text);
        names.iter().take(most).map_while(|name| self.found.get(name)).copied().collect()
    }

    fn open(&mut self, number: usize, tenant: usize, text: Text, spare: usize) {
        if self.running.len() >= MOST_RUNNING {
            return;
        }
        let (prefix, held) = (self.prefix(&text), self.held());
        let tokens = text.tokens().len();
        assert_eq!(self.cache.lookup(&text), prefix.len() * self.size);
        let fresh = tokens.div_ceil(self.size) - prefix.len();
        let idle = prefix.iter().filter(|block| !held.contains(block)).count();
        let (free, cached, wanted) = (self.free(), self.cached(), idle + fresh + spare);
        let got = self.cache.open(&text, tokens, spare);
        if wanted > free {
            assert_eq!(got.unwrap_err(), PoolError::Exhausted { wanted, free, total: BLOCKS });
            assert_eq!(self.cache.take_events(), [], "nothing was changed");
            self.seen.refused += 1;
            return;
        }
        let table = got.unwrap();
        assert_eq!((&table.ids()[..prefix.len()], table.matched()), (&prefix[..], prefix.len()));
        assert!(table.ids()[prefix.len()..].iter().all(|block| !held.contains(block) && !prefix.contains(block)));
        self.seen.hits += prefix.len();
        self.evicted(fresh, free - cached);
        let (matched, kept, computed, epoch) = (prefix.len(), 0, prefix.len() * self.size, self.epoch);
        self.running.push(Running { number, tenant, text, table, computed, matched, kept, epoch });
    }

    /// So many blocks were taken; so many were empty before.
    fn evicted(&mut self, taken: usize, empty: usize) {
        let mut count = 0;
        for event in self.cache.take_events() {
            let KvEvent::Removed(Removed { blocks, .. }) = event else { panic!("{event:?}") };
            for name in blocks {
                assert!(self.found.remove(&name).is_some(), "{name:?} was not there");
                count += 1;
            }
        }
        let needed = taken.saturating_sub(empty);
        match self.cache.kind() {
            PrefixKind::Radix if self.stale > 0 => {}
            PrefixKind::Radix => assert!(count >= needed && (count == 0) == (needed == 0), "{count} for {needed}"),
            _ => assert_eq!(count, needed),
        }
        self.seen.evicted += count;
    }

    fn compute(&mut self, at: usize, tokens: usize, token: u32) {
        let running = &mut self.running[at];
        let end = (running.computed + tokens).min(running.text.tokens().len()).min(running.table.len() * self.size);
        for position in running.computed..end {
            assert!(position / self.size >= running.table.registered(), "others may read it");
            let block = running.table.ids()[position / self.size].get() as usize;
            let content = (running.tenant, running.text.tokens()[..=position].to_vec());
            self.memory[block * self.size + position % self.size] = Some(content);
        }
        running.computed = end;
        if end == running.text.tokens().len() {
            running.text.push(token);
        }
    }

    fn grow(&mut self, at: usize, more: usize) {
        let (free, empty) = (self.free(), self.free() - self.cached());
        let Running { table, text, .. } = &mut self.running[at];
        let (had, tokens) = (table.ids().to_vec(), text.tokens().len() + more);
        let wanted = tokens.div_ceil(self.size).saturating_sub(had.len());
        let got = self.cache.grow(table, tokens);
        if wanted > free {
            assert_eq!(got, Err(PoolError::Exhausted { wanted, free, total: BLOCKS }));
            assert_eq!(self.cache.take_events(), []);
            self.seen.put_back += 1;
            let youngest = (0..self.running.len()).max_by_key(|at| self.running[*at].number).unwrap();
            let Running { number, tenant, text, .. } = self.running.swap_remove(youngest);
            self.put_back.push((number, tenant, text));
            return;
        }
        assert_eq!((got, &table.ids()[..had.len()], table.len()), (Ok(()), &had[..], had.len() + wanted));
        self.evicted(wanted, empty);
    }

    fn register(&mut self, at: usize) {
        let names = self.event_names(&self.running[at].text);
        let Running { table, text, computed, tenant, epoch, .. } = &mut self.running[at];
        let (before, tenant, looked_at) = (table.ids().to_vec(), *tenant, table.registered());
        self.cache.register(table, text, *computed).unwrap();
        let kind = self.cache.kind();
        let counts = *epoch == self.epoch && kind != PrefixKind::Off;
        let whole = if counts { (*computed / self.size).max(looked_at) } else { looked_at };
        let (ids, text) = (table.ids().to_vec(), text.tokens().to_vec());
        assert_eq!(table.registered(), whole);
        let (twins, new): (Vec<_>, Vec<_>) = (looked_at..whole).partition(|at| self.found.contains_key(&names[*at]));
        let mut want = before;
        for twin in twins.iter().filter(|_| kind == PrefixKind::Radix) {
            want[*twin] = self.found[&names[*twin]];
        }
        assert_eq!(ids, want);
        self.seen.twins += twins.len();
        self.running[at].kept += new.len();
        self.stored(tenant, &text, &new, &names, &ids);
    }

    /// Blocks at these positions of a text were stored, and nothing else.
    fn stored(&mut self, tenant: usize, text: &[u32], new: &[usize], names: &[BlockName], ids: &[BlockId]) {
        let mut told = vec![];
        for event in self.cache.take_events() {
            let KvEvent::Stored(Stored { blocks, parent, tokens, .. }) = event else { panic!("{event:?}") };
            let mut content = parent.map_or_else(|| (tenant, vec![]), |parent| self.told[&parent].clone());
            for (name, tokens) in blocks.into_iter().zip(tokens.chunks_exact(self.size)) {
                content.1.extend(tokens);
                assert_eq!(self.told.entry(name.clone()).or_insert_with(|| content.clone()), &content);
                told.push((name, content.clone()));
            }
        }
        let end = |at: &usize| (at + 1) * self.size;
        let want: Vec<_> = new.iter().map(|at| (names[*at].clone(), (tenant, text[..end(at)].to_vec()))).collect();
        assert_eq!(told, want);
        self.found.extend(new.iter().map(|at| (names[*at].clone(), ids[*at])));
    }

    fn check(&mut self, op: &Op) {
        let (free, cached, registered) = (self.free(), self.cached(), self.found.len());
        let counts = self.cache.counts();
        assert_eq!(counts.free, free, "{op:?}");
        self.stale = counts.registered - registered;
        match self.stale {
            0 => assert_eq!(counts.cached, cached, "{op:?}"),
            _ => assert!(self.epoch > 0 && self.cache.kind() == PrefixKind::Radix, "{op:?}"),
        }
        let found: BTreeSet<_> = self.found.values().collect();
        assert_eq!(found.len(), registered, "a block has two names");
        let place = |block: BlockId, position: usize| {
            self.memory[block.get() as usize * self.size + position % self.size].as_ref()
        };
        for Running { table, text, tenant, computed, .. } in &self.running {
            for position in 0..*computed {
                let want = (*tenant, text.tokens()[..=position].to_vec());
                assert_eq!(place(table.ids()[position / self.size], position), Some(&want), "{op:?}");
            }
        }
        for (lease, _, contents) in &self.leases {
            for (position, want) in contents.iter().enumerate() {
                assert_eq!(place(lease.ids()[position / self.size], position), Some(want), "{op:?}");
            }
        }
        // What is found says what its name says.
        for (name, block) in &self.found {
            let (tenant, tokens) = &self.told[name];
            let last = tokens.len() - 1;
            assert_eq!(place(*block, last), Some(&(*tenant, tokens.clone())), "{op:?}");
        }
    }

    /// Everybody leaves; says what has happened.
    pub(super) fn end(mut self) -> Seen {
        self.running.clear();
        self.leases.clear();
        assert_eq!(self.cache.counts().free, BLOCKS);
        self.seen
    }
}
