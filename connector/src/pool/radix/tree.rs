//! The tree of a radix cache: which blocks hold the KV of which tokens.
//!
//! A node is a run of whole blocks after its parent's; a block's first holder among a node's children is found by one hash table for
//! the whole tree, so that a node costs the same whether it has one child or a thousand. The tree owns one reference to each of its
//! blocks; who gives them back is told by its return values.

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasher, BuildHasherDefault, Hasher, RandomState};
use std::sync::Arc;

use kvferry_protocol::BlockId;

/// A node's index in its tree; it means nothing once the node is evicted, which a lock prevents.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) struct NodeId(u32);

/// No node.
const NONE: NodeId = NodeId(u32::MAX);

struct Node {
    /// Whole blocks of tokens.
    tokens: Box<[u32]>,
    blocks: Box<[BlockId]>,
    parent: NodeId,
    /// The next node with the same key in the table of children, whose first block or parent is another.
    same_key: NodeId,
    children: u32,
    /// Locks on it and below it.
    locks: u32,
    /// When a match or an insert last came by.
    used: u64,
}

/// Nodes, roots of namespaces, and the order in which leaves are evicted.
pub(super) struct Tree {
    nodes: Vec<Node>,
    vacant: Vec<NodeId>,
    roots: HashMap<Arc<[u8]>, NodeId>,
    /// Of every root, also of those that no namespace leads to any more.
    names: HashMap<NodeId, Arc<[u8]>>,
    /// From parent and first block to child. The key is a hash that nobody can foretell.
    children: HashMap<u64, NodeId, BuildHasherDefault<Ready>>,
    keys: RandomState,
    /// Leaves without a lock, the least recently used one first.
    evictable: BTreeSet<(u64, NodeId)>,
    tokens_per_block: usize,
    clock: u64,
    counts: TreeCounts,
}

/// How a tree's blocks are used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct TreeCounts {
    pub(super) nodes: usize,
    pub(super) blocks: usize,
    pub(super) locked_blocks: usize,
}

/// Where a walk along a sequence ended.
struct Walk {
    /// The last node of which at least one block matches.
    node: NodeId,
    /// So many of its blocks match.
    blocks: usize,
    /// Blocks that match from the sequence's start.
    matched: usize,
}

impl Tree {
    pub(super) fn new(tokens_per_block: usize) -> Self {
        Self {
            nodes: Vec::new(),
            vacant: Vec::new(),
            roots: HashMap::new(),
            names: HashMap::new(),
            children: HashMap::default(),
            keys: RandomState::new(),
            evictable: BTreeSet::new(),
            tokens_per_block,
            clock: 0,
            counts: TreeCounts::default(),
        }
    }

    pub(super) fn counts(&self) -> TreeCounts {
        self.counts
    }

    /// How many whole blocks of `tokens` are there. Changes nothing.
    pub(super) fn lookup(&self, namespace: &[u8], tokens: &[u32]) -> usize {
        self.roots.get(namespace).map_or(0, |root| self.walk(*root, tokens, |_, _| ()).matched)
    }

    /// Finds the longest prefix of whole blocks, splits the node in whose midst it ends, and marks the path as used. Appends the blocks.
    ///
    /// A namespace without any node gets a root; whoever does not lock what is returned must hold a lock in that namespace.
    pub(super) fn reach(&mut self, namespace: &[u8], tokens: &[u32], blocks: &mut Vec<BlockId>) -> NodeId {
        self.clock += 1;
        let root = self.root(namespace);
        let mut path = Vec::new();
        let Walk { node, blocks: in_node, .. } = self.walk(root, tokens, |node, count| path.push((node, count)));
        for (id, count) in &path {
            blocks.extend_from_slice(&self.node(*id).blocks[..*count]);
        }
        let end = match path.is_empty() || in_node == self.node(node).blocks.len() {
            true => node,
            false => self.split(node, in_node),
        };
        for (id, _) in path {
            // The lower half of a split node was not used.
            let id = if id == node { end } else { id };
            let leaf = self.is_evictable(id) && self.evictable.remove(&(self.node(id).used, id));
            self.node_mut(id).used = self.clock;
            if leaf {
                self.evictable.insert((self.clock, id));
            }
        }
        end
    }

    /// Puts whole blocks behind a node that was just reached, where nothing of the kind is. Returns where they end.
    pub(super) fn attach(&mut self, above: NodeId, tokens: &[u32], blocks: &[BlockId]) -> NodeId {
        debug_assert_eq!(tokens.len(), blocks.len() * self.tokens_per_block);
        if blocks.is_empty() {
            return above;
        }
        let node = self.add(Node {
            tokens: tokens.into(),
            blocks: blocks.into(),
            parent: above,
            same_key: NONE,
            children: 0,
            locks: 0,
            used: self.clock,
        });
        self.leave_leaves(above);
        self.node_mut(above).children += 1;
        self.link(node);
        self.enter_leaves(node);
        self.counts.blocks += blocks.len();
        node
    }

    /// Keeps a node and all above it from being evicted.
    pub(super) fn lock(&mut self, node: NodeId) {
        self.change_locks(node, true);
    }

    /// Ends a lock.
    pub(super) fn unlock(&mut self, node: NodeId) {
        self.change_locks(node, false);
    }

    /// Cuts all namespaces off: nothing that is there now is ever found again, and it is evicted like what is not used.
    pub(super) fn cut_off(&mut self) {
        self.roots.clear();
    }

    /// Takes the least recently used leaf out, if there is one without a lock; its blocks are the caller's then.
    pub(super) fn evict(&mut self) -> Option<Box<[BlockId]>> {
        let (_, id) = self.evictable.pop_first()?;
        self.unlink(id);
        let node = self.node_mut(id);
        let (blocks, parent) = (std::mem::take(&mut node.blocks), node.parent);
        node.tokens = Box::default();
        self.vacant.push(id);
        self.node_mut(parent).children -= 1;
        self.enter_leaves(parent);
        self.prune(parent);
        self.counts.nodes -= 1;
        self.counts.blocks -= blocks.len();
        Some(blocks)
    }

    /// Calls `each` with every node of which blocks match, and how many.
    fn walk(&self, root: NodeId, tokens: &[u32], mut each: impl FnMut(NodeId, usize)) -> Walk {
        let mut walk = Walk { node: root, blocks: 0, matched: 0 };
        let mut rest = tokens;
        while let Some(first) = rest.get(..self.tokens_per_block)
            && let Some(child) = self.child(walk.node, first)
        {
            let node = self.node(child);
            let same = common_prefix(&node.tokens, rest) / self.tokens_per_block;
            each(child, same);
            walk = Walk { node: child, blocks: same, matched: walk.matched + same };
            if same < node.blocks.len() {
                break;
            }
            rest = &rest[node.tokens.len()..];
        }
        walk
    }

    fn root(&mut self, namespace: &[u8]) -> NodeId {
        if let Some(root) = self.roots.get(namespace) {
            return *root;
        }
        let (tokens, blocks) = Default::default();
        let root = self.add(Node { tokens, blocks, parent: NONE, same_key: NONE, children: 0, locks: 0, used: 0 });
        let name: Arc<[u8]> = namespace.into();
        self.roots.insert(Arc::clone(&name), root);
        self.names.insert(root, name);
        root
    }

    /// Forgets a root that nothing hangs on, so that namespaces cost nothing when they are over.
    fn prune(&mut self, id: NodeId) {
        let Node { parent, children, locks, .. } = *self.node(id);
        if parent != NONE || children > 0 || locks > 0 {
            return;
        }
        if let Some(name) = self.names.remove(&id) {
            if self.roots.get(&name) == Some(&id) {
                self.roots.remove(&name);
            }
            self.vacant.push(id);
            self.counts.nodes -= 1;
        }
    }

    fn add(&mut self, node: Node) -> NodeId {
        self.counts.nodes += 1;
        if let Some(id) = self.vacant.pop() {
            *self.node_mut(id) = node;
            return id;
        }
        self.nodes.push(node);
        NodeId((self.nodes.len() - 1) as u32)
    }

    /// Makes a new node of a node's first blocks, above it; locks on the node are locks on both.
    fn split(&mut self, id: NodeId, blocks: usize) -> NodeId {
        self.unlink(id);
        let at = blocks * self.tokens_per_block;
        let node = self.node(id);
        let upper = Node {
            tokens: node.tokens[..at].into(),
            blocks: node.blocks[..blocks].into(),
            parent: node.parent,
            same_key: NONE,
            children: 1,
            locks: node.locks,
            used: node.used,
        };
        let (tokens, blocks) = (node.tokens[at..].into(), node.blocks[blocks..].into());
        let upper = self.add(upper);
        let lower = self.node_mut(id);
        (lower.tokens, lower.blocks, lower.parent) = (tokens, blocks, upper);
        self.link(upper);
        self.link(id);
        upper
    }

    fn change_locks(&mut self, node: NodeId, lock: bool) {
        let mut id = node;
        while id != NONE {
            if lock {
                self.leave_leaves(id);
            }
            let node = self.node_mut(id);
            node.locks = if lock { node.locks + 1 } else { node.locks - 1 };
            let (locks, blocks, parent) = (node.locks, node.blocks.len(), node.parent);
            match (lock, locks) {
                (true, 1) => self.counts.locked_blocks += blocks,
                (false, 0) => self.counts.locked_blocks -= blocks,
                _ => {}
            }
            if !lock {
                self.enter_leaves(id);
            }
            if parent == NONE {
                self.prune(id);
            }
            id = parent;
        }
    }

    fn is_evictable(&self, id: NodeId) -> bool {
        let node = self.node(id);
        node.children == 0 && node.locks == 0 && node.parent != NONE
    }

    /// Lists a node for eviction if it can be evicted.
    fn enter_leaves(&mut self, id: NodeId) {
        if self.is_evictable(id) {
            self.evictable.insert((self.node(id).used, id));
        }
    }

    fn leave_leaves(&mut self, id: NodeId) {
        if self.is_evictable(id) {
            self.evictable.remove(&(self.node(id).used, id));
        }
    }

    fn key(&self, parent: NodeId, first: &[u32]) -> u64 {
        self.keys.hash_one((parent.0, first))
    }

    fn key_of(&self, id: NodeId) -> u64 {
        let node = self.node(id);
        self.key(node.parent, &node.tokens[..self.tokens_per_block])
    }

    fn child(&self, parent: NodeId, first: &[u32]) -> Option<NodeId> {
        let mut id = *self.children.get(&self.key(parent, first))?;
        while id != NONE {
            let node = self.node(id);
            if node.parent == parent && node.tokens.starts_with(first) {
                return Some(id);
            }
            id = node.same_key;
        }
        None
    }

    fn link(&mut self, id: NodeId) {
        let key = self.key_of(id);
        self.node_mut(id).same_key = self.children.insert(key, id).unwrap_or(NONE);
    }

    fn unlink(&mut self, id: NodeId) {
        let key = self.key_of(id);
        let next = std::mem::replace(&mut self.node_mut(id).same_key, NONE);
        let Some(head) = self.children.get_mut(&key) else { return };
        if *head != id {
            let mut before = *head;
            while self.node(before).same_key != id {
                before = self.node(before).same_key;
            }
            self.node_mut(before).same_key = next;
        } else if next == NONE {
            self.children.remove(&key);
        } else {
            *head = next;
        }
    }

    fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.0 as usize]
    }

    fn node_mut(&mut self, id: NodeId) -> &mut Node {
        &mut self.nodes[id.0 as usize]
    }
}

/// Items that are equal from the start; the compiler compares whole runs of them at once.
fn common_prefix(left: &[u32], right: &[u32]) -> usize {
    let len = left.len().min(right.len());
    let runs = left[..len].chunks(RUN_TOKENS).zip(right[..len].chunks(RUN_TOKENS));
    let same = RUN_TOKENS * runs.take_while(|(left, right)| left == right).count();
    let rest = left[same.min(len)..len].iter().zip(&right[same.min(len)..len]);
    same.min(len) + rest.take_while(|(left, right)| left == right).count()
}

const RUN_TOKENS: usize = 32;

/// Passes on keys that are hashes already.
#[derive(Default)]
struct Ready(u64);

impl Hasher for Ready {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        // Only whole keys come, by `write_u64`.
        bytes.iter().for_each(|byte| self.0 = self.0 << 8 | u64::from(*byte));
    }

    fn write_u64(&mut self, key: u64) {
        self.0 = key;
    }
}
