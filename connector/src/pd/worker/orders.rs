//! What the scheduler half was promised an answer to, as the model thread saw it pass: if the driver dies, each is answered here.

use std::collections::{BTreeMap, BTreeSet};

use kvferry_protocol::TransferId;

use crate::contract::{
    Kept, LoadFailure, RequestId, Restore, Restored, Side, StepMeta, StepResults, StoreStage, TierResults,
};

/// Orders that were given and not answered. As many as the scheduler half has open.
#[derive(Debug, Default)]
pub(super) struct Orders {
    restores: BTreeMap<u64, Restore>,
    /// Stores, of the engine's blocks and of peers'.
    stores: BTreeSet<u64>,
    returns: BTreeSet<TransferId>,
    /// Keeps that were given up before they began: only the driver answers those.
    unbegun: BTreeSet<RequestId>,
}

impl Orders {
    /// A step's orders go to the driver.
    pub(super) fn given(&mut self, meta: &StepMeta) {
        let tier = &meta.tier;
        self.restores.extend(tier.restores.iter().map(|restore| (restore.order, restore.clone())));
        self.stores.extend(tier.stores.iter().map(|store| store.order));
        self.stores.extend(tier.takes.iter().flat_map(|take| take.stores.iter().map(|&(order, _)| order)));
        self.returns.extend(tier.returns.iter().map(|one| one.transfer));
        let keeps = meta.cancels.iter().filter(|cancel| cancel.side == Side::Keep);
        self.unbegun.extend(keeps.map(|cancel| cancel.request.clone()));
    }

    /// The driver answered.
    pub(super) fn answered(&mut self, results: &StepResults) {
        for restored in &results.tier.restored {
            self.restores.remove(&restored.order);
        }
        for kept in results.tier.kept.iter().filter(|kept| is_last(kept.stage)) {
            self.stores.remove(&kept.order);
        }
        for transfer in &results.tier.returned {
            self.returns.remove(transfer);
        }
        for request in &results.sent {
            self.unbegun.remove(request);
        }
    }

    /// The driver is gone and nothing touches the pages: everything that is open ended without success, each once.
    pub(super) fn abandoned(&mut self, reason: &str) -> TierResults {
        let Self { restores, stores, returns, .. } = self;
        let restored = std::mem::take(restores).into_values().map(|restore| Restored {
            order: restore.order,
            failure: Some(LoadFailure {
                request: restore.request,
                good_tokens: restore.first_token,
                good_blocks: Vec::new(),
                reason: reason.to_owned(),
            }),
            spoiled: Vec::new(),
        });
        let dropped = |order| Kept { order, stage: StoreStage::Dropped };
        TierResults {
            kept: std::mem::take(stores).into_iter().map(dropped).collect(),
            restored: restored.collect(),
            offered: Vec::new(),
            returned: std::mem::take(returns).into_iter().collect(),
        }
    }

    /// The same for keeps that had not begun.
    pub(super) fn abandoned_keeps(&mut self) -> BTreeSet<RequestId> {
        std::mem::take(&mut self.unbegun)
    }
}

const fn is_last(stage: StoreStage) -> bool {
    matches!(stage, StoreStage::Stored | StoreStage::Dropped)
}

#[cfg(test)]
mod tests {
    use kvferry_protocol::{BlockId, TpRank};

    use super::*;
    use crate::contract::{Return, Store, TierMeta};

    fn restore(order: u64) -> Restore {
        let (request, frames) = (RequestId::new("r"), vec![BlockId::new(1)]);
        Restore { order, request, blocks: frames.clone(), frames, first_token: 8 }
    }

    fn store(order: u64) -> Store {
        let (block, frame) = (BlockId::new(2), BlockId::new(3));
        Store { order, request: RequestId::new("r"), block, first_token: 0, frame }
    }

    #[test]
    fn what_was_answered_is_not_answered_again_and_the_rest_once() {
        let mut orders = Orders::default();
        let one = |transfer| Return {
            request: RequestId::new("r"),
            transfer: TransferId::new(transfer),
            to: vec![],
            blocks: vec![],
            first_token: 0,
            hashes: vec![],
        };
        let tier = TierMeta {
            stores: vec![store(1), store(2), store(3)],
            restores: vec![restore(4), restore(5)],
            returns: vec![one(6), one(7)],
            ..TierMeta::default()
        };
        orders.given(&StepMeta { tier, ..StepMeta::default() });
        let mut results = StepResults::empty(TpRank::new(0));
        let kept = |order, stage| Kept { order, stage };
        results.tier.kept = vec![kept(1, StoreStage::Copied), kept(2, StoreStage::Late), kept(3, StoreStage::Stored)];
        results.tier.restored = vec![Restored { order: 4, failure: None, spoiled: vec![] }];
        results.tier.returned = vec![TransferId::new(7)];
        orders.answered(&results);
        let left = orders.abandoned("gone");
        assert_eq!(left.kept, [kept(1, StoreStage::Dropped), kept(2, StoreStage::Dropped)]);
        let failures: Vec<_> = left.restored.iter().map(|restored| (restored.order, &restored.failure)).collect();
        assert!(
            matches!(&failures[..], [(5, Some(failure))] if failure.good_tokens == 8 && failure.reason == "gone"),
            "{failures:?}"
        );
        assert_eq!(left.returned, [TransferId::new(6)]);
        assert_eq!(orders.abandoned("gone"), TierResults::default());
    }
}
