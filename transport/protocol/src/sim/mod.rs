//! A seeded simulator: whole clusters of the machines, through whatever may go wrong. After every step the invariants of a transfer
//! are checked:
//!
//! 1. no byte lands in a page that is not granted to it, and none after the fence;
//! 2. one verdict a side, in a legal pair, within its deadline; one end a request on each engine, when every rank has spoken;
//! 3. bytes are visible only after their digest matched, are right, and do not change after;
//! 4. every block, lease and grant is returned, and none is read or freed while in use;
//! 5. nothing of an old incarnation is accepted, and no generation is used twice;
//! 6. only durations cross the wire (each rank's clock has its own epoch and speed, and may jump);
//! 7. every queue keeps its limit;
//! 8. what a failed transfer calls good is right.
//!
//! A cluster is up to four prefill and four decode engines of up to four ranks each. A request is a set of parts: each decode rank
//! takes each of its heads from one prefill rank, and each such part is a transfer of its own. Decode also offers blocks of its answers,
//! which prefill takes or refuses. What goes wrong: cuts, partitions one
//! way and both ways, slow readers, stopped processes whose posted bytes land later or not, crashes with a restart in another version,
//! clocks that run apart and jump, words said again, twice, or to the wrong side, changed bytes, cancels, preemption with blocks that
//! are used again at once, pools that are too small, and ambushes: something done to a machine the moment it is in a certain state.
//! In some runs one engine lies: it is authenticated, and says and writes what it likes. Then the invariants are those of its peers, but
//! that nobody can know what its own bytes should be.
//!
//! One run in ten has fair weather: only faults that a transfer must survive, and then every transfer must be done.
//!
//! The same seed gives the same run. The drivers here follow the rules in [`transfer`](crate::transfer) to the letter, so they
//! are also the shortest example of one.

mod checks;
mod driver;
mod faults;
mod liars;
mod lies;
mod links;
mod load;
mod memory;
mod node;
mod outputs;
mod plan;
mod report;
mod rng;
mod scheduler;
mod spares;
mod versions;
mod visits;
mod world;
mod writes;

pub use crate::transfer::Planted;
pub use report::{DriverBug, Options, Report, Violation};
pub use visits::{Pair, Visits};
pub use world::run;
