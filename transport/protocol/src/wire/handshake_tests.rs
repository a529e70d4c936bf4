use super::*;
use crate::ids::{EngineId, Incarnation, PeerId, PpRank, TpRank};
use crate::wire::hello::VERSIONS;
use crate::wire::identity::Declined;

fn key(byte: u8) -> ClusterKey {
    ClusterKey::new(&[byte; 32]).unwrap()
}

fn identity(name: &str, session: u64) -> PeerIdentity {
    let peer = PeerId {
        engine: EngineId::new(name).unwrap(),
        incarnation: Incarnation::new(1),
        pp_rank: PpRank::new(0),
        tp_rank: TpRank::new(0),
    };
    PeerIdentity { peer, lanes: 2, session, greeting: b"greeting".to_vec(), offers: Vec::new() }
}

fn peers(dialler_key: u8, versions: VersionRange) -> (Dialler, Listener) {
    let deadline = Instant::now();
    let introduction = Introduction::Peer(identity("d", 0));
    (
        Dialler::new(key(dialler_key), versions, introduction, [1; 32], deadline),
        Listener::new(key(7), VERSIONS, [2; 32], deadline, false),
    )
}

/// Carries bytes to and fro, each changed by `touch(is from the dialler, message)`, until both are silent.
fn talk(
    dialler: &mut Dialler,
    listener: &mut Listener,
    touch: impl Fn(bool, &mut Vec<u8>),
) -> (Result<Option<Established>, HandshakeError>, Result<Option<Identity>, HandshakeError>) {
    let (mut to_listener, mut to_dialler) = (Vec::new(), Vec::new());
    let (mut established, mut said) = (None, None);
    loop {
        let mut quiet = true;
        if let Some(mut bytes) = dialler.poll_output() {
            touch(true, &mut bytes);
            to_listener.append(&mut bytes);
        }
        if listener.wants() > 0 && to_listener.len() >= listener.wants() {
            quiet = false;
            let rest = to_listener.split_off(listener.wants());
            match listener.feed(&std::mem::replace(&mut to_listener, rest)) {
                Ok(Step::Said(identity)) => {
                    listener.judge(&Verdict::Peer(super::tests::identity("l", 77)));
                    said = Some(identity);
                }
                Ok(Step::More) => {}
                Err(error) => return (Ok(established), Err(error)),
            }
        }
        if let Some(mut bytes) = listener.poll_output() {
            touch(false, &mut bytes);
            to_dialler.append(&mut bytes);
        }
        if dialler.wants() > 0 && to_dialler.len() >= dialler.wants() {
            quiet = false;
            let rest = to_dialler.split_off(dialler.wants());
            match dialler.feed(&std::mem::replace(&mut to_dialler, rest)) {
                Ok(Step::Said(done)) => established = Some(done),
                Ok(Step::More) => {}
                Err(error) => return (Err(error), Ok(said)),
            }
        }
        if quiet {
            return (Ok(established), Ok(said));
        }
    }
}

#[test]
fn a_listener_takes_its_own_key_and_the_others_and_no_third() {
    for (dialler_key, is_taken) in [(7, true), (8, true), (9, true), (10, false)] {
        let introduction = Introduction::Peer(identity("d", 0));
        let mut dialler = Dialler::new(key(dialler_key), VERSIONS, introduction, [1; 32], Instant::now());
        let keys = ClusterKeys::new(key(7), vec![key(8), key(9)]);
        let mut listener = Listener::new(keys, VERSIONS, [2; 32], Instant::now(), false);
        let (established, said) = talk(&mut dialler, &mut listener, |_, _| {});
        assert_eq!(said.is_ok(), is_taken, "{dialler_key}");
        assert_eq!(established.unwrap().is_some(), is_taken, "{dialler_key}");
    }
}

#[test]
fn both_sides_prove_themselves_and_learn_who_the_other_is() {
    let (mut dialler, mut listener) = peers(7, VERSIONS);
    let (established, said) = talk(&mut dialler, &mut listener, |_, _| {});
    let established = established.unwrap().unwrap();
    assert_eq!(established.version, VERSIONS.max);
    assert_eq!(established.verdict, Verdict::Peer(identity("l", 77)));
    assert_eq!(said.unwrap(), Some(Identity::Peer(identity("d", 0))));
    assert_eq!((dialler.wants(), listener.wants()), (0, 0));
}

#[test]
fn another_key_is_refused_before_the_identity_is_sent() {
    let (mut dialler, mut listener) = peers(8, VERSIONS);
    let (established, said) = talk(&mut dialler, &mut listener, |_, _| {});
    assert!(established.unwrap().is_none());
    assert_eq!(said, Err(HandshakeError::Proof { step: HandshakeStep::DiallerProof }));
    assert_eq!(dialler.awaits(), HandshakeStep::ListenerProof);
}

#[test]
fn any_bit_changed_on_the_way_ends_the_handshake() {
    for from_dialler in [true, false] {
        for at in 0..200_usize {
            let (mut dialler, mut listener) = peers(7, VERSIONS);
            let seen = std::cell::Cell::new(0);
            let (established, said) = talk(&mut dialler, &mut listener, |from, bytes| {
                if from == from_dialler {
                    let start = seen.replace(seen.get() + bytes.len());
                    if let Some(byte) = at.checked_sub(start).and_then(|at| bytes.get_mut(at)) {
                        *byte ^= 1;
                    }
                }
            });
            let done = matches!(established, Ok(Some(_))) && matches!(said, Ok(Some(_)));
            assert!(!done || at >= seen.get(), "byte {at} from the dialler: {from_dialler}");
            assert!(seen.get() < 200, "all bytes were tried");
        }
    }
}

#[test]
fn versions_without_overlap_are_named_on_both_sides() {
    let (mut dialler, mut listener) = peers(7, VersionRange { min: 8, max: 9 });
    let hello = dialler.poll_output().unwrap();
    let refused = listener.feed(&hello).unwrap_err();
    assert_eq!(
        refused,
        HandshakeError::Version { our_min: VERSIONS.min, our_max: VERSIONS.max, their_min: 8, their_max: 9 }
    );
    let refused = dialler.feed(&listener.poll_output().unwrap()).unwrap_err();
    assert_eq!(
        refused,
        HandshakeError::Version { our_min: 8, our_max: 9, their_min: VERSIONS.min, their_max: VERSIONS.max }
    );
}

#[test]
fn a_busy_listener_says_so() {
    let (mut dialler, _) = peers(7, VERSIONS);
    let mut listener = Listener::new(key(7), VERSIONS, [2; 32], Instant::now(), true);
    assert_eq!(listener.feed(&dialler.poll_output().unwrap()), Err(HandshakeError::Busy));
    assert_eq!(dialler.feed(&listener.poll_output().unwrap()).unwrap_err(), HandshakeError::Busy);
}

#[test]
fn a_data_lane_is_bound_to_the_session_that_made_its_secret() {
    let (mut dialler, mut listener) = peers(7, VERSIONS);
    let session = std::cell::RefCell::new(None);
    let secret = talk(&mut dialler, &mut listener, |_, _| {}).0.unwrap().unwrap().lane_secret;
    session.replace(Some(secret.clone()));
    let other = LaneSecret([9; PROOF_BYTES]);
    for (dialled, held, lane, want) in
        [(&secret, &secret, 1, true), (&other, &secret, 1, false), (&secret, &other, 1, false)]
    {
        let introduction = Introduction::Lane { session: 77, lane, secret: dialled.clone() };
        let mut dialler = Dialler::new(key(7), VERSIONS, introduction, [3; 32], Instant::now());
        let mut listener = Listener::new(key(7), VERSIONS, [4; 32], Instant::now(), false);
        listener.feed(&dialler.poll_output().unwrap()).unwrap();
        dialler.feed(&listener.poll_output().unwrap()).unwrap();
        listener.feed(&dialler.poll_output().unwrap()).unwrap();
        dialler.feed(&listener.poll_output().unwrap()).unwrap();
        let sealed = dialler.poll_output().unwrap();
        listener.feed(&sealed[..8]).unwrap();
        let Step::Said(Identity::Lane(said)) = listener.feed(&sealed[8..]).unwrap() else { panic!("no lane") };
        assert_eq!(listener.binds(&said, held), want);
        assert!(!listener.binds(&LaneIdentity { lane: lane + 1, ..said }, held), "a lane's proof fits no other lane");
        listener.judge(&Verdict::Declined(Declined::UnknownSession));
        let verdict = listener.poll_output().unwrap();
        dialler.feed(&verdict[..8]).unwrap();
        assert_eq!(dialler.feed(&verdict[8..]).unwrap_err(), HandshakeError::Declined(Declined::UnknownSession));
    }
}

#[test]
fn what_is_too_long_or_of_another_lane_kind_is_refused() {
    let (mut dialler, mut listener) = peers(7, VERSIONS);
    listener.feed(&dialler.poll_output().unwrap()).unwrap();
    dialler.feed(&listener.poll_output().unwrap()).unwrap();
    listener.feed(&dialler.poll_output().unwrap()).unwrap();
    let refused = listener.feed(&[0xff; 8]).unwrap_err();
    assert!(matches!(refused, HandshakeError::Malformed { step: HandshakeStep::Identity, .. }), "{refused}");
    assert_eq!(listener.wants(), 0, "nothing more is read");
}

proptest::proptest! {
    #[test]
    fn garbage_of_any_length_never_passes_a_listener(garbage in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..400)) {
        let (_, mut listener) = peers(7, VERSIONS);
        let mut rest = &garbage[..];
        while listener.wants() > 0 && rest.len() >= listener.wants() {
            let (now, later) = rest.split_at(listener.wants());
            rest = later;
            if listener.feed(now).is_err() { break }
        }
        proptest::prop_assert!(matches!(listener.awaits(), HandshakeStep::Hello | HandshakeStep::DiallerProof | HandshakeStep::Verdict));
        proptest::prop_assert!(listener.session().is_none());
    }
}
