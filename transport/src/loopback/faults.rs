//! Which frames break, drawn from a seed.

/// How often something breaks, in parts per million of the frames.
#[derive(Clone, Copy, Debug, Default)]
pub struct FaultRates {
    /// A frame comes after some that were sent later, so that writes end in another order.
    pub delay: u32,
    /// A frame comes twice; the second time it is refused.
    pub duplicate: u32,
    /// The session ends in the middle of a frame.
    pub cut: u32,
    /// One bit of a frame's payload changes on the way.
    pub flip: u32,
    /// A write lands, and the session ends before the sender learns of it.
    pub lose_ack: u32,
}

/// What goes wrong with the frames that one endpoint sends: the same seed and the same frames give the same faults.
#[derive(Clone, Copy, Debug, Default)]
pub struct FaultPlan {
    /// Where the draws begin.
    pub seed: u64,
    /// How often.
    pub rates: FaultRates,
}

impl FaultPlan {
    /// Nothing goes wrong.
    pub const NONE: Self = Self { seed: 0, rates: FaultRates { delay: 0, duplicate: 0, cut: 0, flip: 0, lose_ack: 0 } };
}

/// The faults of one frame.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Faults {
    /// After how many other frames it comes.
    pub(crate) delay: u32,
    pub(crate) duplicate: bool,
    pub(crate) cut: bool,
    pub(crate) flip: Option<u64>,
    pub(crate) lose_ack: bool,
}

pub(crate) struct Dice {
    state: u64,
    rates: FaultRates,
}

impl Dice {
    pub(crate) fn new(plan: FaultPlan) -> Self {
        Self { state: plan.seed, rates: plan.rates }
    }

    pub(crate) fn draw(&mut self) -> Faults {
        let rates = self.rates;
        // Always the same number of draws a frame, so that one rate does not shift the others.
        let delay = self.hit(rates.delay);
        let delay_frames = (self.next() % 8) as u32 + 1;
        let duplicate = self.hit(rates.duplicate);
        let cut = self.hit(rates.cut);
        let flip = self.hit(rates.flip);
        let flip_at = self.next();
        let lose_ack = self.hit(rates.lose_ack);
        Faults { delay: if delay { delay_frames } else { 0 }, duplicate, cut, flip: flip.then_some(flip_at), lose_ack }
    }

    fn hit(&mut self, per_million: u32) -> bool {
        self.next() % 1_000_000 < per_million.into()
    }

    /// splitmix64.
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}
