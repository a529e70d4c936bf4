//! Tensor-parallel groups of unequal size: every destination rank gets exactly its heads, whoever holds them.

mod layout_model;

use kvferry_protocol::layout::{KvShape, Selection, Shard, heads_of, plan, readers_of, sources_of};
use kvferry_protocol::{BlockId, LayerId, TpRank};
use layout_model::{Allocation, Memory, OneSide, UNTOUCHED, each_run, layout};

const LAYERS: u16 = 3;
const TOKENS: u32 = 40;

/// The byte that belongs at a logical place.
fn byte(layer: u16, plane: usize, head: u16, token: u32) -> u8 {
    let place = u64::from(layer) | u64::from(head) << 8 | (plane as u64) << 16 | u64::from(token) << 24;
    ((place.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8).min(UNTOUCHED - 1)
}

/// A rank's cache: its heads, with two spare blocks and the request's in descending order.
fn rank_side(rank: u16, tp_size: u16, heads: u16, tokens_per_block: u32, order: &str) -> OneSide {
    let held = heads_of(TpRank::new(rank), tp_size, heads).unwrap();
    let count = TOKENS.div_ceil(tokens_per_block);
    let run_bytes = if heads == 1 { vec![3] } else { vec![2, 2] };
    let shape = KvShape { layers: LAYERS, blocks: count + 2, heads: held.len() as u16, tokens_per_block, run_bytes };
    OneSide {
        layout: layout(shape, order, Allocation::Packed),
        shard: Shard { first_layer: LayerId::new(0), first_head: held.start },
        blocks: (0..count).rev().map(BlockId::new).collect(),
        first_token: 0,
    }
}

fn whole(side: &OneSide) -> Selection {
    let heads = side.shard.first_head..side.shard.first_head + side.layout.shape().heads;
    Selection { layers: 0..LAYERS, heads, tokens: 0..TOKENS }
}

fn filled(side: &OneSide) -> Memory {
    let mut memory = Memory::untouched(&side.layout);
    each_run(side, side, &whole(side), |layer, plane, head, token, at, _, bytes| {
        memory.write_once(at, &vec![byte(layer, plane, head, token); bytes as usize]);
    });
    memory
}

fn check(src_tp: u16, dst_tp: u16, heads: u16, src_order: &str, dst_order: &str) {
    let name = format!("{heads} heads, TP {src_tp} {src_order} -> TP {dst_tp} {dst_order}");
    let sources: Vec<_> = (0..src_tp).map(|rank| rank_side(rank, src_tp, heads, 16, src_order)).collect();
    let memories: Vec<_> = sources.iter().map(filled).collect();
    let mut readers = vec![0_u16; usize::from(src_tp)];
    for rank in 0..dst_tp {
        let dst = rank_side(rank, dst_tp, heads, 8, dst_order);
        let mut to = Memory::untouched(&dst.layout);
        for part in sources_of(TpRank::new(rank), dst_tp, src_tp, heads).unwrap() {
            let from = usize::from(part.tp_rank.get());
            readers[from] += 1;
            let selection = Selection { heads: part.heads, ..whole(&dst) };
            let plan = plan(&sources[from].view(), &dst.view(), &selection).unwrap();
            plan.for_each_run(|src, dst, bytes| to.write_once(dst, memories[from].read(src, bytes)));
        }
        assert!(to == filled(&dst), "{name}: rank {rank} got other bytes than its heads'");
    }
    for (rank, &count) in readers.iter().enumerate() {
        assert_eq!(readers_of(TpRank::new(rank as u16), src_tp, dst_tp, heads).unwrap(), count, "{name}: rank {rank}");
    }
}

#[test]
fn every_rank_gets_its_heads_between_groups_of_any_two_sizes() {
    for src_tp in [1, 2, 4, 8, 16] {
        for dst_tp in [1, 2, 4, 8, 16] {
            for heads in [1, 2, 8, 16] {
                for (src_order, dst_order) in
                    [("BLPNHC", "BHLPNC"), ("LBNHPC", "LPBNHC"), ("BHLPNC", "BLNHPC"), ("PLBNHC", "LBHNPC")]
                {
                    check(src_tp, dst_tp, heads, src_order, dst_order);
                }
            }
        }
    }
}
