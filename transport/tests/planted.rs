//! Bugs that are planted in a transport are seen by the contract: each by the case that is there for it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use bytes::Bytes;
use kvferry_protocol::PeerId;
use kvferry_protocol::wire::ClusterKey;
use kvferry_transport::testing::{self, Make, with_patience};
use kvferry_transport::{LoopbackConfig, LoopbackNetwork, PathKind, Planted, Tcp, TcpConfig, TcpConfigFile, Transport};

type Case = fn(&Make<'_>);

/// How long a case waits for what a bug keeps from coming. A whole transport passes the same cases with all its patience.
const PATIENCE: Duration = Duration::from_secs(5);

/// Fewer events than any case makes, so that the queue fills.
fn few_events(bug: Planted, usual: u32) -> u32 {
    if bug == Planted::RoomNotTold { 8 } else { usual }
}

/// The case that must see a bug.
fn case_of(bug: Planted) -> Case {
    match bug {
        Planted::RevokeSkipped | Planted::RevokeNotWaited => testing::nothing_lands_after_revoke_returned,
        Planted::SealSkipped | Planted::SealNotWaited => {
            testing::nothing_lands_in_what_is_sealed_and_the_rest_stays_open
        }
        Planted::SessionUnchecked => testing::a_grant_is_of_no_use_to_another_peer,
        Planted::CutKeepsGrants => testing::nothing_lands_after_a_session_ended,
        Planted::CancelUnheard => testing::cancel_ends_each_post_once,
        Planted::SequenceTakenAgain => testing::what_may_not_be_written_is_refused_and_the_session_goes_on,
        Planted::LandedEarly => testing::writes_of_many_frames_land_whole_in_both_directions,
        Planted::LandedTwice | Planted::PostedTwice => {
            testing::each_write_lands_once_after_its_bytes_with_its_notification
        }
        Planted::PostCreditLost | Planted::GrantCreditLost => testing::what_is_limited_comes_back,
        Planted::RoomNotTold => testing::a_receiver_that_does_not_poll_holds_its_peers_back_and_loses_nothing,
        Planted::LookUnguarded => testing::watches_look_no_more_after_a_revoke_or_a_cancel,
        Planted::SlabKept => testing::a_packed_source_is_let_go_with_its_post,
        Planted::FillerAtOnce => testing::what_lands_is_what_was_posted,
        Planted::CutForgetsHeld => |_| panic!("it needs what is held in place: see in_place.rs"),
        Planted::PatternSpoilt => |_| panic!("it needs a device: see rdma.rs"),
        Planted::LaneSlow => |_| panic!("it is no bug"),
    }
}

/// Fails if the case of a bug does not.
fn must_see(carrier: &str, bug: Planted, make: &Make<'_>) {
    let run = || with_patience(PATIENCE, || case_of(bug)(make));
    // A cancel has to meet a frame that is half sent, or one that has not landed yet; and on a busy machine threads meet seldom.
    let tries = if matches!(bug, Planted::FillerAtOnce | Planted::CancelUnheard) { 50 } else { 5 };
    let is_seen = (0..tries).any(|_| catch_unwind(AssertUnwindSafe(run)).is_err());
    assert!(is_seen, "{carrier}: nobody saw {bug:?}");
}

fn tcp(bug: Planted, paths: &[PathKind]) -> impl Fn(PeerId, Bytes) -> Box<dyn Transport> + use<> {
    let paths = paths.to_vec();
    move |peer, greeting| {
        let usual = TcpConfigFile::default();
        let max_events = if peer.engine.as_str() == "b" { few_events(bug, usual.max_events) } else { usual.max_events };
        let file =
            TcpConfigFile { redial_first_ms: 2, redial_longest_ms: 20, max_events, paths: paths.clone(), ..usual };
        let key = ClusterKey::new(&[7; 32]).unwrap();
        Box::new(Tcp::bind_planted(TcpConfig::try_from(file).unwrap(), key, peer, greeting, bug).unwrap())
    }
}

fn loopback(bug: Planted) -> impl Fn(PeerId, Bytes) -> Box<dyn Transport> {
    let network = LoopbackNetwork::new();
    move |peer, greeting| {
        let usual = LoopbackConfig::default();
        let events = usual.max_events as u32;
        let max_events = if peer.engine.as_str() == "b" { few_events(bug, events) } else { events } as usize;
        Box::new(network.endpoint_planted(peer, greeting, LoopbackConfig { max_events, ..usual }, bug))
    }
}

#[test]
fn every_bug_planted_in_tcp_is_seen() {
    Planted::ALL.into_iter().for_each(|bug| must_see("tcp", bug, &tcp(bug, &[PathKind::Tcp])));
}

#[test]
fn every_bug_planted_where_memory_is_shared_is_seen() {
    for (name, path) in [("shm", PathKind::SharedMemory), ("cma", PathKind::ProcessMemory)] {
        // Frames without payload are not filled up; a cancelled loan is over whether the cancel is heard or not; and whether a lane
        // ever finds the queue of events full is chance where it only copies.
        let harmless = [Planted::FillerAtOnce, Planted::CancelUnheard, Planted::RoomNotTold];
        let bugs = Planted::ALL.into_iter().filter(|bug| !harmless.contains(bug));
        bugs.for_each(|bug| must_see(name, bug, &tcp(bug, &[path, PathKind::UnixSocket])));
    }
}

#[test]
fn every_bug_planted_in_loopback_is_seen() {
    // Three do no harm there: no frame is filled up, a cancel is a call, so there is nothing to be heard, and a session's end waits for the copies out of its
    // posts' sources, which are the copies into its grants.
    let harmless = [Planted::CancelUnheard, Planted::CutKeepsGrants, Planted::FillerAtOnce];
    let bugs = Planted::ALL.into_iter().filter(|bug| !harmless.contains(bug));
    bugs.for_each(|bug| must_see("loopback", bug, &loopback(bug)));
}

/// What makes two of the bugs visible is none itself.
#[test]
fn slow_lanes_are_no_bug() {
    let tcp = |path| tcp(Planted::LaneSlow, &[path, PathKind::UnixSocket, PathKind::Tcp]);
    let (shared, sockets) = (tcp(PathKind::SharedMemory), tcp(PathKind::Tcp));
    for make in [&shared as &Make<'_>, &sockets, &loopback(Planted::LaneSlow)] {
        testing::nothing_lands_in_what_is_sealed_and_the_rest_stays_open(make);
        testing::nothing_lands_after_a_session_ended(make);
    }
    testing::nothing_lands_after_revoke_returned(&shared);
    testing::what_lands_is_what_was_posted(&shared);
}
