//! The one table of metrics: name, instrument, meaning. Names end in their unit; counters in `_total`.

use super::instrument::{ByLabel, Counter, Family, Gauge, Histogram, HistogramValues, Instrument, Sink};
use super::label::{DropReason, FailureReason, Path, RefusalReason, ReturnRefusal, Side, TierDrop};
use super::prometheus::{Definition, Page};
use crate::pool::PoolCounts;

macro_rules! metrics {
    ($($name:ident: $instrument:ty => $value:ty, $meaning:literal;)+) => {
        /// The connector's metrics, shared by whoever updates or reads them.
        #[derive(Debug, Default)]
        pub struct Metrics {
            $(#[doc = $meaning] pub $name: $instrument,)+
        }

        /// What [`Metrics`] said at one moment.
        #[derive(Clone, PartialEq, Debug)]
        pub struct ConnectorMetrics {
            $(#[doc = $meaning] pub $name: $value,)+
        }

        /// All metrics, in the order of the page and of the documentation.
        pub const DEFINITIONS: &[Definition] = &[$(Definition {
            name: concat!("kvferry_", stringify!($name)),
            kind: <$instrument as Instrument>::KIND,
            meaning: $meaning,
        },)+];

        impl Metrics {
            /// Reads all values.
            #[must_use]
            pub fn snapshot(&self) -> ConnectorMetrics {
                ConnectorMetrics { $($name: self.$name.snapshot(),)+ }
            }
        }

        impl ConnectorMetrics {
            /// Hands each metric's samples to the page, in the order of [`DEFINITIONS`].
            pub(super) fn write(&self, page: &mut Page<'_>) {
                let mut definitions = DEFINITIONS.iter();
                $(if let Some(definition) = definitions.next() {
                    page.metric(definition, |write: &mut Sink<'_>| <$instrument>::samples(&self.$name, write));
                })+
            }
        }
    };
}

metrics! {
    transfers_started_total: Family<Side, Counter> => ByLabel<Side, u64>,
        "Transfers begun.";
    transfers_done_total: Family<Side, Counter> => ByLabel<Side, u64>,
        "Transfers whose verdict is Done.";
    transfers_failed_total: Family<(Side, FailureReason), Counter> => ByLabel<(Side, FailureReason), u64>,
        "Transfers whose verdict is Failed, by reason.";
    transfers_cancelled_total: Family<Side, Counter> => ByLabel<Side, u64>,
        "Transfers whose verdict is Cancelled.";
    transfers_live: Family<Side, Gauge> => ByLabel<Side, u64>,
        "Transfers without a verdict.";
    transfer_bytes_total: Family<Side, Counter> => ByLabel<Side, u64>,
        "K/V bytes handed to the transport (send), or landed and verified (receive).";
    lent_bytes_total: Counter => u64,
        "Bytes that were sent by staying where they are: a peer on this host copied them out of this process's memory itself.";
    handed_bytes_total: Counter => u64,
        "Bytes that were sent by staying where they are for good: a peer on this host reads them in place.";
    adopted_bytes_total: Counter => u64,
        "Bytes of peers on this host that this process reads where they lie; a load's last block of them is copied.";
    held_bytes: Gauge => u64,
        "Bytes of this process's blocks that peers read in place, or are about to.";
    recalled_writes_total: Counter => u64,
        "Writes that peers on this host read in place and that were asked back.";
    in_place_copied_pages_total: Counter => u64,
        "Pages that were read in place and then copied, since their owner asked for them or its session ended.";
    withdrawn_requests_total: Counter => u64,
        "Requests whose K/V was read in place and whose owner gave it up; nothing that was computed with it was used.";
    chunks_total: Family<Side, Counter> => ByLabel<Side, u64>,
        "Chunks posted (send), or verified (receive).";
    transfer_seconds: Family<Side, Histogram> => ByLabel<Side, HistogramValues>,
        "Time from a transfer's start to its verdict, whatever it is, in seconds.";
    wire_seconds: Histogram => HistogramValues,
        "Time from a sent transfer's first write to its verdict Done, in seconds.";
    exposed_transfer_seconds: Histogram => HistogramValues,
        "The part of it after the prompt's last layer was computed: what compute did not hide, in seconds.";
    transfer_compute_seconds: Histogram => HistogramValues,
        "Time in which prefill computed a sent transfer's K/V, up to the last layer, in seconds.";
    transfer_link_seconds: Histogram => HistogramValues,
        "Time in which a sent transfer's writes occupied the link, in seconds.";
    unhideable_transfer_seconds: Histogram => HistogramValues,
        "What no order of whole layers could hide of it: what the link took longer than compute, and the last layer, in seconds.";
    exposed_wait_seconds: Histogram => HistogramValues,
        "Time that the model waited in wait_layer for K/V to land, one observation a step that waited, in seconds.";
    loaded_tokens_total: Counter => u64,
        "Tokens whose K/V came from a peer.";
    prompt_compute_microseconds_total: Counter => u64,
        "Time of the engine's steps that computed prompts, in microseconds; set by the engine.";
    prompt_compute_tokens_total: Counter => u64,
        "Tokens of prompts that those steps computed; set by the engine.";
    recomputed_tokens_total: Counter => u64,
        "Tokens that a failed load left to be computed here.";
    computed_prompt_tokens_total: Counter => u64,
        "Tokens of prompts that the engine computed itself.";
    local_prompt_tokens_total: Counter => u64,
        "Tokens of prompts that were in the engine's cache when their request was admitted; set by the engine.";
    preempted_requests_total: Counter => u64,
        "How often the engine took a running request's blocks for another one; set by the engine.";
    failed_requests_total: Counter => u64,
        "Requests that failed because their load did, under the policy fail.";
    digest_mismatches_total: Counter => u64,
        "Chunks that arrived with another digest than their sender's; none of them was used.";
    leases_live: Gauge => u64,
        "Leases by which blocks are held for a transfer.";
    leases_expired_total: Counter => u64,
        "Leases that ended by their deadline.";
    grants_live: Gauge => u64,
        "Grants by which a peer may write here.";
    grants_revoked_total: Counter => u64,
        "Grants withdrawn before they were filled.";
    early_grants_live: Gauge => u64,
        "Grants of peers that wait here for their request.";
    early_grants_dropped_total: Counter => u64,
        "Grants of peers whose request did not come in time, or that were too many.";
    messages_dropped_total: Family<DropReason, Counter> => ByLabel<DropReason, u64>,
        "Messages and reports that were dropped, by reason.";
    engine_messages_waiting: Gauge => u64,
        "Messages of peers' engines that found this engine's queue full and wait for room in it.";
    addresses_dialled: Gauge => u64,
        "Addresses that this engine reaches, or tries to.";
    sessions_by_path: Family<Path, Gauge> => ByLabel<Path, u64>,
        "Sessions whose K/V goes this way.";
    sessions_without_path: Family<Path, Gauge> => ByLabel<Path, u64>,
        "Sessions whose K/V would go this way, which is better than theirs, if it could; the log says why it cannot.";
    sessions_live: Gauge => u64,
        "Peers with a session.";
    sessions_lost_total: Counter => u64,
        "Sessions that were cut.";
    peers_refused_total: Family<RefusalReason, Counter> => ByLabel<RefusalReason, u64>,
        "Peers that were refused, by reason.";
    pool_blocks: Gauge => u64,
        "Blocks of the pool.";
    pool_blocks_free: Gauge => u64,
        "Blocks without a holder, cached ones among them.";
    pool_blocks_cached: Gauge => u64,
        "Free blocks whose content a prefix can still revive.";
    pool_blocks_leased: Gauge => u64,
        "Blocks held for a transfer.";
    pool_evictions_total: Counter => u64,
        "Cached blocks whose content was given up for a new one.";
    prefix_queried_blocks_total: Counter => u64,
        "Blocks that were asked for by hash.";
    prefix_hit_blocks_total: Counter => u64,
        "Blocks that were asked for by hash and found.";
    slab_pool_used_bytes: Gauge => u64,
        "Memory of the slabs in use, in bytes.";
    slab_pool_limit_bytes: Gauge => u64,
        "Memory of all slabs, in bytes.";
    slab_waits_total: Counter => u64,
        "Chunks that waited for a free slab.";
    staging_used_bytes: Gauge => u64,
        "Host memory that holds K/V on its way to a device, in bytes.";
    staging_limit_bytes: Gauge => u64,
        "All host memory for that, in bytes.";
    staging_waits_total: Counter => u64,
        "Grants that waited for room in it.";
    tier_blocks: Gauge => u64,
        "Blocks that the tier has room for.";
    tier_blocks_filled: Gauge => u64,
        "Blocks that the tier holds and a prompt can find.";
    tier_limit_bytes: Gauge => u64,
        "Memory of the tier on this worker, in bytes.";
    tier_queried_blocks_total: Counter => u64,
        "Blocks of admitted requests beyond their local prefix that the tier was asked for.";
    tier_hit_blocks_total: Counter => u64,
        "Those of them that the tier was told to bring.";
    tier_restored_tokens_total: Counter => u64,
        "Tokens whose K/V came from the tier, verified.";
    tier_stored_blocks_total: Counter => u64,
        "Blocks that the tier took.";
    tier_stored_bytes_total: Counter => u64,
        "Bytes that were copied to the tier.";
    tier_dropped_blocks_total: Family<TierDrop, Counter> => ByLabel<TierDrop, u64>,
        "Blocks that the tier was given and did not keep, by reason.";
    tier_evictions_total: Counter => u64,
        "Blocks that the tier gave up for others.";
    tier_digest_mismatches_total: Counter => u64,
        "Blocks that came back with another digest than they were stored with; none of them was used.";
    tier_late_total: Counter => u64,
        "Calls that the tier did not answer in time; nothing waited for them.";
    returned_blocks_total: Counter => u64,
        "Blocks of answers that were offered to the tier of the engine that computed their prompt.";
    taken_blocks_total: Counter => u64,
        "Blocks of peers that landed in the tier and were verified.";
    returns_refused_total: Family<ReturnRefusal, Counter> => ByLabel<ReturnRefusal, u64>,
        "Offers of peers that the tier did not take, by reason.";
    tier_queue_blocks: Gauge => u64,
        "Blocks that wait to be copied to the tier.";
}

impl Metrics {
    /// All at zero.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes over what a block pool says of itself.
    pub fn record_pool(&self, counts: &PoolCounts) {
        self.pool_blocks.set(counts.total as u64);
        self.pool_blocks_free.set(counts.free as u64);
        self.pool_blocks_cached.set(counts.cached as u64);
        self.pool_blocks_leased.set(counts.leased as u64);
        self.pool_evictions_total.advance_to(counts.evicted_total);
        self.prefix_queried_blocks_total.advance_to(counts.queried_total);
        self.prefix_hit_blocks_total.advance_to(counts.hit_total);
    }
}
