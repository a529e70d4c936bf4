//! Blocks that come back to a pool from other threads come back once, in every order of the threads' steps.
//!
//! The file under test is compiled here once more, with loom's primitives in place of the standard library's.

mod sync {
    pub(super) use loom::sync::Mutex;
    pub(super) use loom::sync::atomic::{AtomicBool, Ordering};
    pub(super) use std::sync::PoisonError;
}

#[path = "../src/pool/returns.rs"]
mod returns;

use loom::sync::Arc;
use loom::thread;

use returns::Returns;

#[test]
fn what_threads_give_back_is_taken_in_once_in_every_order() {
    loom::model(|| {
        let returns = Arc::new(Returns::default());
        let holders: Vec<_> = [vec![1, 2], vec![3]]
            .into_iter()
            .map(|blocks| {
                let returns = Arc::clone(&returns);
                thread::spawn(move || blocks.into_iter().for_each(|block| returns.push(block)))
            })
            .collect();
        // The pool's thread, between two calls and again; whatever it does not see yet comes at the next one.
        let mut taken = returns.take();
        taken.extend(returns.take());
        holders.into_iter().for_each(|holder| holder.join().unwrap());
        taken.extend(returns.take());
        let order = |block| taken.iter().position(|&other| other == block);
        assert!(order(1) < order(2), "one holder's blocks come in its order: {taken:?}");
        taken.sort_unstable();
        assert_eq!(taken, [1, 2, 3]);
    });
}

/// A pool that looked at the flag alone, and cleared it outside of the lock, would lose what came in between.
#[test]
#[should_panic(expected = "lost")]
fn the_flag_cleared_outside_of_the_lock_loses_blocks() {
    use sync::{AtomicBool, Mutex, Ordering};
    loom::model(|| {
        let shared = Arc::new((AtomicBool::new(false), Mutex::new(Vec::new())));
        let of_holder = Arc::clone(&shared);
        let holder = thread::spawn(move || {
            of_holder.1.lock().unwrap().push(1);
            of_holder.0.store(true, Ordering::Release);
        });
        let take = || {
            if !shared.0.load(Ordering::Acquire) {
                return Vec::new();
            }
            let taken = std::mem::take(&mut *shared.1.lock().unwrap());
            shared.0.store(false, Ordering::Release);
            taken
        };
        let mut taken: Vec<u32> = take();
        let second = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                shared.1.lock().unwrap().push(2);
                shared.0.store(true, Ordering::Release);
            })
        };
        taken.extend(take());
        holder.join().unwrap();
        second.join().unwrap();
        taken.extend(take());
        assert_eq!(taken.len(), 2, "lost");
    });
}
