//! Plans of real models, and what cannot be planned.

use super::*;
use crate::sizing::Placement;

const PACKED: Placement = Placement::Packed { align_bytes: 1 };

#[test]
fn models_of_a_pattern_get_groups_of_its_rarest_kind() {
    let repeat = |kinds: &[(LayerKind, usize)], times: usize| -> Vec<LayerSpec> {
        let once = kinds.iter().flat_map(|(kind, count)| vec![layer(*kind, 16); *count]);
        once.collect::<Vec<_>>().repeat(times)
    };
    for (name, layers, want) in [
        ("one kind", repeat(&[(FULL, 1)], 32), vec![32]),
        (
            "gemma 3 27B: 5 to 1, and 2 more",
            [repeat(&[(window(1024), 5), (FULL, 1)], 10), repeat(&[(window(1024), 2)], 1)].concat(),
            vec![9, 9, 9, 9, 8, 8, 10],
        ),
        ("gpt-oss 20B: 1 to 1", repeat(&[(window(128), 1), (FULL, 1)], 12), vec![12, 12]),
        (
            "and a drafter of one full layer",
            [repeat(&[(window(128), 1), (FULL, 1)], 12), repeat(&[(FULL, 1)], 1)].concat(),
            vec![12, 13],
        ),
    ] {
        let plan = GroupPlan::new(&layers, Placement::PerLayer).unwrap();
        let sizes: Vec<usize> = plan.groups.iter().map(|group| group.layers.len()).collect();
        assert_eq!(sizes, want, "{name}");
        assert_eq!(plan.block_bytes, *want.iter().max().unwrap() as u64 * 2048, "{name}");
    }
}

#[test]
fn smaller_pages_become_longer_blocks_or_are_padded() {
    let small = LayerSpec {
        content: PageContent::Tokens { heads: 1, head_size: 16, head_size_v: 16, element_bytes: 2 },
        ..layer(window(64), 16)
    };
    let odd = LayerSpec {
        content: PageContent::Tokens { heads: 1, head_size: 16, head_size_v: 8, element_bytes: 2 },
        ..layer(window(32), 16)
    };
    let state = LayerSpec { content: PageContent::State { bytes: 100 }, ..layer(state(StateKeeping::StepEnds), 16) };
    let layers = [layer(FULL, 16), small, odd, state];
    let plan = GroupPlan::new(&layers, Placement::PerLayer).unwrap();
    let found: Vec<_> =
        plan.groups.iter().map(|group| (group.spec.tokens_per_block, group.spec.page_bytes())).collect();
    assert_eq!(found, [(16, 2048), (32, 2048), (16, 2048), (16, 2048)]);
    assert_eq!(plan.groups[2].spec.content_bytes(), 16 * 24 * 2);
    let plan = GroupPlan::new(&layers, PACKED).unwrap();
    assert_eq!(plan.groups.iter().map(LayerGroup::block_bytes).collect::<Vec<_>>(), [2048, 1024, 768, 100]);
    assert_eq!(plan.block_bytes, 2048, "packed blocks are as wide as the widest group");
}

#[test]
fn what_cannot_be_planned_is_named() {
    let encoder = layer(LayerKind::EncoderOnly, 16);
    assert_eq!(GroupPlan::new(&[encoder], PACKED), Err(GroupError::Empty));
    let plan = GroupPlan::new(&[encoder, layer(FULL, 16)], PACKED).unwrap();
    assert_eq!(plan.groups[0].layers, [1], "an encoder's layers are in no group");
    for bad in [
        layer(FULL, 0),
        layer(window(0), 16),
        layer(LayerKind::Sink { sink_tokens: 17 }, 16),
        LayerSpec { kind: FULL, ..layer(state(StateKeeping::Running), 16) },
    ] {
        assert_eq!(GroupPlan::new(&[layer(FULL, 16), bad], PACKED), Err(GroupError::Layer { layer: 1 }), "{bad:?}");
    }
    let latent = LayerSpec {
        kind: LayerKind::Latent,
        content: PageContent::Tokens { heads: 1, head_size: 36, head_size_v: 0, element_bytes: 2 },
        ..layer(FULL, 16)
    };
    let chunked = layer(LayerKind::Chunked { chunk_tokens: 64 }, 16);
    let refused = GroupPlan::new(&[latent, chunked], Placement::PerLayer);
    assert_eq!(refused, Err(GroupError::Page { layer: 0, bytes: 16 * 72, wanted: 2048 }));
    let promoted = GroupPlan::new(&[latent, layer(window(64), 16)], Placement::PerLayer).unwrap();
    assert_eq!(promoted.groups.len(), 1, "windows beside latent layers are kept whole");
}

#[test]
fn a_request_holds_at_most_what_its_kinds_keep() {
    let content = layer(FULL, 16);
    for (kind, want) in [
        (FULL, 63),
        (window(128), (127 + 64_usize).div_ceil(16) + 1),
        (LayerKind::Chunked { chunk_tokens: 256 }, (256 + 64_usize).div_ceil(16)),
        (LayerKind::State { keeping: StateKeeping::StepEnds, speculative_blocks: 3 }, 5),
        (LayerKind::State { keeping: StateKeeping::Running, speculative_blocks: 0 }, 1),
        (LayerKind::Cross, 10),
        (LayerKind::EncoderOnly, 0),
    ] {
        let spec = LayerSpec { kind, ..content };
        assert_eq!(spec.blocks_per_request(1000, 64, 150), want, "{kind:?}");
    }
}
