//! Both kinds against one model, which keeps a list of what can be found and the content of every token's place; and what they must do
//! in words.

mod model;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use super::*;
use crate::pool::{BlockHash, HashScope};
use model::Engine;

const KINDS: [PrefixKind; 3] = [PrefixKind::Hash, PrefixKind::Radix, PrefixKind::Off];
const BLOCKS: usize = 12;

/// What an engine does. Requests are numbered by their place among those that run; one that does not exist is nobody.
#[derive(Clone, Debug)]
enum Op {
    /// A new prompt.
    Open {
        tenant: usize,
        prompt: Vec<u32>,
        spare: usize,
    },
    /// The first of those that were put back comes again, with all that it has generated.
    Reopen,
    /// So many tokens of what is known are computed, or their load is verified; then one is generated if all are.
    Compute {
        request: usize,
        tokens: usize,
        token: u32,
    },
    /// Blocks for all tokens and so many more; if there are too few, the youngest is put back.
    Grow {
        request: usize,
        more: usize,
    },
    /// What is computed can be shared.
    Register {
        request: usize,
    },
    Finish {
        request: usize,
    },
    /// It is over, but a transfer still reads its blocks.
    Lease {
        request: usize,
    },
    EndLease {
        lease: usize,
    },
    Abort {
        request: usize,
    },
    Clear,
}

fn any_op() -> impl Strategy<Value = Op> {
    let which = || 0..5_usize;
    // Few tokens, so that prefixes meet and part anywhere.
    let prompt = prop_oneof![vec(0..2_u32, 1..14), (1..14_usize).prop_map(|len| vec![0; len])];
    prop_oneof![
        18 => (0..2_usize, prompt, 0..3_usize).prop_map(|(tenant, prompt, spare)| Op::Open { tenant, prompt, spare }),
        6 => Just(Op::Reopen),
        24 => (which(), 1..9_usize, 0..2_u32)
            .prop_map(|(request, tokens, token)| Op::Compute { request, tokens, token }),
        18 => (which(), 0..4_usize).prop_map(|(request, more)| Op::Grow { request, more }),
        18 => which().prop_map(|request| Op::Register { request }),
        9 => which().prop_map(|request| Op::Finish { request }),
        6 => which().prop_map(|request| Op::Lease { request }),
        9 => which().prop_map(|lease| Op::EndLease { lease }),
        3 => which().prop_map(|request| Op::Abort { request }),
        1 => Just(Op::Clear),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, ..ProptestConfig::default() })]

    #[test]
    fn every_kind_agrees_with_one_model(tokens_per_block in 1..4_usize, ops in vec(any_op(), 0..120)) {
        for kind in KINDS {
            let mut engine = Engine::new(kind, BLOCKS, tokens_per_block);
            ops.iter().for_each(|op| engine.apply(op));
            engine.end();
        }
    }
}

/// `KVFERRY_HISTORY` is its length.
#[test]
fn a_long_history_meets_hits_evictions_and_requests_that_are_put_back() {
    let length = std::env::var("KVFERRY_HISTORY").map_or(20_000, |text| text.parse().unwrap());
    for (kind, shares) in KINDS.into_iter().zip([true, true, false]) {
        let mut runner = TestRunner::deterministic();
        let mut engine = Engine::new(kind, BLOCKS, 2);
        for _ in 0..length {
            engine.apply(&any_op().new_tree(&mut runner).unwrap().current());
        }
        let seen = engine.end();
        assert_eq!(
            (seen.hits > 100, seen.evicted > 100, seen.twins > 10),
            (shares, shares, shares),
            "{kind}: {seen:?}"
        );
        assert!(seen.put_back > 10 && seen.refused > 10 && seen.leased > 100, "{kind}: {seen:?}");
    }
}

fn names(salt: &[u8], tokens_per_block: usize) -> Arc<BlockHasher> {
    Arc::new(BlockHasher::new(&HashScope { model: "m", tokens_per_block, adapter: None, salt }).unwrap())
}

/// Runs a text to its end: all tokens but the last are computed.
fn finished(cache: &mut PrefixCache, text: &Text) -> Kept {
    let table = cache.open(text, text.tokens().len(), 0).unwrap();
    cache.finish(table, text, text.tokens().len() - 1).unwrap()
}

#[test]
fn what_was_put_back_finds_again_what_it_had_registered() {
    let names = names(b"", 2);
    for kind in [PrefixKind::Hash, PrefixKind::Radix] {
        let mut cache = PrefixCache::new(kind, 6, 2).unwrap();
        let mut text = Text::new(Some(&names), vec![1, 2, 3, 4, 5]);
        let mut table = cache.open(&text, 5, 0).unwrap();
        cache.register(&mut table, &text, 5).unwrap();
        text.push(6);
        text.push(7);
        cache.grow(&mut table, 7).unwrap();
        drop(table);
        assert_eq!((cache.counts().free, cache.counts().cached), (6, 2), "{kind}");
        let again = cache.open(&text, 7, 0).unwrap();
        assert_eq!((again.matched(), again.registered(), again.len()), (2, 2, 4), "{kind}");
        let kept = cache.finish(again, &text, 6).unwrap();
        assert_eq!(kept, Kept { matched: 2, registered: 1, returned: 1 }, "{kind}");
    }
}

#[test]
fn spare_blocks_stay_free_behind_an_admission_and_not_behind_growth() {
    let names = names(b"", 2);
    for kind in KINDS {
        let mut cache = PrefixCache::new(kind, 4, 2).unwrap();
        let text = Text::new(Some(&names), vec![7; 5]);
        let refused = cache.open(&text, 5, 2).unwrap_err();
        assert_eq!(refused, PoolError::Exhausted { wanted: 5, free: 4, total: 4 }, "{kind}");
        let mut table = cache.open(&text, 5, 1).unwrap();
        cache.grow(&mut table, 8).unwrap();
        assert_eq!(cache.counts().free, 0, "{kind}");
        let refused = cache.grow(&mut table, 9).unwrap_err();
        assert_eq!(refused, PoolError::Exhausted { wanted: 1, free: 0, total: 4 }, "{kind}");
        assert_eq!(table.len(), 4, "{kind}: all or nothing");
    }
}

#[test]
fn a_leased_block_is_not_reused_and_can_be_found() {
    let names = names(b"", 1);
    for kind in [PrefixKind::Hash, PrefixKind::Radix] {
        let mut cache = PrefixCache::new(kind, 4, 1).unwrap();
        let text = Text::new(Some(&names), vec![1, 2, 3]);
        let table = cache.open(&text, 3, 0).unwrap();
        let lease = cache.lease(table, &text, 3).unwrap();
        let other = Text::new(Some(&names), vec![9; 2]);
        assert!(cache.open(&other, 2, 0).is_err(), "{kind}: three of four are leased");
        let shared = cache.open(&text, 3, 0).unwrap();
        assert_eq!(shared.ids()[..2], lease.ids()[..2], "{kind}");
        drop((lease, shared));
        assert_eq!(cache.counts().free, 4, "{kind}");
        assert!(cache.open(&other, 2, 0).is_ok(), "{kind}");
    }
}

#[test]
fn a_twin_stays_whole_until_its_request_is_over() {
    let names = names(b"", 1);
    for kind in [PrefixKind::Hash, PrefixKind::Radix] {
        let mut cache = PrefixCache::new(kind, 4, 1).unwrap();
        let text = Text::new(Some(&names), vec![1, 2]);
        let mut tables = [cache.open(&text, 2, 0).unwrap(), cache.open(&text, 2, 0).unwrap()];
        let before = tables[1].ids().to_vec();
        for table in &mut tables {
            cache.register(table, &text, 2).unwrap();
        }
        assert_eq!(cache.counts().free, 0, "{kind}: what a transfer may read of the second is nobody else's");
        let [first, second] = tables;
        match kind {
            PrefixKind::Radix => assert_eq!((second.ids(), second.replaced()), (first.ids(), 2)),
            _ => assert_eq!((second.ids(), second.replaced()), (&before[..], 0)),
        }
        assert_eq!(cache.finish(second, &text, 2).unwrap(), Kept { matched: 0, registered: 0, returned: 2 }, "{kind}");
        assert_eq!(cache.finish(first, &text, 2).unwrap(), Kept { matched: 0, registered: 2, returned: 0 }, "{kind}");
        assert_eq!((cache.counts().free, cache.counts().cached), (4, 2), "{kind}");
    }
}

#[test]
fn nothing_computed_with_other_weights_is_found() {
    let names = names(b"", 1);
    for kind in [PrefixKind::Hash, PrefixKind::Radix] {
        let mut cache = PrefixCache::new(kind, 8, 1).unwrap();
        let text = Text::new(Some(&names), vec![1, 2, 3]);
        let mut running = cache.open(&text, 3, 0).unwrap();
        cache.register(&mut running, &text, 1).unwrap();
        cache.clear();
        assert_eq!(cache.lookup(&text), 0, "{kind}");
        assert_eq!(cache.finish(running, &text, 3).unwrap(), Kept { matched: 0, registered: 1, returned: 2 }, "{kind}");
        assert_eq!((cache.lookup(&text), cache.counts().free), (0, 8), "{kind}");
        finished(&mut cache, &text);
        assert_eq!(cache.lookup(&text), 2, "{kind}");
    }
}

#[test]
fn events_name_runs_of_blocks_with_their_tokens() {
    let names = names(b"", 2);
    for kind in [PrefixKind::Hash, PrefixKind::Radix] {
        let mut cache = PrefixCache::new(kind, 4, 2).unwrap();
        cache.record_events(&names, Some(Medium::Device));
        let text = Text::new(Some(&names), (0..7).collect());
        let name = |at: usize| names.event_id(&text.names()[at]).into();
        let stored = |blocks: std::ops::Range<usize>| {
            KvEvent::Stored(crate::events::Stored {
                blocks: blocks.clone().map(name).collect(),
                parent: blocks.start.checked_sub(1).map(name),
                tokens: (blocks.start as u32 * 2..blocks.end as u32 * 2).collect(),
                tokens_per_block: 2,
                medium: Some(Medium::Device),
                ..Default::default()
            })
        };
        let mut table = cache.open(&text, 7, 0).unwrap();
        cache.register(&mut table, &text, 5).unwrap();
        assert_eq!(cache.take_events(), [stored(0..2)], "{kind}");
        cache.finish(table, &text, 6).unwrap();
        assert_eq!(cache.take_events(), [stored(2..3)], "{kind}");
        let other = Text::new(Some(&names), vec![9; 8]);
        let table = cache.open(&other, 8, 0).unwrap();
        let removed = crate::events::Removed {
            blocks: vec![name(2), name(1), name(0)],
            medium: Some(Medium::Device),
            ..Default::default()
        };
        assert_eq!(cache.take_events(), [KvEvent::Removed(removed)], "{kind}: the end goes first");
        cache.finish(table, &other, 7).unwrap();
        cache.clear();
        let events = cache.take_events();
        assert!(matches!(&events[..], [KvEvent::Stored(_), KvEvent::Cleared]), "{kind}: {events:?}");
    }
}

#[test]
fn misuse_is_refused_and_keeps_the_table() {
    let names = names(b"", 1);
    let text = Text::new(Some(&names), vec![1, 2, 3]);
    for kind in [PrefixKind::Hash, PrefixKind::Radix] {
        let [mut cache, mut foreign] = [0; 2].map(|_| PrefixCache::new(kind, 8, 1).unwrap());
        finished(&mut cache, &text);
        let mut table = cache.open(&text, 3, 0).unwrap();
        assert!(matches!(foreign.grow(&mut table, 4), Err(PoolError::ForeignTable { .. })), "{kind}");
        assert!(matches!(foreign.register(&mut table, &text, 3), Err(PoolError::ForeignTable { .. })), "{kind}");
        let long = cache.register(&mut table, &text, 4);
        assert_eq!(long, Err(PoolError::Position { start: 0, end: 4, len: 3 }), "{kind}");
        let other = Text::new(Some(&names), vec![1, 9, 3]);
        let (table, error) = *cache.finish(table, &other, 3).unwrap_err();
        assert_eq!(error, PoolError::OtherTokens { blocks: 2 }, "{kind}");
        assert_eq!(cache.finish(table, &text, 3).unwrap(), Kept { matched: 2, registered: 1, returned: 0 }, "{kind}");
        assert_eq!(PrefixCache::new(kind, 8, 0).err(), Some(PoolError::NoTokens));
        assert_eq!(PrefixCache::new(kind, 0, 1).err(), Some(PoolError::Size { blocks: 0 }));
    }
    let mut radix = PrefixCache::new(PrefixKind::Radix, 8, 1).unwrap();
    let mut table = PrefixCache::new(PrefixKind::Hash, 8, 1).unwrap().open(&text, 3, 0).unwrap();
    assert_eq!(radix.grow(&mut table, 4), Err(PoolError::ForeignTable { len: 3 }));
}

#[test]
fn a_text_is_named_alike_however_it_came() {
    let names = names(b"salt", 3);
    let tokens: Vec<u32> = (0..11).collect();
    let whole = Text::new(Some(&names), tokens.clone());
    let mut grown = Text::new(Some(&names), vec![]);
    let completed: Vec<BlockHash> = tokens.iter().filter_map(|token| grown.push(*token)).collect();
    assert_eq!((whole.names(), whole.names()), (grown.names(), &completed[..]));
    assert_eq!(whole.names(), names.chain(&tokens));
    let mut nameless = Text::new(None, tokens);
    assert_eq!((nameless.push(11), nameless.names()), (None, &[][..]));
}

#[test]
fn a_kind_is_read_as_it_is_written() {
    for kind in KINDS {
        assert_eq!(kind.to_string().parse(), Ok(kind));
        assert_eq!(serde_json::to_value(kind).unwrap(), kind.to_string());
    }
    let error = "tree".parse::<PrefixKind>().unwrap_err().to_string();
    assert!(error.contains("hash, radix or off"), "{error}");
}
