//! Matrix products with 8-bit weights, independent of the rows beside them.
//!
//! A product of a row and a weight column is one chain of fused multiply-adds over the inputs in ascending order, whatever the
//! number of rows, so its bits depend on nothing else: not on the batch, and not on the CPU (one without fused multiply-add
//! gets the same bits, slowly). Speed comes from doing many such chains side by side.

use pulp::{Arch, Simd, WithSimd};

/// Inputs that share a scale.
const BLOCK: usize = 32;
/// Outputs that lie side by side in memory: two vectors of AVX2.
const PANEL: usize = 16;
/// Rows of a full tile: with a panel, 12 of AVX2's 16 registers hold sums.
const TILE: usize = 6;
/// Rows that are packed at a time, so that they stay in the second-level cache while all weights pass by.
const GROUP: usize = 16 * TILE;

/// A weight matrix of `outputs` rows of `inputs` numbers, kept as 8-bit numbers with one f32 scale for each 32 of a row.
pub struct Linear {
    outputs: usize,
    inputs: usize,
    /// `[panel][input][PANEL]`; the last panel is filled up with zeros.
    weights: Vec<[i8; PANEL]>,
    /// `[panel][input / BLOCK][PANEL]`.
    scales: Vec<[f32; PANEL]>,
}

impl Linear {
    /// Quantises `weights`: f32 `[outputs, inputs]`, row-major.
    ///
    /// # Panics
    /// If `inputs` is no multiple of 32, or `weights` is not `outputs * inputs` long.
    #[must_use]
    pub fn quantise(weights: &[f32], outputs: usize, inputs: usize) -> Self {
        assert!(inputs.is_multiple_of(BLOCK), "rows of {inputs} numbers do not divide into blocks of {BLOCK}");
        assert_eq!(weights.len(), outputs * inputs, "weights of {outputs} x {inputs}");
        let panels = outputs.div_ceil(PANEL);
        let mut packed = vec![[0; PANEL]; panels * inputs];
        let mut scales = vec![[0.0; PANEL]; panels * inputs / BLOCK];
        for (output, row) in weights.chunks_exact(inputs).enumerate() {
            let (panel, column) = (output / PANEL, output % PANEL);
            for (block, numbers) in row.chunks_exact(BLOCK).enumerate() {
                let largest = numbers.iter().fold(0.0f32, |most, number| most.max(number.abs()));
                let scale = largest / 127.0;
                let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
                scales[panel * (inputs / BLOCK) + block][column] = scale;
                let first = panel * inputs + block * BLOCK;
                for (packed, number) in packed[first..].iter_mut().zip(numbers) {
                    packed[column] = (number * inverse).round() as i8;
                }
            }
        }
        Self { outputs, inputs, weights: packed, scales }
    }

    /// Numbers in a row of the result.
    #[must_use]
    pub const fn outputs(&self) -> usize {
        self.outputs
    }

    /// Numbers in a row of activations.
    #[must_use]
    pub const fn inputs(&self) -> usize {
        self.inputs
    }

    /// Computes `x * weights^T` into `out`: f32 `[rows, inputs]` to f32 `[rows, outputs]`.
    ///
    /// # Panics
    /// If the lengths are not those of an equal number of rows.
    pub fn forward(&self, x: &[f32], out: &mut [f32]) {
        let rows = x.len() / self.inputs;
        assert_eq!((x.len(), out.len()), (rows * self.inputs, rows * self.outputs), "whole rows in, whole rows out");
        for (x, out) in x.chunks(GROUP * self.inputs).zip(out.chunks_mut(GROUP * self.outputs)) {
            Arch::new().dispatch(Product { linear: self, x, out });
        }
    }

    /// Writes weight row `row` into `out`, as f32: how an embedding is looked up.
    ///
    /// # Panics
    /// If `row` is out of range or `out` is not `inputs` long.
    pub fn row(&self, row: usize, out: &mut [f32]) {
        assert_eq!((row < self.outputs, out.len()), (true, self.inputs), "row {row} of {}", self.outputs);
        let (panel, column) = (row / PANEL, row % PANEL);
        let weights = &self.weights[panel * self.inputs..];
        let scales = &self.scales[panel * (self.inputs / BLOCK)..];
        for ((out, weights), scale) in out.chunks_exact_mut(BLOCK).zip(weights.chunks_exact(BLOCK)).zip(scales) {
            for (out, weights) in out.iter_mut().zip(weights) {
                *out = f32::from(weights[column]) * scale[column];
            }
        }
    }
}

/// One call's work; a type of its own because only its method is compiled for the CPU's vector instructions.
struct Product<'a> {
    linear: &'a Linear,
    x: &'a [f32],
    out: &'a mut [f32],
}

impl WithSimd for Product<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { linear, x, out } = self;
        let inputs = linear.inputs;
        let full = x.len() / inputs / TILE;
        let (tiles, rest) = x.split_at(full * TILE * inputs);
        let packed: Vec<_> = tiles.chunks_exact(TILE * inputs).map(|tile| pack::<TILE>(tile, inputs)).collect();
        // Panels outside, tiles inside: a panel's weights stay in the first-level cache while the rows pass by.
        for panel in 0..linear.outputs.div_ceil(PANEL) {
            for (packed, out) in packed.iter().zip(out.chunks_exact_mut(TILE * linear.outputs)) {
                linear.store(panel, &sums(packed, linear.panel(panel)), out);
            }
        }
        let out = &mut out[full * TILE * linear.outputs..];
        // Few rows make few chains: take more panels side by side, so that the CPU has some to work on while others wait.
        match rest.len() / inputs {
            0 => {}
            1 => linear.tile_by_pairs::<1>(&pack(rest, inputs), out),
            2 => linear.tile_by_pairs::<2>(&pack(rest, inputs), out),
            3 => linear.tile::<3>(&pack(rest, inputs), out),
            4 => linear.tile::<4>(&pack(rest, inputs), out),
            _ => linear.tile::<5>(&pack(rest, inputs), out),
        }
    }
}

impl Linear {
    /// Weights and scales of a panel.
    #[inline(always)]
    fn panel(&self, panel: usize) -> (&[[i8; PANEL]], &[[f32; PANEL]]) {
        let blocks = self.inputs / BLOCK;
        let weights = &self.weights[panel * self.inputs..(panel + 1) * self.inputs];
        (weights, &self.scales[panel * blocks..(panel + 1) * blocks])
    }

    /// All outputs of `R` rows.
    #[inline(always)]
    fn tile<const R: usize>(&self, x: &[[f32; R]], out: &mut [f32]) {
        for panel in 0..self.outputs.div_ceil(PANEL) {
            self.store(panel, &sums(x, self.panel(panel)), out);
        }
    }

    /// All outputs of `R` rows, two panels at a time.
    #[inline(always)]
    fn tile_by_pairs<const R: usize>(&self, x: &[[f32; R]], out: &mut [f32]) {
        let panels = self.outputs.div_ceil(PANEL);
        for panel in (0..panels / 2 * 2).step_by(2) {
            let (a, b) = sums_of_pair(x, self.panel(panel), self.panel(panel + 1));
            self.store(panel, &a, out);
            self.store(panel + 1, &b, out);
        }
        if panels % 2 == 1 {
            self.store(panels - 1, &sums(x, self.panel(panels - 1)), out);
        }
    }

    #[inline(always)]
    fn store<const R: usize>(&self, panel: usize, sums: &[[f32; PANEL]; R], out: &mut [f32]) {
        let first = panel * PANEL;
        let columns = PANEL.min(self.outputs - first);
        for (sums, out) in sums.iter().zip(out.chunks_exact_mut(self.outputs)) {
            out[first..first + columns].copy_from_slice(&sums[..columns]);
        }
    }
}

type Panel<'a> = (&'a [[i8; PANEL]], &'a [[f32; PANEL]]);

#[inline(always)]
fn sums<const R: usize>(x: &[[f32; R]], (weights, scales): Panel<'_>) -> [[f32; PANEL]; R] {
    let mut sums = [[0.0f32; PANEL]; R];
    for ((x, weights), scale) in x.chunks_exact(BLOCK).zip(weights.chunks_exact(BLOCK)).zip(scales) {
        for (x, weights) in x.iter().zip(weights) {
            step(x, weights, scale, &mut sums);
        }
    }
    sums
}

#[inline(always)]
fn sums_of_pair<const R: usize>(x: &[[f32; R]], a: Panel<'_>, b: Panel<'_>) -> ([[f32; PANEL]; R], [[f32; PANEL]; R]) {
    let (mut sums_a, mut sums_b) = ([[0.0f32; PANEL]; R], [[0.0f32; PANEL]; R]);
    let a = a.0.chunks_exact(BLOCK).zip(a.1);
    let b = b.0.chunks_exact(BLOCK).zip(b.1);
    for ((x, a), b) in x.chunks_exact(BLOCK).zip(a).zip(b) {
        for ((x, weights_a), weights_b) in x.iter().zip(a.0).zip(b.0) {
            step(x, weights_a, a.1, &mut sums_a);
            step(x, weights_b, b.1, &mut sums_b);
        }
    }
    (sums_a, sums_b)
}

/// One input: one link of each chain.
#[inline(always)]
fn step<const R: usize>(x: &[f32; R], weights: &[i8; PANEL], scale: &[f32; PANEL], sums: &mut [[f32; PANEL]; R]) {
    let mut wide = [0.0f32; PANEL];
    for c in 0..PANEL {
        wide[c] = f32::from(weights[c]) * scale[c];
    }
    for r in 0..R {
        for c in 0..PANEL {
            sums[r][c] = x[r].mul_add(wide[c], sums[r][c]);
        }
    }
}

/// Turns `R` rows into one row of groups: `[R][inputs]` to `[inputs][R]`.
#[inline(always)]
fn pack<const R: usize>(rows: &[f32], inputs: usize) -> Vec<[f32; R]> {
    let mut packed = vec![[0.0; R]; inputs];
    for (r, row) in rows.chunks_exact(inputs).enumerate() {
        for (packed, number) in packed.iter_mut().zip(row) {
            packed[r] = *number;
        }
    }
    packed
}
