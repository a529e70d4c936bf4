//! The free blocks in the order in which they are reused: doubly linked lists inside an array, so that any block can be taken
//! out in O(1) and nothing is allocated after the start.

/// No block: the block is not in the list.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Link {
    previous: u32,
    next: u32,
}

const UNLINKED: Link = Link { previous: NONE, next: NONE };

/// When a free block's turn comes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Turn {
    /// In its order.
    Due,
    /// When none is due: soft-pinned blocks.
    Last,
}

/// Distinct numbers below a fixed limit, in two lists: the first is used up before the second.
pub(super) struct FreeList {
    /// One per number, and one per list that closes its ring: its `next` is the head, its `previous` the tail.
    links: Vec<Link>,
    len: usize,
}

impl FreeList {
    /// Lists `first..limit` in order; `limit` is far below `u32::MAX`.
    pub(super) fn full(first: u32, limit: u32) -> Self {
        let mut list = Self { links: vec![UNLINKED; limit as usize + RINGS], len: 0 };
        for turn in [Turn::Due, Turn::Last] {
            let ring = list.ring(turn);
            list.links[ring as usize] = Link { previous: ring, next: ring };
        }
        for index in first..limit {
            list.push_back(index, Turn::Due);
        }
        list
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn contains(&self, index: u32) -> bool {
        self.links[index as usize].next != NONE
    }

    /// Puts numbers that are not listed before all others, the last one first.
    pub(super) fn push_front_all(&mut self, indices: impl Iterator<Item = u32>) {
        let ring = self.ring(Turn::Due);
        let mut head = self.links[ring as usize].next;
        for index in indices {
            debug_assert!(!self.contains(index), "{index} is listed twice");
            self.links[index as usize] = Link { previous: ring, next: head };
            self.links[head as usize].previous = index;
            head = index;
            self.len += 1;
        }
        self.links[ring as usize].next = head;
    }

    pub(super) fn push_back(&mut self, index: u32, turn: Turn) {
        let tail = self.links[self.ring(turn) as usize].previous;
        self.insert_after(tail, index);
    }

    /// Takes the first `count` numbers, or as many as there are.
    pub(super) fn take(&mut self, count: usize, mut each: impl FnMut(u32)) {
        let mut left = count;
        for turn in [Turn::Due, Turn::Last] {
            let ring = self.ring(turn);
            let mut head = self.links[ring as usize].next;
            while left > 0 && head != ring {
                let Link { next, .. } = std::mem::replace(&mut self.links[head as usize], UNLINKED);
                each(head);
                head = next;
                left -= 1;
            }
            self.links[ring as usize].next = head;
            self.links[head as usize].previous = ring;
        }
        self.len -= count - left;
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

    /// The number that closes a list's ring.
    fn ring(&self, turn: Turn) -> u32 {
        (self.links.len() - RINGS) as u32 + turn as u32
    }
}

const RINGS: usize = 2;

#[cfg(test)]
mod tests {
    use super::*;

    fn drain(list: &mut FreeList) -> Vec<u32> {
        let mut taken = vec![];
        list.take(usize::MAX, |index| taken.push(index));
        taken
    }

    #[test]
    fn numbers_leave_in_order_and_from_the_middle() {
        let mut list = FreeList::full(0, 5);
        for index in [2, 0, 4, 2] {
            list.remove(index);
        }
        assert_eq!(list.len(), 2);
        list.push_back(0, Turn::Due);
        list.push_front_all([4].into_iter());
        assert_eq!(drain(&mut list), [4, 1, 3, 0]);
        assert_eq!((list.len(), drain(&mut list)), (0, vec![]));
        list.push_front_all([2, 0, 3].into_iter());
        list.take(1, |index| assert_eq!(index, 3));
        assert_eq!((list.len(), drain(&mut list)), (2, vec![0, 2]));

        let mut list = FreeList::full(3, 6);
        list.remove(4);
        list.push_back(4, Turn::Last);
        list.push_back(1, Turn::Last);
        list.push_back(2, Turn::Due);
        list.remove(5);
        assert_eq!(drain(&mut list), [3, 2, 4, 1]);
    }
}
