//! The tree of a cache with a window: which blocks hold the KV of which tokens, for layers that keep all and for those that keep a window.
//!
//! A node is one block of tokens. It owns a block of the full pool, and one of the window pool unless it is a *tombstone*: its window part was
//! given up, but who has a window's length behind it can still go on there. Two orders say what is given up next: leaves by
//! their last use, and window parts by theirs, of one path those nearer to its start first. A leaf without its window part serves nobody, so
//! it goes with it, unless it is locked.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use kvferry_protocol::BlockId;

/// A node's index in its tree; it means nothing once the node is gone, which a lock prevents.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) struct NodeId(u32);

/// Where a node hangs. Nodes without a parent are told apart by their namespace, and by how often the tree was cleared before.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Above {
    Node(NodeId),
    Root(Arc<[u8]>, u64),
}

struct Node {
    above: Above,
    tokens: Box<[u32]>,
    /// How many blocks are before it.
    depth: usize,
    full: BlockId,
    window: Option<BlockId>,
    children: u32,
    /// Sequences that have it, or what is below it.
    locks: u32,
    /// Of these, whose window reaches it.
    window_locks: u32,
    used: u64,
    window_used: u64,
}

/// What one node gave up.
#[derive(Default, Debug)]
pub(super) struct Freed {
    pub(super) full: Vec<BlockId>,
    pub(super) window: Vec<BlockId>,
}

/// How a tree's blocks are used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct TreeCounts {
    pub(super) nodes: usize,
    pub(super) tombstones: usize,
    pub(super) locked: usize,
    pub(super) window_locked: usize,
}

/// Nodes, and the orders in which they are given up.
#[derive(Default)]
pub(super) struct Tree {
    nodes: Vec<Node>,
    vacant: Vec<NodeId>,
    children: HashMap<(Above, Box<[u32]>), NodeId>,
    /// Leaves without a lock.
    leaves: BTreeSet<(u64, NodeId)>,
    /// Nodes with a window part and without a window lock.
    windows: BTreeSet<(u64, usize, NodeId)>,
    clock: u64,
    epoch: u64,
    counts: TreeCounts,
}

impl Tree {
    pub(super) fn counts(&self) -> TreeCounts {
        self.counts
    }

    /// Nodes of a sequence's blocks, as far as there are any.
    pub(super) fn path(&self, namespace: &[u8], tokens: &[u32], tokens_per_block: usize) -> Vec<NodeId> {
        let mut above = Above::Root(namespace.into(), self.epoch);
        let mut path = vec![];
        for block in tokens.chunks_exact(tokens_per_block) {
            let Some(id) = self.children.get(&(above, block.into())).copied() else { break };
            path.push(id);
            above = Above::Node(id);
        }
        path
    }

    /// How many blocks of a path can be gone on behind: those before have their window parts as far as `needed` blocks back.
    pub(super) fn usable(&self, path: &[NodeId], needed: usize) -> usize {
        let (mut run, mut usable) = (0, 0);
        for (at, id) in path.iter().enumerate() {
            run = if self.node(*id).window.is_some() { run + 1 } else { 0 };
            if run >= needed.min(at + 1) {
                usable = at + 1;
            }
        }
        usable
    }

    pub(super) fn full(&self, id: NodeId) -> BlockId {
        self.node(id).full
    }

    pub(super) fn window(&self, id: NodeId) -> Option<BlockId> {
        self.node(id).window
    }

    /// Marks a path as used: all of it, and its window parts from `window_from` on.
    pub(super) fn touch(&mut self, path: &[NodeId], window_from: usize) {
        self.clock += 1;
        for (at, id) in path.iter().enumerate() {
            self.leave(*id);
            let clock = self.clock;
            let node = self.node_mut(*id);
            node.used = clock;
            if at >= window_from {
                node.window_used = clock;
            }
            self.enter(*id);
        }
    }

    /// Hangs a block behind the end of a path, where nothing of the kind is.
    pub(super) fn attach(
        &mut self,
        namespace: &[u8],
        path: &[NodeId],
        tokens: &[u32],
        full: BlockId,
        window: Option<BlockId>,
    ) -> NodeId {
        let above = match path.last() {
            Some(parent) => {
                self.leave(*parent);
                self.node_mut(*parent).children += 1;
                Above::Node(*parent)
            }
            None => Above::Root(namespace.into(), self.epoch),
        };
        let (used, tokens): (u64, Box<[u32]>) = (self.clock, tokens.into());
        let node = Node {
            above: above.clone(),
            tokens: tokens.clone(),
            depth: path.len(),
            full,
            window,
            children: 0,
            locks: 0,
            window_locks: 0,
            used,
            window_used: used,
        };
        let id = match self.vacant.pop() {
            Some(id) => {
                *self.node_mut(id) = node;
                id
            }
            None => {
                self.nodes.push(node);
                NodeId((self.nodes.len() - 1) as u32)
            }
        };
        self.children.insert((above, tokens), id);
        self.counts.nodes += 1;
        self.counts.tombstones += usize::from(window.is_none());
        self.enter(id);
        id
    }

    /// Gives a tombstone its window part again.
    pub(super) fn revive(&mut self, id: NodeId, window: BlockId) {
        self.leave(id);
        let clock = self.clock;
        let node = self.node_mut(id);
        debug_assert!(node.window.is_none(), "a window part is replaced");
        (node.window, node.window_used) = (Some(window), clock);
        self.counts.tombstones -= 1;
        self.enter(id);
    }

    /// Keeps a path from being evicted, and its window parts from `window_from` on.
    pub(super) fn lock(&mut self, path: &[NodeId], window_from: usize) {
        for (at, id) in path.iter().enumerate() {
            self.leave(*id);
            let node = self.node_mut(*id);
            node.locks += 1;
            node.window_locks += u32::from(at >= window_from);
            let (first, first_window) = (node.locks == 1, at >= window_from && node.window_locks == 1);
            self.counts.locked += usize::from(first);
            self.counts.window_locked += usize::from(first_window);
            self.enter(*id);
        }
    }

    /// Ends the locks on window parts of `from..to` of a path.
    pub(super) fn unlock_windows(&mut self, path: &[NodeId], from: usize, to: usize) {
        for id in &path[from.min(to)..to] {
            self.leave(*id);
            let node = self.node_mut(*id);
            node.window_locks -= 1;
            let last = node.window_locks == 0;
            self.counts.window_locked -= usize::from(last);
            self.enter(*id);
        }
    }

    /// Ends a lock, and takes leaves out that serve nobody.
    pub(super) fn unlock(&mut self, path: &[NodeId], window_from: usize) -> Freed {
        self.unlock_windows(path, window_from, path.len());
        for id in path {
            self.leave(*id);
            let node = self.node_mut(*id);
            node.locks -= 1;
            let last = node.locks == 0;
            self.counts.locked -= usize::from(last);
            self.enter(*id);
        }
        let mut freed = Freed::default();
        if let Some(end) = path.last() {
            self.prune(*end, &mut freed);
        }
        freed
    }

    /// Cuts all namespaces off: nothing that is there now is found again.
    pub(super) fn cut_off(&mut self) {
        self.epoch += 1;
    }

    /// Takes the least recently used leaf out, if there is one without a lock, and what serves nobody without it.
    pub(super) fn evict_leaf(&mut self) -> Option<Freed> {
        let (_, id) = *self.leaves.first()?;
        let mut freed = Freed::default();
        self.remove(id, &mut freed);
        Some(freed)
    }

    /// Gives up the least recently used window part without a lock, and of a leaf without a lock all.
    pub(super) fn evict_window(&mut self) -> Option<Freed> {
        let (_, _, id) = *self.windows.first()?;
        let mut freed = Freed::default();
        self.leave(id);
        freed.window.extend(self.node_mut(id).window.take());
        self.counts.tombstones += 1;
        self.enter(id);
        self.prune(id, &mut freed);
        Some(freed)
    }

    /// Takes a node out if it is a leaf without a window part and without a lock, and so on upwards.
    fn prune(&mut self, id: NodeId, freed: &mut Freed) {
        let node = self.node(id);
        if node.children == 0 && node.locks == 0 && node.window.is_none() {
            self.remove(id, freed);
        }
    }

    fn remove(&mut self, id: NodeId, freed: &mut Freed) {
        self.leave(id);
        let node = self.node_mut(id);
        let key = (node.above.clone(), std::mem::take(&mut node.tokens));
        let (full, window) = (node.full, node.window.take());
        self.vacant.push(id);
        self.counts.nodes -= 1;
        self.counts.tombstones -= usize::from(window.is_none());
        freed.full.push(full);
        freed.window.extend(window);
        self.children.remove(&key);
        if let Above::Node(parent) = key.0 {
            self.leave(parent);
            self.node_mut(parent).children -= 1;
            self.enter(parent);
            self.prune(parent, freed);
        }
    }

    /// Lists a node where it can be given up.
    fn enter(&mut self, id: NodeId) {
        let node = self.node(id);
        let (used, window_used, depth) = (node.used, node.window_used, node.depth);
        let leaf = node.children == 0 && node.locks == 0;
        let window = node.window.is_some() && node.window_locks == 0;
        if leaf {
            self.leaves.insert((used, id));
        }
        if window {
            self.windows.insert((window_used, depth, id));
        }
    }

    fn leave(&mut self, id: NodeId) {
        let node = self.node(id);
        let (leaf, window) = ((node.used, id), (node.window_used, node.depth, id));
        self.leaves.remove(&leaf);
        self.windows.remove(&window);
    }

    fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.0 as usize]
    }

    fn node_mut(&mut self, id: NodeId) -> &mut Node {
        &mut self.nodes[id.0 as usize]
    }
}
