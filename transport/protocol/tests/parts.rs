//! The parts of a load against a naive model: every cell of every head by itself.

use std::collections::{BTreeMap, BTreeSet};

use kvferry_protocol::transfer::{Parts, PartsEnd, PartsStep, Rect};
use proptest::prelude::*;

const TOKENS: std::ops::Range<u32> = 4..16;
const LAYERS: std::ops::Range<u16> = 2..6;

#[derive(Debug, Clone)]
enum Op {
    /// A part verified some cells.
    Verified(usize, Rect),
    /// A part ended: good until there, and with a failure or without.
    Ended(usize, u32, bool),
}

fn any_op(parts: usize) -> impl Strategy<Value = Op> {
    let rect = (0..20_u32, 1..10_u32, 0..8_u16, 1..5_u16)
        .prop_map(|(token, tokens, layer, layers)| Rect::new(token..token + tokens, layer..layer + layers).unwrap());
    // One part more than there are.
    prop_oneof![
        6 => (0..=parts, rect).prop_map(|(part, rect)| Op::Verified(part, rect)),
        1 => (0..=parts, 0..20_u32, prop::bool::weighted(0.4)).prop_map(|(part, good, fails)| Op::Ended(part, good, fails)),
    ]
}

/// What is known of each part, cell by cell.
#[derive(Debug)]
struct Model {
    heads: Vec<u16>,
    verified: BTreeSet<(usize, u32, u16)>,
    /// By part, how it ended, in the order of the ends.
    ends: Vec<(usize, u32, bool)>,
}

impl Model {
    fn is_open(&self, part: usize) -> bool {
        part < self.heads.len() && self.ends.iter().all(|&(ended, ..)| ended != part)
    }

    fn is_complete(&self, layer: u16) -> bool {
        let all = |part: usize| TOKENS.into_iter().all(|token| self.verified.contains(&(part, token, layer)));
        // A part without heads has nothing to bring.
        (0..self.heads.len()).all(|part| self.heads[part] == 0 || all(part))
    }

    /// The cells of a rectangle; `None` if any of them is not wanted, or came before: machines verify each cell once.
    fn cells(&self, part: usize, rect: Rect) -> Option<Vec<(usize, u32, u16)>> {
        let cells = rect.tokens().flat_map(|token| rect.layers().map(move |layer| (part, token, layer)));
        let cells: Vec<_> = cells.collect();
        let fresh = |cell: &(usize, u32, u16)| {
            TOKENS.contains(&cell.1) && LAYERS.contains(&cell.2) && !self.verified.contains(cell)
        };
        cells.iter().all(fresh).then_some(cells)
    }

    fn end(&self) -> PartsEnd<usize, usize> {
        let good = |&(_, good, _): &(usize, u32, bool)| good.clamp(TOKENS.start, TOKENS.end);
        PartsEnd {
            tokens: TOKENS,
            good_until: self.ends.iter().map(good).min().unwrap(),
            failure: self.ends.iter().find(|(.., fails)| *fails).map(|&(part, ..)| (part, part)),
        }
    }
}

fn is_wanted(rect: Rect) -> bool {
    Rect::new(TOKENS, LAYERS).unwrap().contains(rect)
}

proptest! {
    #[test]
    fn parts_agree_with_their_model(
        (heads, ops) in prop::collection::vec(1..4_u16, 1..5)
            .prop_flat_map(|heads| (Just(heads.clone()), prop::collection::vec(any_op(heads.len()), 0..160)))
    ) {
        let wanted = Rect::new(TOKENS, LAYERS).unwrap();
        let mut parts = Parts::new(wanted, heads.iter().copied().enumerate()).unwrap();
        let mut model = Model { heads, verified: BTreeSet::new(), ends: Vec::new() };
        let mut over = 0;
        for op in ops {
            match op {
                Op::Verified(part, rect) if !model.is_open(part) || !is_wanted(rect) => {
                    let before = format!("{parts:?}");
                    prop_assert!(parts.verified(&part, rect).is_err());
                    prop_assert_eq!(before, format!("{parts:?}"), "refused, but not unchanged");
                }
                Op::Verified(part, rect) => {
                    let Some(cells) = model.cells(part, rect) else { continue };
                    let before: BTreeMap<u16, bool> = LAYERS.map(|layer| (layer, model.is_complete(layer))).collect();
                    model.verified.extend(cells);
                    let new: Vec<u16> = LAYERS.filter(|layer| !before[layer] && model.is_complete(*layer)).collect();
                    prop_assert_eq!(parts.verified(&part, rect), Ok(new));
                }
                Op::Ended(part, good, _) if !model.is_open(part) => {
                    prop_assert!(parts.ended(&part, good, Some(part)).is_err());
                }
                Op::Ended(part, good, fails) => {
                    let first = fails && model.ends.iter().all(|(.., fails)| !fails);
                    model.ends.push((part, good, fails));
                    let open: Vec<usize> = (0..model.heads.len()).filter(|&part| model.is_open(part)).collect();
                    let want = match (open.is_empty(), first) {
                        (true, _) => PartsStep::Over(model.end()),
                        (false, true) => PartsStep::Cancel(open.clone()),
                        (false, false) => PartsStep::Wait,
                    };
                    over += u32::from(matches!(want, PartsStep::Over(_)));
                    prop_assert_eq!(parts.ended(&part, good, fails.then_some(part)), Ok(want));
                    prop_assert_eq!(parts.open().copied().collect::<Vec<_>>(), open);
                }
            }
            prop_assert_eq!(parts.has_begun(), !model.verified.is_empty());
        }
        prop_assert!(over <= 1);
    }
}
