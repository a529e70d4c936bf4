//! Frames that devices of a peer wrote: their bytes are in place, and they are told once these can be seen.

use std::sync::Arc;

use kvferry_protocol::PeerId;
use kvferry_protocol::wire::{FrameHeader, Refusal, WireError};

use super::Core;
use super::grants::{Carrier, SessionKey};
use super::inbound::Inbound;
use crate::device_memory::Flush;

/// One frame, of which a completion said that it is in place.
pub(crate) struct Written {
    pub(crate) header: FrameHeader,
    admitted: Result<Inbound, Refusal>,
}

impl Written {
    /// Checks a frame, once, against the grants of `session`.
    pub(crate) fn admit(
        core: &Core,
        session: SessionKey,
        header: FrameHeader,
        table: &[u8],
    ) -> Result<Self, WireError> {
        let admitted = Inbound::admit(core, session, &header, table, Carrier::Device, Vec::new())?;
        Ok(Self { header, admitted })
    }

    /// Makes what a batch wrote into memory of devices visible there, with one call of each flush: all completions of the batch came
    /// before.
    pub(crate) fn make_visible(batch: &[Self]) -> Result<(), String> {
        let mut done: Vec<&Arc<dyn Flush>> = Vec::new();
        for flush in batch.iter().filter_map(|written| written.admitted.as_ref().ok()).flat_map(Inbound::flushes) {
            if !done.iter().any(|other| Arc::ptr_eq(other, flush)) {
                flush.flush()?;
                done.push(flush);
            }
        }
        Ok(())
    }

    /// Counts the frame, which can be seen. Returns whether that completed the write, which is an event then.
    pub(crate) fn land(self, core: &Core, peer: &PeerId) -> Result<bool, Refusal> {
        let mut inbound = self.admitted?;
        // Nothing is placed: it says whether that would have been allowed.
        inbound.place(|_| (0, ()))?;
        inbound.land(core, peer)
    }
}

#[cfg(test)]
mod tests {
    use std::ptr::NonNull;
    use std::sync::Mutex;
    use std::time::Duration;

    use bytes::Bytes;
    use kvferry_protocol::pages::{Extent, Pages, Piece};
    use kvferry_protocol::wire::{FrameKind, encode_table};
    use kvferry_protocol::{EngineId, Incarnation, PpRank, RegionId, TpRank};

    use super::*;
    use crate::api::{Event, GrantKey, Memory, MemoryKind};
    use crate::core::Bug;
    use crate::device_memory::DeviceAccess;

    /// Counts how often it was called, and how many events there were then.
    struct Recorder {
        core: Arc<Core>,
        calls: Mutex<Vec<usize>>,
        outcome: Result<(), String>,
    }

    impl Flush for Recorder {
        fn flush(&self) -> Result<(), String> {
            let mut events = Vec::new();
            self.core.events.poll(&mut events, Duration::ZERO);
            self.calls.lock().unwrap().push(events.len());
            self.outcome.clone()
        }
    }

    const BYTES: u64 = 4096;

    fn peer() -> PeerId {
        let (engine, incarnation) = (EngineId::new("a").unwrap(), Incarnation::new(1));
        PeerId { engine, incarnation, pp_rank: PpRank::new(0), tp_rank: TpRank::new(0) }
    }

    /// Memory where nothing is mapped: whoever touches it dies.
    fn of_device(flush: Option<Arc<dyn Flush>>) -> Memory {
        let address = NonNull::new(std::ptr::without_provenance_mut(4096)).unwrap();
        let kind = MemoryKind::Device(DeviceAccess { dma_buf: None, flush });
        Memory { address, bytes: BYTES as usize, kind, file: None }
    }

    fn grant(core: &Core, session: SessionKey, region: u32) -> GrantKey {
        let piece = Piece { region: RegionId::new(region), offset: 0, loops: vec![], run_bytes: BYTES };
        let pages = Pages { bases: vec![0], pieces: vec![piece] };
        core.grant(&peer(), session, &pages, None, || Ok(())).unwrap()
    }

    fn frame(grant: GrantKey, sequence: u32) -> (FrameHeader, Vec<u8>) {
        let mut table = Vec::new();
        encode_table(&[Extent::contiguous(0, BYTES)], b"note", &mut table);
        let header = FrameHeader {
            grant: grant.0,
            sequence,
            extents: 1,
            notification_bytes: 4,
            payload_bytes: BYTES as u32,
            write_bytes: BYTES,
            ..FrameHeader::with_body(FrameKind::Data, &table)
        };
        (header, table)
    }

    fn core() -> (Arc<Core>, SessionKey) {
        let core = Arc::new(Core::new(8, 64, Bug::default()));
        let session = core.next_session();
        core.grants.open_session(session);
        (core, session)
    }

    fn recorder(core: &Arc<Core>, outcome: Result<(), String>) -> Arc<Recorder> {
        Arc::new(Recorder { core: Arc::clone(core), calls: Mutex::default(), outcome })
    }

    #[test]
    fn a_batch_is_flushed_once_for_each_device_before_any_of_it_is_told() {
        let (core, session) = core();
        let flushes = [recorder(&core, Ok(())), recorder(&core, Ok(()))];
        for flush in [Some(0), Some(1), Some(0), None] {
            let flush = flush.map(|flush: usize| -> Arc<dyn Flush> { flushes[flush].clone() });
            core.regions.add_of_device(of_device(flush)).unwrap();
        }
        let grants: Vec<_> = (0..4).map(|region| grant(&core, session, region)).collect();
        for (batch, want) in [(&[0, 1, 2, 3][..], [1, 1]), (&[0, 2], [2, 1]), (&[3], [2, 1]), (&[1], [2, 2])] {
            let sequence = want.iter().sum::<usize>() as u32 * 10 + batch[0];
            let admit = |grant: &u32| {
                let (header, table) = frame(grants[*grant as usize], sequence);
                Written::admit(&core, session, header, &table).unwrap()
            };
            let written: Vec<_> = batch.iter().map(admit).collect();
            Written::make_visible(&written).unwrap();
            let calls = [0, 1].map(|at| flushes[at].calls.lock().unwrap().len());
            assert_eq!(calls, want, "{batch:?}");
            for written in written {
                assert_eq!(written.land(&core, &peer()), Ok(true), "{batch:?}");
            }
            let mut events = Vec::new();
            core.events.poll(&mut events, Duration::ZERO);
            let is_landed = |event: &Event| matches!(event, Event::Landed { notification, .. } if notification == &Bytes::from_static(b"note"));
            assert!(events.len() == batch.len() && events.iter().all(is_landed), "{batch:?}: {events:?}");
        }
        let calls = flushes.iter().flat_map(|flush| flush.calls.lock().unwrap().clone());
        assert!(calls.into_iter().all(|told| told == 0), "an event came before its flush");
    }

    #[test]
    fn nothing_is_told_of_a_batch_whose_flush_fails_and_a_frame_that_is_refused_flushes_nothing() {
        let (core, session) = core();
        let lost = recorder(&core, Err("the context is lost".to_owned()));
        core.regions.add_of_device(of_device(Some(lost.clone()))).unwrap();
        let grant = grant(&core, session, 0);
        let (header, table) = frame(GrantKey(grant.0 ^ 4), 0);
        let unknown = Written::admit(&core, session, header, &table).unwrap();
        Written::make_visible(std::slice::from_ref(&unknown)).unwrap();
        assert_eq!(unknown.land(&core, &peer()), Err(Refusal::UnknownGrant));
        let (header, table) = frame(grant, 0);
        let written = Written::admit(&core, session, header, &table).unwrap();
        assert_eq!(Written::make_visible(&[written]), Err("the context is lost".to_owned()));
        assert_eq!(lost.calls.lock().unwrap().len(), 1);
    }

    #[test]
    fn a_frame_that_a_processor_carries_is_refused_by_name_and_ends_its_write() {
        let (core, session) = core();
        core.regions.add_of_device(of_device(None)).unwrap();
        let grant = grant(&core, session, 0);
        let (header, table) = frame(grant, 3);
        let refused = Inbound::admit(&core, session, &header, &table, Carrier::Processor, Vec::new()).unwrap().err();
        assert_eq!(refused, Some(Refusal::DeviceMemory));
        assert!(Refusal::DeviceMemory.reason().contains("no processor of the receiver writes"));
        // And a device's is taken, of which no byte is placed here.
        let written = Written::admit(&core, session, header, &table).unwrap();
        assert_eq!(written.land(&core, &peer()), Ok(true));
    }
}
