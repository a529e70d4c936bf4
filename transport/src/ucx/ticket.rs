//! What UCX calls back with: how many of a batch of operations are under way, and how they ended.
//!
//! A ticket owns no memory that UCX reads or writes: the link's tables do, until the ticket says that nothing is under way, or
//! the worker is destroyed.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use ucx_sys::{UCS_OK, ucs_status_t};

/// Numbers the tickets of a link.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) struct TicketId(pub(super) u64);

/// What all tickets of a link share.
#[derive(Default)]
pub(super) struct Counts {
    /// Operations that UCX has not ended.
    under_way: Cell<usize>,
    /// Operations that ended, ever.
    ended: Cell<u64>,
    /// Tickets of which the last operation ended.
    done: RefCell<Vec<TicketId>>,
}

impl Counts {
    pub(super) fn under_way(&self) -> usize {
        self.under_way.get()
    }

    pub(super) fn ended(&self) -> u64 {
        self.ended.get()
    }

    pub(super) fn take_done(&self) -> Vec<TicketId> {
        self.done.take()
    }
}

pub(super) struct Ticket {
    id: TicketId,
    counts: Rc<Counts>,
    under_way: Cell<usize>,
    /// No more operations will be added.
    is_sealed: Cell<bool>,
    status: Cell<ucs_status_t>,
}

impl Ticket {
    pub(super) fn new(id: TicketId, counts: &Rc<Counts>) -> Rc<Self> {
        Rc::new(Self {
            id,
            counts: Rc::clone(counts),
            under_way: Cell::new(0),
            is_sealed: Cell::new(false),
            status: Cell::new(UCS_OK),
        })
    }

    /// An operation is handed to UCX.
    pub(super) fn begin(&self) {
        self.under_way.set(self.under_way.get() + 1);
        self.counts.under_way.set(self.counts.under_way.get() + 1);
    }

    /// An operation ended.
    pub(super) fn end(&self, status: ucs_status_t) {
        self.under_way.set(self.under_way.get().saturating_sub(1));
        self.counts.under_way.set(self.counts.under_way.get().saturating_sub(1));
        self.counts.ended.set(self.counts.ended.get() + 1);
        if status != UCS_OK && self.status.get() == UCS_OK {
            self.status.set(status);
        }
        self.tell();
    }

    /// No more operations follow: once the last one ended, the ticket is done.
    pub(super) fn seal(&self) {
        if !self.is_sealed.replace(true) {
            self.tell();
        }
    }

    pub(super) fn under_way(&self) -> usize {
        self.under_way.get()
    }

    pub(super) fn is_done(&self) -> bool {
        self.is_sealed.get() && self.under_way.get() == 0
    }

    /// How the first operation that failed failed, or `UCS_OK`.
    pub(super) fn status(&self) -> ucs_status_t {
        self.status.get()
    }

    fn tell(&self) {
        if self.is_done() {
            self.counts.done.borrow_mut().push(self.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_is_done_once_when_it_is_sealed_and_nothing_is_under_way() {
        let counts = Rc::new(Counts::default());
        let ticket = Ticket::new(TicketId(7), &counts);
        ticket.begin();
        ticket.end(UCS_OK);
        assert!(counts.take_done().is_empty(), "more may follow");
        ticket.begin();
        ticket.begin();
        ticket.seal();
        ticket.end(-3);
        assert_eq!((counts.under_way(), ticket.is_done()), (1, false));
        ticket.end(-16);
        assert_eq!(counts.take_done(), [TicketId(7)]);
        ticket.seal();
        assert!(counts.take_done().is_empty());
        assert_eq!((ticket.status(), counts.ended(), counts.under_way()), (-3, 3, 0));
    }
}
