//! A connector that carries nothing: both halves of kvferry's contract for an engine that stands alone.

use std::time::Duration;

use kvferry::ConnectorError;
use kvferry::contract::{
    Applied, EngineFinish, Hold, Load, Match, Ready, Request, RequestId, ScheduledStep, Scheduler, StepMeta,
    StepResults, Worker,
};
use kvferry_protocol::{BlockId, LayerId, TpRank};

/// Nothing is brought, nothing is held.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoConnector;

impl Scheduler for NoConnector {
    fn matched_tokens(&self, _: &Request, _: u32) -> Match {
        Match::None
    }

    fn allocated(&mut self, _: &Request, _: &[BlockId], _: u32, _: u32) -> Result<(), ConnectorError> {
        Ok(())
    }

    fn build_step(&mut self, _: &ScheduledStep) -> StepMeta {
        StepMeta::default()
    }

    fn finished(&mut self, _: &RequestId, _: &[BlockId], _: EngineFinish) -> Hold {
        Hold::Free
    }

    fn apply(&mut self, _: Vec<StepResults>) -> Applied {
        Applied::default()
    }

    fn has_pending(&self) -> bool {
        false
    }
}

impl Worker for NoConnector {
    fn begin_step(&mut self, _: StepMeta) -> Result<(), ConnectorError> {
        Ok(())
    }

    fn begin_loads(&mut self, _: Vec<Load>) -> Result<(), ConnectorError> {
        Ok(())
    }

    fn wait_layer(&mut self, _: LayerId) -> Vec<RequestId> {
        Vec::new()
    }

    fn save_layer(&mut self, _: LayerId, _: Ready) {}

    fn wait_saved(&mut self) {}

    fn poll(&mut self) -> StepResults {
        StepResults::empty(TpRank::new(0))
    }

    fn preempted(&mut self, _: &[RequestId]) {}

    fn shutdown(&mut self, _: Duration) {}
}
