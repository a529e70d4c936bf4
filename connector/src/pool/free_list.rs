//! The free blocks in the order in which they are reused: a doubly linked list inside an array, so that any block can be taken
//! out in O(1) and nothing is allocated after the start.

/// No block: the block is not in the list.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Link {
    previous: u32,
    next: u32,
}

const UNLINKED: Link = Link { previous: NONE, next: NONE };

/// A list of distinct numbers below a fixed limit.
pub(super) struct FreeList {
    /// One per number, and a last one that closes the ring: its `next` is the head, its `previous` the tail.
    links: Vec<Link>,
    len: usize,
}

impl FreeList {
    /// Lists `0..limit` in order; `limit` is below `u32::MAX`.
    pub(super) fn full(limit: u32) -> Self {
        let mut list = Self { links: vec![UNLINKED; limit as usize + 1], len: 0 };
        list.links[limit as usize] = Link { previous: limit, next: limit };
        for index in 0..limit {
            list.push_back(index);
        }
        list
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn contains(&self, index: u32) -> bool {
        self.links[index as usize].next != NONE
    }

    pub(super) fn push_front(&mut self, index: u32) {
        let ring = self.ring();
        self.insert_after(ring, index);
    }

    pub(super) fn push_back(&mut self, index: u32) {
        let tail = self.links[self.ring() as usize].previous;
        self.insert_after(tail, index);
    }

    pub(super) fn pop_front(&mut self) -> Option<u32> {
        let head = self.links[self.ring() as usize].next;
        (head != self.ring()).then(|| {
            self.remove(head);
            head
        })
    }

    /// Takes a number out, wherever it is; one that is not listed stays so.
    pub(super) fn remove(&mut self, index: u32) {
        if !self.contains(index) {
            return;
        }
        let Link { previous, next } = std::mem::replace(&mut self.links[index as usize], UNLINKED);
        self.links[previous as usize].next = next;
        self.links[next as usize].previous = previous;
        self.len -= 1;
    }

    fn insert_after(&mut self, previous: u32, index: u32) {
        debug_assert!(!self.contains(index), "{index} is listed twice");
        let next = self.links[previous as usize].next;
        self.links[index as usize] = Link { previous, next };
        self.links[previous as usize].next = index;
        self.links[next as usize].previous = index;
        self.len += 1;
    }

    /// The number that closes the ring.
    fn ring(&self) -> u32 {
        u32::try_from(self.links.len() - 1).unwrap_or(NONE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drain(list: &mut FreeList) -> Vec<u32> {
        std::iter::from_fn(|| list.pop_front()).collect()
    }

    #[test]
    fn numbers_leave_in_order_and_from_the_middle() {
        let mut list = FreeList::full(5);
        for index in [2, 0, 4, 2] {
            list.remove(index);
        }
        assert_eq!(list.len(), 2);
        list.push_back(0);
        list.push_front(4);
        assert_eq!(drain(&mut list), [4, 1, 3, 0]);
        assert_eq!((list.len(), list.pop_front()), (0, None));
        list.push_front(2);
        assert_eq!(drain(&mut list), [2]);
    }
}
