//! A sender's promise not to reuse blocks.
//!
//! States: `Held` until it is released or runs out; then `Draining` while posts still read the blocks; then `Released`.
//! Running out is not release: the blocks are free only when the last read ended.

use std::time::Duration;

#[cfg(feature = "sim")]
use super::table::LeaseInput;
use super::table::LeaseState;
use super::time::Time;

/// One promise over the blocks of one transfer to one peer endpoint.
#[derive(Debug)]
#[cfg_attr(feature = "sim", derive(Clone))]
pub struct Lease {
    state: State,
    /// It ends by then, however often it is renewed.
    latest: Time,
    /// Posts that read the blocks.
    reads: u32,
    #[cfg(feature = "sim")]
    visits: LeaseVisits,
}

/// How often a lease was given each input in each state.
#[cfg(feature = "sim")]
pub type LeaseVisits = [[u32; LeaseInput::ALL.len()]; LeaseState::ALL.len()];

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Held { expires: Time },
    Draining,
    Released,
}

/// The lease is over: nothing more may read the blocks under it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the lease is over: the blocks may be reused once the reads in flight end")]
pub struct LeaseOver;

impl Lease {
    /// Holds the blocks for `ttl` from now, and for at most `max` in all.
    #[must_use]
    pub fn new(now: Time, ttl: Duration, max: Duration) -> Self {
        Self {
            state: State::Held { expires: now + ttl.min(max) },
            latest: now + max,
            reads: 0,
            #[cfg(feature = "sim")]
            visits: LeaseVisits::default(),
        }
    }

    /// Holds the blocks for at least `ttl` from now, within the whole lease's limit; never for less than before.
    ///
    /// # Errors
    /// [`LeaseOver`].
    pub fn renew(&mut self, now: Time, ttl: Duration) -> Result<(), LeaseOver> {
        #[cfg(feature = "sim")]
        self.visit(LeaseInput::Renew);
        match &mut self.state {
            State::Held { expires } => {
                *expires = (now + ttl).min(self.latest).max(*expires);
                Ok(())
            }
            State::Draining | State::Released => Err(LeaseOver),
        }
    }

    /// Notes that a post reads the blocks.
    ///
    /// # Errors
    /// [`LeaseOver`]: the post must not be made.
    pub fn begin_read(&mut self) -> Result<(), LeaseOver> {
        #[cfg(feature = "sim")]
        self.visit(LeaseInput::BeginRead);
        match self.state {
            State::Held { .. } => {
                self.reads += 1;
                Ok(())
            }
            State::Draining | State::Released => Err(LeaseOver),
        }
    }

    /// Notes that a post ended. Calls beyond [`Lease::begin_read`] do nothing.
    pub fn end_read(&mut self) {
        #[cfg(feature = "sim")]
        self.visit(LeaseInput::EndRead);
        self.reads = self.reads.saturating_sub(1);
        match self.state {
            State::Draining if self.reads == 0 => self.state = State::Released,
            State::Held { .. } | State::Draining | State::Released => {}
        }
    }

    /// Ends the promise: nothing more reads the blocks, and they are free when the last read ends. Again does nothing.
    pub fn release(&mut self) {
        #[cfg(feature = "sim")]
        self.visit(LeaseInput::Release);
        match self.state {
            State::Held { .. } if self.reads == 0 => self.state = State::Released,
            State::Held { .. } => self.state = State::Draining,
            State::Draining | State::Released => {}
        }
    }

    /// When it runs out, unless renewed; `None` once it is over.
    #[must_use]
    pub const fn expires(&self) -> Option<Time> {
        match self.state {
            State::Held { expires } => Some(expires),
            State::Draining | State::Released => None,
        }
    }

    /// Whether it is held and its time has come: then [`Lease::release`] it.
    #[must_use]
    pub fn has_run_out(&self, now: Time) -> bool {
        self.expires().is_some_and(|expires| expires <= now)
    }

    /// Its state.
    #[must_use]
    pub const fn kind(&self) -> LeaseState {
        match self.state {
            State::Held { .. } => LeaseState::Held,
            State::Draining => LeaseState::Draining,
            State::Released => LeaseState::Released,
        }
    }

    /// How often it was given each input in each state.
    #[cfg(feature = "sim")]
    #[must_use]
    pub const fn visits(&self) -> &LeaseVisits {
        &self.visits
    }

    #[cfg(feature = "sim")]
    const fn visit(&mut self, input: LeaseInput) {
        let count = &mut self.visits[self.kind() as usize][input as usize];
        *count = count.saturating_add(1);
    }

    /// Whether no read is left and none will come: the blocks are free.
    #[must_use]
    pub fn is_released(&self) -> bool {
        self.state == State::Released
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(10);
    const MAX: Duration = Duration::from_secs(25);

    fn at(seconds: u64) -> Time {
        Time::since_epoch(Duration::from_secs(seconds))
    }

    #[derive(Clone, Copy)]
    enum Step {
        Begin,
        End,
        Release,
    }

    #[test]
    fn blocks_are_free_only_when_the_lease_is_over_and_no_read_is_in_flight() {
        use Step::{Begin, End, Release};
        for (name, steps, free) in [
            ("held, idle", vec![], false),
            ("released, idle", vec![Release], true),
            ("released while a post reads", vec![Begin, Release], false),
            ("released, then the post ends", vec![Begin, Release, End], true),
            ("released, one of two posts ended", vec![Begin, Begin, Release, End], false),
            ("all posts ended, still held", vec![Begin, End], false),
            ("a post after the release is refused", vec![Release, Begin], true),
            ("a post while draining is refused and not counted", vec![Begin, Release, Begin, End], true),
            ("an end too many frees nothing", vec![End, Begin, Release], false),
        ] {
            let mut lease = Lease::new(at(0), TTL, MAX);
            for step in steps {
                match step {
                    Begin => drop(lease.begin_read()),
                    End => lease.end_read(),
                    Release => lease.release(),
                }
            }
            assert_eq!(lease.is_released(), free, "{name}");
        }
    }

    #[test]
    fn a_lease_is_renewed_up_to_its_limit_and_never_shortened() {
        let mut lease = Lease::new(at(0), TTL, MAX);
        for (now, ttl, expires) in [(5, 10, 15), (6, 1, 15), (12, 10, 22), (20, 10, 25), (24, 10, 25)] {
            lease.renew(at(now), Duration::from_secs(ttl)).unwrap();
            assert_eq!(lease.expires(), Some(at(expires)), "renewed at {now} for {ttl}");
        }
        assert!(!lease.has_run_out(at(24)));
        assert!(lease.has_run_out(at(25)));
        lease.release();
        assert_eq!(lease.renew(at(25), TTL), Err(LeaseOver));
    }
}
