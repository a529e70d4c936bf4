//! The parts of a Llama that are not matrix products: one row at a time, in a fixed order of operations.
//!
//! Nothing here looks at another row, so a token's numbers have the same bits whatever is computed beside it.

/// Writes `x / rms(x) * weight` into `out`; the sum of squares runs from the first number to the last in eight lanes.
///
/// `x`, `weight`, `out`: f32, one row of equal length.
///
/// # Panics
/// If the lengths differ.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    assert_eq!((x.len(), x.len()), (weight.len(), out.len()), "a norm's rows have one length");
    let mut lanes = [0.0f32; 8];
    for chunk in x.chunks(8) {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane += value * value;
        }
    }
    let sum = ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
    let scale = 1.0 / (sum / x.len() as f32 + eps).sqrt();
    for ((out, value), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = value * scale * weight;
    }
}

/// Writes `silu(gate) * up` into `gate`.
///
/// # Panics
/// If the lengths differ.
pub fn swiglu(gate: &mut [f32], up: &[f32]) {
    assert_eq!(gate.len(), up.len(), "a gate and what it gates have one length");
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = *gate / (1.0 + (-*gate).exp()) * up;
    }
}

/// Adds `delta` to `x`.
///
/// # Panics
/// If the lengths differ.
pub fn add(x: &mut [f32], delta: &[f32]) {
    assert_eq!(x.len(), delta.len(), "what is added has the length of what it is added to");
    for (x, delta) in x.iter_mut().zip(delta) {
        *x += delta;
    }
}

/// Rotary position embedding of neighbouring pairs (2i, 2i + 1), as GGUF files of Llamas store their Q and K rows.
#[derive(Clone, Debug)]
pub struct Rope {
    frequencies: Vec<f64>,
}

impl Rope {
    /// `dims` numbers of each head are rotated, pair i by `position * theta^(-2i / dims) / factors[i]`.
    ///
    /// # Panics
    /// If `factors` are given and there are not `dims / 2` of them.
    #[must_use]
    pub fn new(theta: f32, dims: usize, factors: Option<&[f32]>) -> Self {
        let pairs = dims / 2;
        assert!(factors.is_none_or(|factors| factors.len() == pairs), "one factor a pair");
        let frequencies = (0..pairs)
            .map(|pair| {
                let frequency = f64::from(theta).powf(-2.0 * pair as f64 / dims as f64);
                frequency / factors.map_or(1.0, |factors| f64::from(factors[pair]))
            })
            .collect();
        Self { frequencies }
    }

    /// Cosine and sine of each pair's angle at `position`.
    #[must_use]
    pub fn angles(&self, position: u32) -> Vec<(f32, f32)> {
        let angle = |frequency: &f64| (f64::from(position) * frequency).sin_cos();
        self.frequencies.iter().map(angle).map(|(sin, cos)| (cos as f32, sin as f32)).collect()
    }

    /// Rotates each head of one row; `angles` come from [`Rope::angles`] for the row's position.
    pub fn rotate(row: &mut [f32], head_dim: usize, angles: &[(f32, f32)]) {
        for head in row.chunks_exact_mut(head_dim) {
            for (pair, &(cos, sin)) in head.chunks_exact_mut(2).zip(angles) {
                let (a, b) = (pair[0], pair[1]);
                pair[0] = a * cos - b * sin;
                pair[1] = a * sin + b * cos;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_norm_scales_to_unit_mean_square() {
        let x: Vec<f32> = (1..=20).map(|i| i as f32 * if i % 2 == 0 { 1.0 } else { -1.0 }).collect();
        let mut out = vec![0.0; 20];
        rms_norm(&x, &[1.0; 20], 1e-6, &mut out);
        let mean_square = out.iter().map(|v| v * v).sum::<f32>() / 20.0;
        assert!((mean_square - 1.0).abs() < 1e-5, "{mean_square}");
        assert!((out[1] / out[0] - x[1] / x[0]).abs() < 1e-6);
    }

    #[test]
    fn rotation_keeps_lengths_and_turns_by_the_distance_of_positions() {
        let rope = Rope::new(10_000.0, 8, None);
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
        let at = |position: u32, row: &[f32]| {
            let mut row = row.to_vec();
            Rope::rotate(&mut row, 8, &rope.angles(position));
            row
        };
        let (q, k) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], [2.0, -1.0, 0.5, 3.0, 1.0, -2.0, 4.0, 1.5]);
        assert!((dot(&at(9, &q), &at(9, &q)) - dot(&q, &q)).abs() < 1e-3);
        assert!((dot(&at(9, &q), &at(4, &k)) - dot(&at(105, &q), &at(100, &k))).abs() < 1e-3);
    }

    #[test]
    fn a_head_that_is_rotated_in_part_keeps_the_rest() {
        let rope = Rope::new(10_000.0, 4, Some(&[1.0, 8.0]));
        let mut row = [1.0f32; 8];
        Rope::rotate(&mut row, 8, &rope.angles(3));
        assert_eq!(row[4..], [1.0; 4]);
        assert!(row[..4].iter().all(|&v| v != 1.0));
    }

    #[test]
    fn swiglu_gates() {
        let mut gate = [0.0, 10.0, -10.0];
        swiglu(&mut gate, &[5.0, 2.0, 2.0]);
        assert!(gate[0] == 0.0 && (gate[1] - 20.0).abs() < 0.01 && gate[2].abs() < 0.01, "{gate:?}");
    }
}
