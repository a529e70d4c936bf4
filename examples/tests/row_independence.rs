//! A row's product has the same bits alone and among any other rows: the ground that every comparison of engines stands on.

use kvferry_examples::model::Linear;

/// Numbers of changing size and sign, with zeros and a few large ones among them.
fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as f32 / (1u64 << 30) as f32 - 1.0
    };
    (0..count)
        .map(|i| match i % 61 {
            0 => 0.0,
            1 => next() * 50.0,
            _ => next(),
        })
        .collect()
}

#[test]
fn a_row_has_the_same_bits_alone_and_in_any_batch() {
    // SmolLM2's widths, and some that do not divide by any tile.
    for (outputs, inputs) in
        [(576, 576), (192, 576), (1536, 576), (576, 1536), (67, 96), (3, 32), (129, 256), (64, 512)]
    {
        let linear = Linear::quantise(&numbers(outputs * inputs, 1), outputs, inputs);
        let rows = 37;
        let x = numbers(rows * inputs, 2);
        let product = |rows: &[usize]| {
            let batch: Vec<f32> = rows.iter().flat_map(|&row| x[row * inputs..(row + 1) * inputs].to_vec()).collect();
            let mut out = vec![f32::NAN; rows.len() * outputs];
            linear.forward(&batch, &mut out);
            out.chunks_exact(outputs).map(|row| row.iter().map(|v| v.to_bits()).collect()).collect::<Vec<Vec<u32>>>()
        };
        let all: Vec<usize> = (0..rows).collect();
        let alone: Vec<_> = all.iter().map(|&row| product(&[row]).remove(0)).collect();
        assert_eq!(product(&all), alone, "{outputs} x {inputs}: all rows at once");
        for count in [2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33] {
            // Every row at another place, and beside other rows, than in the batch above.
            let batch: Vec<usize> = (0..count).map(|i| (i * 11 + count) % rows).collect();
            for (place, bits) in product(&batch).into_iter().enumerate() {
                assert_eq!(bits, alone[batch[place]], "{outputs} x {inputs}: place {place} of {count}");
            }
        }
        assert!(alone[0] != alone[1], "different rows give different products");
    }
}

#[test]
fn a_product_is_close_to_that_of_the_numbers_it_stands_for() {
    let (outputs, inputs) = (40, 576);
    let weights = numbers(outputs * inputs, 3);
    let x = numbers(inputs, 4);
    let linear = Linear::quantise(&weights, outputs, inputs);
    let mut out = vec![0.0; outputs];
    linear.forward(&x, &mut out);
    for (row, out) in weights.chunks_exact(inputs).zip(out) {
        let exact: f64 = row.iter().zip(&x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
        // A weight is off by at most half a step, a step is a 127th of the largest of its 32.
        let blocks = row.chunks_exact(32).zip(x.chunks_exact(32));
        let allowed: f64 = blocks
            .map(|(w, x)| {
                let largest = w.iter().fold(0.0f32, |most, w| most.max(w.abs()));
                f64::from(largest / 254.0) * x.iter().map(|x| f64::from(x.abs())).sum::<f64>()
            })
            .sum();
        assert!((exact - f64::from(out)).abs() < 1.01 * allowed, "{exact} and {out}, {allowed} allowed");
    }
}
