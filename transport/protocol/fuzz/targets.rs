//! What every fuzz target checks; the crate's tests replay the corpora through the same functions.

use std::num::{NonZeroU32, NonZeroU64};
use std::time::Duration;

use kvferry_protocol::codec;
use kvferry_protocol::message::{OpaqueKey, WindowBytes};
use kvferry_protocol::transfer::{
    Order, PostOutcome, Receiver, ReceiverConfig, ReceiverOutput, Rect, Sender, SenderConfig, SenderOutput, Time,
};
use kvferry_protocol::{Digest, TransferId};

/// What is read as a message is written and read again as the same message.
pub(crate) fn message(bytes: &[u8]) {
    for session in codec::VERSIONS {
        let Ok(message) = codec::decode(session, bytes) else { continue };
        let again = codec::encode(session, &message).expect("a message that was read can be written");
        assert_eq!(codec::decode(session, &again).expect("what was written can be read"), message);
    }
}

/// What is read as a notification is written and read again as the same notification.
pub(crate) fn wrote(bytes: &[u8]) {
    for session in codec::VERSIONS {
        let Ok(wrote) = codec::decode_wrote(session, bytes) else { continue };
        let again = codec::encode_wrote(session, &wrote).expect("a notification that was read can be written");
        assert_eq!(codec::decode_wrote(session, &again).expect("what was written can be read"), wrote);
    }
}

/// Two machines take a peer's messages and notifications, whatever they are. Each is a byte that says which (0 is a message,
/// anything else a notification), a length of one byte, and so many bytes.
pub(crate) fn machines(bytes: &[u8]) {
    let wanted = Rect::new(0..64, 0..4).expect("not empty");
    let (mut receiver, mut sender) = (new_receiver(wanted), new_sender(wanted));
    let mut rest = bytes;
    let mut ms = 1;
    while let Some((&[kind, length], tail)) = rest.split_first_chunk() {
        let (frame, tail) = tail.split_at(tail.len().min(length.into()));
        rest = tail;
        ms += 10;
        let now = Time::since_epoch(Duration::from_millis(ms));
        if kind == 0 {
            if let Some(message) = codec::VERSIONS.into_iter().find_map(|session| codec::decode(session, frame).ok()) {
                // A peer's message may well not fit: then it is an error, and nothing else.
                let _taken = receiver.message(now, message.clone()).is_ok();
                let _taken = sender.message(now, message).is_ok();
            }
        } else if let Some(wrote) =
            codec::VERSIONS.into_iter().find_map(|session| codec::decode_wrote(session, frame).ok())
        {
            let _taken = receiver.landed(now, wrote).is_ok();
        }
        receiver.timeout(now);
        sender.timeout(now);
        answer_receiver(&mut receiver, now);
        answer_sender(&mut sender, now);
    }
}

const TRANSFER: TransferId = TransferId::new(0x0123_4567_89ab_cdef_0011_2233_4455_6677);

fn new_receiver(wanted: Rect) -> Receiver {
    let config = ReceiverConfig {
        transfer: TRANSFER,
        wanted: wanted.into(),
        order: Order::DecodeFirst,
        deadline: Duration::from_millis(900),
        progress: Duration::from_millis(400),
        absent: Duration::from_millis(100),
        lease_ttl: Duration::from_millis(100),
        ask_before_revoke: Some(Duration::from_millis(50)),
        linger: Duration::from_millis(100),
        max_cuts: 2,
    };
    let mut receiver = Receiver::new(Time::ZERO, config).expect("a legal configuration");
    receiver.peer_up(Time::ZERO, 1).expect("the first session");
    answer_receiver(&mut receiver, Time::ZERO);
    receiver
}

fn new_sender(held: Rect) -> Sender {
    let config = SenderConfig {
        transfer: TRANSFER,
        held,
        order: Order::PrefillFirst,
        lease_ttl: Duration::from_millis(300),
        lease_max: Duration::from_millis(900),
        absent: Duration::from_millis(100),
        word: Duration::from_millis(200),
        max_posts_in_flight: NonZeroU32::new(4).expect("not zero"),
        max_cells_per_post: NonZeroU64::new(64).expect("not zero"),
        align_tokens: NonZeroU32::new(16).expect("not zero"),
    };
    let mut sender = Sender::new(Time::ZERO, config);
    sender.peer_up(Time::ZERO, 1).expect("the first session");
    sender.computed(Time::ZERO, held).expect("held");
    sender
}

fn answer_receiver(receiver: &mut Receiver, now: Time) {
    while let Some(output) = receiver.poll_output() {
        match output {
            ReceiverOutput::MakeGrant { generation, .. } => receiver
                .granted(now, generation, OpaqueKey::new(1), WindowBytes::default())
                .expect("a grant was asked for"),
            ReceiverOutput::Verify { generation, sequence, .. } => {
                receiver.digested(now, generation, sequence, Digest::new(0)).expect("a digest was asked for");
            }
            ReceiverOutput::Revoke { generation, .. } => {
                receiver.fenced(now, generation).expect("a fence was asked for");
            }
            ReceiverOutput::Send(message) => {
                drop(codec::encode(*codec::VERSIONS.end(), &message).expect("what is sent can be written"))
            }
            ReceiverOutput::Verified(_) | ReceiverOutput::Finished(_) => {}
        }
    }
}

fn answer_sender(sender: &mut Sender, now: Time) {
    while let Some(output) = sender.poll_output() {
        match output {
            SenderOutput::Post { generation, sequence, .. } => {
                sender.posted(now, generation, sequence, PostOutcome::Taken).expect("the post is in flight");
            }
            SenderOutput::Send(message) => {
                drop(codec::encode(*codec::VERSIONS.end(), &message).expect("what is sent can be written"))
            }
            SenderOutput::Adopt(_)
            | SenderOutput::CancelPosts { .. }
            | SenderOutput::ReleaseLease
            | SenderOutput::Finished(_) => {}
        }
    }
}
