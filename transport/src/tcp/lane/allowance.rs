//! How much a lane may move before the others have their turn.

/// What one direction of a lane may move in a round, before the thread looks at its other lanes. One call may move more: that is
/// counted against the next rounds, so that each lane of a busy thread gets the same (deficit round robin). With 64 busy peers
/// (`kvferry bench --peers 64`, on 2 busy cores) the one that got most got 2 to 11 % more than the one that got least, for 0.25 CPU
/// seconds a GB; with 256 KiB 2 to 8 % for 0.29, with 1 MiB 5 to 20 % for 0.24, and with 4 MiB 47 to 75 %.
const TURN_BYTES: u64 = 512 << 10;
/// What a call counts at least: short frames take time, too.
const CALL_BYTES: u64 = TURN_BYTES / 16;

/// What one direction of a lane may still move.
#[derive(Default)]
pub(super) struct Allowance {
    left: i64,
    round: u64,
}

impl Allowance {
    /// Adds a turn for each round since the last one; what was not used is lost, what was overdrawn is paid back.
    pub(super) fn begin(&mut self, round: u64) {
        let turns = i64::try_from(round - self.round).unwrap_or(i64::MAX);
        self.left = self.left.saturating_add(turns.saturating_mul(TURN_BYTES as i64)).min(TURN_BYTES as i64);
        self.round = round;
    }

    pub(super) fn is_used_up(&self) -> bool {
        self.left <= 0
    }

    pub(super) fn spend(&mut self, bytes: u64) {
        self.left -= bytes.max(CALL_BYTES) as i64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Calls of any size: over many rounds each lane moves the same, whatever it moves at once.
    #[test]
    fn lanes_that_always_can_go_on_move_the_same_in_the_end() {
        let sizes = [CALL_BYTES, 100_000, TURN_BYTES, 1 << 20];
        let mut lanes = sizes.map(|bytes| (bytes, Allowance::default(), 0));
        let (mut round, rounds) = (0, 1000);
        while round < rounds {
            round += 1;
            for (bytes, allowance, moved) in &mut lanes {
                allowance.begin(round);
                while !allowance.is_used_up() {
                    allowance.spend(*bytes);
                    *moved += *bytes;
                }
            }
        }
        for (bytes, _, moved) in lanes {
            assert!(moved.abs_diff(rounds * TURN_BYTES) <= bytes, "{moved} in calls of {bytes}");
        }
    }

    #[test]
    fn what_was_not_used_is_not_saved_and_what_was_overdrawn_is_paid_back_while_others_move() {
        let mut allowance = Allowance::default();
        allowance.begin(100);
        assert_eq!(allowance.left, TURN_BYTES as i64);
        allowance.spend(4 * TURN_BYTES);
        allowance.begin(102);
        assert!(allowance.is_used_up());
        allowance.begin(104);
        assert!(!allowance.is_used_up());
        allowance.begin(1000);
        (0..16).for_each(|_| allowance.spend(1));
        assert!(allowance.is_used_up(), "calls count, however little they move");
    }
}
