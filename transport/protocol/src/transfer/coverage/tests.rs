use proptest::prelude::*;

use super::*;

const TOKENS: u32 = 24;
const LAYERS: u16 = 7;

fn rect(tokens: Range<u32>, layers: Range<u16>) -> Rect {
    Rect::new(tokens, layers).unwrap()
}

fn any_rect() -> impl Strategy<Value = Rect> {
    (0..TOKENS, 1..=TOKENS, 0..LAYERS, 1..=LAYERS).prop_map(|(token, tokens, layer, layers)| {
        rect(token..(token + tokens).min(TOKENS), layer..(layer + layers).min(LAYERS))
    })
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Insert(Rect),
    Remove(Rect),
}

fn any_op() -> impl Strategy<Value = Op> {
    prop_oneof![3 => any_rect().prop_map(Op::Insert), 1 => any_rect().prop_map(Op::Remove)]
}

/// One bit a cell.
#[derive(Clone, PartialEq)]
struct Bitmap(Vec<bool>);

impl Bitmap {
    fn new() -> Self {
        Self(vec![false; (TOKENS * u32::from(LAYERS)) as usize])
    }

    fn cells(rect: Rect) -> impl Iterator<Item = usize> {
        rect.layers()
            .flat_map(move |layer| rect.tokens().map(move |token| (u32::from(layer) * TOKENS + token) as usize))
    }

    fn set(&mut self, rect: Rect, value: bool) {
        Self::cells(rect).for_each(|cell| self.0[cell] = value);
    }

    fn of(coverage: &Coverage) -> Self {
        let mut bits = Self::new();
        for rect in coverage.rects() {
            assert!(Self::cells(rect).all(|cell| !bits.0[cell]), "rectangles overlap: {coverage:?}");
            bits.set(rect, true);
        }
        bits
    }

    fn zip(&self, other: &Self, op: fn(bool, bool) -> bool) -> Self {
        Self(self.0.iter().zip(&other.0).map(|(&a, &b)| op(a, b)).collect())
    }
}

fn run(ops: &[Op]) -> (Coverage, Bitmap) {
    let (mut coverage, mut bits) = (Coverage::new(), Bitmap::new());
    for &op in ops {
        match op {
            Op::Insert(rect) => {
                coverage.insert(rect).unwrap();
                bits.set(rect, true);
            }
            Op::Remove(rect) => {
                coverage.remove(rect).unwrap();
                bits.set(rect, false);
            }
        }
    }
    (coverage, bits)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn coverage_agrees_with_a_bitmap(
        a in prop::collection::vec(any_op(), 0..20),
        b in prop::collection::vec(any_op(), 0..20),
        probe in any_rect(),
    ) {
        let ((a, a_bits), (b, b_bits)) = (run(&a), run(&b));
        prop_assert!(Bitmap::of(&a) == a_bits);
        prop_assert!(Bitmap::of(&a.union(&b).unwrap()) == a_bits.zip(&b_bits, |x, y| x | y));
        prop_assert!(Bitmap::of(&a.minus(&b).unwrap()) == a_bits.zip(&b_bits, |x, y| x & !y));
        prop_assert!(Bitmap::of(&a.intersect(&b).unwrap()) == a_bits.zip(&b_bits, |x, y| x & y));
        prop_assert_eq!(a.contains(probe), Bitmap::cells(probe).all(|cell| a_bits.0[cell]));
        prop_assert_eq!(a.overlaps(probe), Bitmap::cells(probe).any(|cell| a_bits.0[cell]));
        prop_assert_eq!(a.contains_all(&b), a_bits.zip(&b_bits, |x, y| y & !x).0.iter().all(|&bit| !bit));
        prop_assert_eq!(a.cells(), a_bits.0.iter().filter(|&&bit| bit).count() as u64);
        prop_assert_eq!(a.is_empty(), a_bits.0.iter().all(|&bit| !bit));
        let column = |token: u32| (0..LAYERS).any(|layer| a_bits.0[(u32::from(layer) * TOKENS + token) as usize]);
        prop_assert_eq!(a.first_token(), (0..TOKENS).find(|&token| column(token)));
        prop_assert_eq!(a.end_token(), (0..TOKENS).rev().find(|&token| column(token)).map_or(0, |token| token + 1));
        prop_assert_eq!(a.first().map(|rect| rect.tokens().start), a.first_token());
    }

    #[test]
    fn equal_sets_have_equal_forms(ops in prop::collection::vec(any_op(), 0..20)) {
        let (coverage, bits) = run(&ops);
        let mut by_cell = Coverage::new();
        for layer in (0..LAYERS).rev() {
            for token in 0..TOKENS {
                if bits.0[(u32::from(layer) * TOKENS + token) as usize] {
                    by_cell.insert(rect(token..token + 1, layer..layer + 1)).unwrap();
                }
            }
        }
        prop_assert_eq!(coverage, by_cell);
    }
}

#[test]
fn a_set_that_a_peer_shreds_is_refused_and_unchanged() {
    let mut coverage = Coverage::new();
    let limit = u32::try_from(Coverage::MAX_RECTS).unwrap();
    for index in 0..limit {
        coverage.insert(rect(2 * index..2 * index + 1, 0..1)).unwrap();
    }
    let before = coverage.clone();
    assert_eq!(
        coverage.insert(rect(2 * limit..2 * limit + 1, 0..1)),
        Err(TooFragmented { limit: Coverage::MAX_RECTS })
    );
    assert_eq!(coverage, before);
    coverage.insert(rect(0..2 * limit, 0..1)).unwrap();
    assert_eq!(coverage, rect(0..2 * limit, 0..1).into());
}
