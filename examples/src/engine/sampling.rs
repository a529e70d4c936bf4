//! Chooses a token from logits.

use super::step::Sampling;

/// Chooses the token that follows position `position`.
///
/// A draw depends on the logits, the seed and the position only: not on the batch, and not on what was drawn before.
///
/// # Panics
/// If there are no logits.
#[must_use]
pub fn choose(logits: &[f32], sampling: Sampling, position: u32) -> u32 {
    match sampling {
        Sampling::Greedy => greedy(logits),
        Sampling::Temperature { temperature, seed } => draw(logits, temperature, seed, position),
    }
}

fn greedy(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (token, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = token;
        }
    }
    best as u32
}

fn draw(logits: &[f32], temperature: f32, seed: u64, position: u32) -> u32 {
    let highest = logits[greedy(logits) as usize];
    let weight = |logit: f32| f64::from((logit - highest) / temperature).exp();
    let total: f64 = logits.iter().map(|&logit| weight(logit)).sum();
    let mut left = unit(seed, position) * total;
    for (token, &logit) in logits.iter().enumerate() {
        left -= weight(logit);
        if left < 0.0 {
            return token as u32;
        }
    }
    // Rounding left a little over: the last token that can be drawn at all.
    greedy(logits)
}

/// A number in 0..1 from a seed and a counter (splitmix64's finaliser).
fn unit(seed: u64, position: u32) -> f64 {
    let mut z = seed.wrapping_add((u64::from(position) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greedy_takes_the_first_of_the_highest() {
        assert_eq!(choose(&[0.5, 2.0, -1.0, 2.0], Sampling::Greedy, 0), 1);
        assert_eq!(choose(&[f32::NAN, 1.0], Sampling::Greedy, 0), 0);
    }

    #[test]
    fn draws_follow_the_softmax_and_repeat_with_the_seed() {
        let logits = [0.0, (3.0f32).ln(), f32::NEG_INFINITY];
        let sampling = |seed| Sampling::Temperature { temperature: 1.0, seed };
        let draws: Vec<u32> = (0..4000).map(|position| choose(&logits, sampling(7), position)).collect();
        let ones = draws.iter().filter(|&&token| token == 1).count();
        assert!((2880..3120).contains(&ones), "{ones} of 4000, 3000 expected");
        assert!(!draws.contains(&2));
        assert_eq!(draws, (0..4000).map(|position| choose(&logits, sampling(7), position)).collect::<Vec<_>>());
        assert_ne!(draws, (0..4000).map(|position| choose(&logits, sampling(8), position)).collect::<Vec<_>>());
    }
}
