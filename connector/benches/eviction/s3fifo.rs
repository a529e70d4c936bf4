//! S3-FIFO: a small queue for what was seen once, a main queue, and a memory of what left the small one.
//!
//! Source: Yang, Zhang, Qiu, Yue, Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023, algorithm 1.

use std::collections::{HashMap, HashSet, VecDeque};

pub(crate) struct S3Fifo {
    capacity: usize,
    /// Newest first.
    small: VecDeque<u64>,
    main: VecDeque<u64>,
    /// What left the small queue, newest first, as many as the main queue holds.
    ghost: VecDeque<u64>,
    is_ghost: HashSet<u64>,
    /// How often a cached block was used since it came, at most 3.
    uses: HashMap<u64, u8>,
}

impl S3Fifo {
    pub(crate) fn new(capacity: usize) -> Self {
        let (small, main, ghost, is_ghost, uses) = Default::default();
        Self { capacity, small, main, ghost, is_ghost, uses }
    }

    pub(crate) fn has(&self, block: u64) -> bool {
        self.uses.contains_key(&block)
    }

    /// A block is used: it is counted, or brought in.
    pub(crate) fn touch(&mut self, block: u64) {
        if let Some(uses) = self.uses.get_mut(&block) {
            *uses = (*uses + 1).min(3);
            return;
        }
        while self.uses.len() >= self.capacity {
            self.evict();
        }
        if self.is_ghost.remove(&block) {
            self.main.push_front(block);
        } else {
            self.small.push_front(block);
        }
        self.uses.insert(block, 0);
    }

    fn evict(&mut self) {
        // A tenth is small.
        if self.small.len() * 10 >= self.capacity || self.main.is_empty() {
            self.evict_small();
        } else {
            self.evict_main();
        }
    }

    fn evict_small(&mut self) {
        while let Some(block) = self.small.pop_back() {
            if self.uses.get(&block).is_some_and(|&uses| uses > 1) {
                self.uses.insert(block, 0);
                self.main.push_front(block);
                continue;
            }
            self.uses.remove(&block);
            self.remember(block);
            return;
        }
        self.evict_main();
    }

    fn evict_main(&mut self) {
        while let Some(block) = self.main.pop_back() {
            match self.uses.get_mut(&block) {
                Some(uses) if *uses > 0 => {
                    *uses -= 1;
                    self.main.push_front(block);
                }
                _ => {
                    self.uses.remove(&block);
                    return;
                }
            }
        }
    }

    fn remember(&mut self, block: u64) {
        if self.is_ghost.insert(block) {
            self.ghost.push_front(block);
        }
        while self.ghost.len() > self.capacity * 9 / 10 {
            if let Some(old) = self.ghost.pop_back() {
                self.is_ghost.remove(&old);
            }
        }
    }
}
