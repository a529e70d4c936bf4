use super::*;

/// Numbers of all magnitudes and signs, the special ones among them, from a small generator.
fn numbers(count: usize) -> Vec<f32> {
    let special = [0.0, -0.0, 1.0, f32::INFINITY, f32::NEG_INFINITY, f32::MIN_POSITIVE, f32::MAX, 1e-42, f32::NAN];
    let mut state = 12_345_u32;
    let random = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f32::from_bits(state)
    });
    special.into_iter().chain(random).take(count).collect()
}

/// Every operation on the same inputs; NaN is one value, because IEEE leaves its payload open.
struct Everything<'a>(&'a [f32]);

impl Work for Everything<'_> {
    type Output = Vec<u32>;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Vec<u32> {
        let mut out = Vec::new();
        let mut keep = |v: S::V| {
            let mut lanes = [0.0; LANES];
            // SAFETY: 16 f32.
            unsafe { s.store(lanes.as_mut_ptr(), v) };
            out.extend(lanes.map(|x| if x.is_nan() { u32::MAX } else { x.to_bits() }));
        };
        let count = self.0.len() / LANES;
        // SAFETY: the index is below `count`, so 16 f32 follow.
        let at = |i: usize| unsafe { s.load(self.0[i % count * LANES..].as_ptr()) };
        for i in 0..count {
            let (a, b, c) = (at(i), at(i + 1), at(i + 2));
            for v in [s.add(a, b), s.sub(a, b), s.mul(a, b), s.div(a, b), s.fma(a, b, c), s.max(a, b)] {
                keep(v);
            }
            for v in [s.zero_below(a, b, c), s.pow2(a), exp(s, a), exp(s, s.mul(a, s.splat(1e-30)))] {
                keep(v);
            }
            let halves = self.0[i * LANES..].as_ptr().cast();
            // SAFETY: 16 f32 are 64 bytes; 32 are read.
            keep(unsafe { s.load_f16(halves) });
            // SAFETY: as above.
            keep(unsafe { s.load_bf16(halves) });
            keep(s.splat(s.sum(a)));
            keep(s.splat(s.largest(exp(s, a))));
            let sums4 = s.sums4([a, b, c, at(i + 3)]);
            sums4.into_iter().for_each(|sum| keep(s.splat(sum)));
            let sums16 = s.sums16(std::array::from_fn(|v| at(i + v)));
            sums16.into_iter().for_each(|sum| keep(s.splat(sum)));
        }
        out
    }
}

#[test]
fn backends_agree_bit_for_bit() {
    let numbers = numbers(16 * if cfg!(miri) { 3 } else { 300 });
    let mut results = Backend::available().map(|backend| (backend, backend.run(Everything(&numbers))));
    let (first, want) = results.next().unwrap();
    for (backend, found) in results {
        let differing = want.iter().zip(&found).position(|(a, b)| a != b);
        assert_eq!((differing, want.len()), (None, found.len()), "{first:?} and {backend:?}");
    }
}

/// `sums4` and `sums16` against `sum`, and exp against float64.
struct Checks;

impl Work for Checks {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let rows: [[f32; LANES]; 16] = std::array::from_fn(|i| std::array::from_fn(|j| 1.0 / (1 + i * 16 + j) as f32));
        // SAFETY: each row is 16 f32.
        let v = rows.map(|row| unsafe { s.load(row.as_ptr()) });
        assert_eq!(s.sums4([v[0], v[1], v[2], v[3]]), [s.sum(v[0]), s.sum(v[1]), s.sum(v[2]), s.sum(v[3])]);
        let sums = s.sums16(v);
        for k in 0..4 {
            for q in 0..4 {
                assert_eq!(sums[4 * k + q], s.sum(v[4 * q + k]));
            }
        }
        for step in 0..if cfg!(miri) { 100 } else { 100_000 } {
            let x = -87.0 + step as f32 * 0.001_05;
            let (found, want) = (f64::from(exp_one(s, x)), f64::from(x).exp());
            assert!((found / want - 1.0).abs() < 1.3e-7, "e^{x} = {want}, found {found}");
        }
        assert_eq!([0.0, -87.5, f32::NEG_INFINITY].map(|x| exp_one(s, x)), [1.0, 0.0, 0.0]);
        assert!(exp_one(s, f32::NAN).is_nan());
    }
}

#[test]
fn sums_follow_one_tree_and_exp_is_within_two_units() {
    Backend::available().for_each(|backend| backend.run(Checks));
}
