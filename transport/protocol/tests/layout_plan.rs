//! `plan` against the naive model: every ordered pair of the listed orders, and everything else at random.

mod layout_model;

use kvferry_protocol::RegionId;
use kvferry_protocol::layout::{Place, PlanError, Selection, Side, plan};
use kvferry_protocol::pages::Extent;
use layout_model::{
    Allocation, Memory, ORDERS, OneSide, any_allocation, any_selection, any_side, bytes_of, naive_copy, planned_copy,
};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

#[derive(Clone, Debug)]
struct Case {
    src: OneSide,
    dst: OneSide,
    selection: Selection,
}

fn any_case(src_order: &'static str, dst_order: &'static str, any: bool) -> impl Strategy<Value = Case> {
    let allocation = move || if any { any_allocation().boxed() } else { Just(Allocation::Packed).boxed() };
    let run_bytes = prop_oneof![
        2 => (1..9_u32).prop_map(|bytes| vec![bytes, bytes]),
        1 => (1..9_u32, 1..9_u32).prop_map(|(k, v)| vec![k, v]),
        1 => (1..9_u32).prop_map(|bytes| vec![bytes]),
    ];
    (any_selection(), run_bytes, allocation(), allocation()).prop_flat_map(move |(selection, runs, from, to)| {
        let src = any_side(src_order.into(), from, runs.clone(), selection.clone());
        let dst = any_side(dst_order.into(), to, runs, selection.clone());
        (src, dst).prop_map(move |(src, dst)| Case { src, dst, selection: selection.clone() })
    })
}

fn check(Case { src, dst, selection }: &Case) {
    let from = Memory::telling(&src.layout);
    let plan = plan(&src.view(), &dst.view(), selection).unwrap();
    let want = naive_copy(src, dst, selection, &from);
    assert!(planned_copy(&plan, dst, &from) == want, "the plan copies other bytes");

    let mut by_page = Memory::untouched(&dst.layout);
    plan.for_each_page(|page| page.for_each_run(|src, dst, bytes| by_page.write_once(dst, from.read(src, bytes))));
    assert!(by_page == want, "the plan's pages copy other bytes");

    // Any destination in region 0 can be named by extents, whether or not it is a window's.
    if dst.layout.bases().iter().all(|base| base.region == RegionId::new(0)) {
        let mut sent = bytes_of(&plan.source_pages()).into_iter();
        let mut named = Memory::untouched(&dst.layout);
        for extent in plan.window_extents().unwrap() {
            assert!(extent.loops.len() <= Extent::MAX_LOOPS, "{extent:?}");
            extent.for_each_run(|offset| {
                for offset in offset..offset + extent.run_bytes {
                    let byte = from.read(sent.next().expect("as many bytes as places"), 1);
                    named.write_once(Place { region: RegionId::new(0), offset }, byte);
                }
            });
        }
        assert!(sent.next().is_none() && named == want, "pages and extents copy other bytes");
    } else if plan.ends(Side::Destination).iter().any(|end| end.0 != RegionId::new(0)) {
        assert!(matches!(plan.window_extents(), Err(PlanError::NotAWindow { .. })));
    }

    let (mut runs, mut bytes, mut shortest) = (0, 0, u64::MAX);
    let (mut src_ends, mut dst_ends) = (Vec::new(), Vec::new());
    plan.for_each_run(|src, dst, length| {
        (runs, bytes, shortest) = (runs + 1, bytes + length, shortest.min(length));
        src_ends.push((src.region, src.offset + length));
        dst_ends.push((dst.region, dst.offset + length));
    });
    assert_eq!((plan.runs(), plan.bytes(), plan.run_bytes_min()), (runs, bytes, shortest));
    for (side, ends) in [(Side::Source, src_ends), (Side::Destination, dst_ends)] {
        let highest = plan.ends(side);
        for &(region, end) in &highest {
            assert_eq!(ends.iter().filter(|at| at.0 == region).map(|at| at.1).max(), Some(end), "{side}");
        }
        assert!(ends.iter().all(|end| highest.iter().any(|at| at.0 == end.0)));
    }
}

#[test]
fn every_ordered_pair_of_listed_orders_copies_what_the_model_copies() {
    for src_order in ORDERS {
        for dst_order in ORDERS {
            let mut runner = TestRunner::new(Config { cases: 40, failure_persistence: None, ..Config::default() });
            let result = runner.run(&any_case(src_order, dst_order, false), |case| {
                check(&case);
                Ok(())
            });
            result.unwrap_or_else(|error| panic!("{src_order} -> {dst_order}: {error}"));
        }
    }
}

#[test]
fn padded_separate_and_mixed_allocations_copy_what_the_model_copies() {
    let orders = (prop::sample::select(ORDERS.to_vec()), prop::sample::select(ORDERS.to_vec()));
    let cases = orders.prop_flat_map(|(src, dst)| any_case(src, dst, true));
    let mut runner = TestRunner::new(Config { cases: 8000, failure_persistence: None, ..Config::default() });
    runner
        .run(&cases, |case| {
            check(&case);
            Ok(())
        })
        .unwrap();
}
