use std::os::unix::net::UnixStream;

use super::*;
use crate::tls::{TlsIdentity, TlsPem};

macro_rules! pem {
    ($name:literal) => {
        include_bytes!(concat!("../../testing/tls/", $name, ".pem"))
    };
}

fn identity() -> TlsIdentity {
    let pem =
        TlsPem { certificate: pem!("a"), key: pem!("a.key"), authority: pem!("authority"), names: TlsNames::Engine };
    TlsIdentity::new(&pem).unwrap()
}

struct End {
    channel: Channel,
    socket: Socket,
}

impl End {
    fn send(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.channel.send(&self.socket, &[RawRun::of(bytes)])
    }

    fn receive(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.channel.receive(&self.socket, &[RawRun::of_mut(bytes)])
    }
}

fn sockets() -> [Socket; 2] {
    let (a, b) = UnixStream::pair().unwrap();
    [a, b].map(|end| {
        end.set_nonblocking(true).unwrap();
        Socket::Unix(end)
    })
}

/// Two ends whose handshake is over.
fn pair() -> [End; 2] {
    let ([dialler, listener], identity) = (sockets(), identity());
    let mut dialler = End { channel: identity.dial().unwrap(), socket: dialler };
    let mut listener = End { channel: identity.accept().unwrap(), socket: listener };
    let mut turns = 0;
    loop {
        let ready = [&mut dialler, &mut listener].map(|end| end.channel.shake(&end.socket).unwrap());
        if ready == [true, true] {
            return [dialler, listener];
        }
        turns += 1;
        assert!(turns < 10, "the handshake does not end");
    }
}

fn is_blocked(result: &io::Result<usize>) -> bool {
    matches!(result, Err(error) if error.kind() == io::ErrorKind::WouldBlock)
}

/// What `from` sends of `bytes` arrives at `to`, though the socket takes little of it at a time; `keys` renews the keys on the way.
fn carry(from: &mut End, to: &mut End, bytes: &[u8], into: &mut [u8], mut renew: bool) {
    let (mut sent, mut got) = (0, 0);
    while got < bytes.len() {
        if sent < bytes.len() {
            match from.send(&bytes[sent..]) {
                Ok(more) => sent += more,
                result => assert!(is_blocked(&result), "{result:?}"),
            }
            if std::mem::take(&mut renew) {
                from.channel.connection.refresh_traffic_keys().unwrap();
            }
        } else {
            from.channel.push(&from.socket).unwrap();
        }
        // To the end of what there is, in pieces that no record fits.
        loop {
            let end = into.len().min(got + 1000);
            match to.receive(&mut into[got..end]) {
                Ok(0) => panic!("the stream ended"),
                Ok(more) => got += more,
                result => {
                    assert!(is_blocked(&result), "{result:?}");
                    break;
                }
            }
            if got == bytes.len() {
                break;
            }
        }
    }
    assert_eq!(sent, bytes.len());
    assert!(!from.channel.has_unsent());
}

#[test]
fn bytes_arrive_as_they_were_in_both_directions_and_under_new_keys() {
    let [mut a, mut b] = pair();
    let bytes: Vec<u8> = (0..3_000_000_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let mut into = vec![0; bytes.len()];
    for renew in [false, true, true, false] {
        into.fill(0);
        carry(&mut a, &mut b, &bytes, &mut into, renew);
        assert!(into == bytes, "renewed: {renew}");
        into.fill(0);
        carry(&mut b, &mut a, &bytes[..1_000_001], &mut into[..1_000_001], renew);
        assert!(into[..1_000_001] == bytes[..1_000_001], "back, renewed: {renew}");
    }
}

#[test]
fn runs_are_gathered_and_scattered_whatever_their_length() {
    let [mut a, mut b] = pair();
    let bytes: Vec<u8> = (0..=255).cycle().take(100_000).collect();
    let (mut runs, mut rest) = (Vec::new(), &bytes[..]);
    for length in [0, 1, 7, 16_384, 0, 20_000, 33, 63_575] {
        let (run, others) = rest.split_at(length);
        runs.push(RawRun::of(run));
        rest = others;
    }
    assert!(rest.is_empty());
    assert_eq!(a.channel.send(&a.socket, &runs).unwrap(), bytes.len());
    let mut into = vec![0; bytes.len()];
    let mut targets: Vec<RawRun> = into.chunks_mut(777).map(RawRun::of_mut).collect();
    let mut at = 0;
    loop {
        match b.channel.receive(&b.socket, &targets[at..]).unwrap() {
            0 => panic!("the stream ended"),
            got => at += crate::raw::advance(&mut targets[at..], got),
        }
        if at == targets.len() {
            break;
        }
        a.channel.push(&a.socket).unwrap();
    }
    assert!(into == bytes);
    assert!(is_blocked(&b.receive(&mut [0])));
}

#[test]
fn the_ends_of_a_channel_share_a_secret_that_no_other_channel_has() {
    let [a, b] = pair();
    let [c, _] = pair();
    let export =
        |end: &End| end.channel.connection.export_keying_material([0u8; 32], ChannelSecret::LABEL, None).unwrap();
    assert_eq!(export(&a), export(&b));
    assert_ne!(export(&a), export(&c));
}

#[test]
fn a_certificate_names_its_engine_and_no_other() {
    let [a, _b] = pair();
    for (engine, want) in [("a", true), ("b", false), ("a.b", false), ("A", true), ("127.0.0.1", false), ("a_", false)]
    {
        assert_eq!(a.channel.names(&EngineId::new(engine).unwrap()), want, "{engine}");
    }
}

#[test]
fn a_descriptor_is_there_when_its_bytes_are_read() {
    let [mut a, mut b] = pair();
    for round in 0..3_u8 {
        let (near, far) = UnixStream::pair().unwrap();
        a.send(&[round; 100]).unwrap();
        assert_eq!(a.channel.send_file(&a.socket, &[0x77; 64], near.as_fd()).unwrap(), 64);
        a.send(&[round; 100]).unwrap();
        drop(near);
        let mut into = [0; 264];
        let mut got = 0;
        while got < into.len() {
            got += b.receive(&mut into[got..]).unwrap();
        }
        assert_eq!((into[99], into[100], into[163], into[164]), (round, 0x77, 0x77, round));
        let file = b.channel.take_file().expect("the descriptor came");
        assert!(b.channel.take_file().is_none());
        io::Write::write_all(&mut UnixStream::from(file), b"it is the one").unwrap();
        let mut said = [0; 13];
        io::Read::read_exact(&mut &far, &mut said).unwrap();
        assert_eq!(&said, b"it is the one");
    }
}

#[test]
fn the_end_of_the_stream_is_told_after_what_came_before_it() {
    for says_so in [true, false] {
        let [mut a, mut b] = pair();
        a.send(b"the last words").unwrap();
        if says_so {
            a.channel.finish(&a.socket);
        }
        drop(a);
        let mut into = [0; 64];
        assert_eq!(b.receive(&mut into).unwrap(), 14);
        assert_eq!(b.receive(&mut into).unwrap(), 0, "said: {says_so}");
        assert_eq!(b.receive(&mut into).unwrap(), 0);
    }
}

#[test]
fn a_turned_bit_is_an_error_and_no_byte_of_its_record_comes_out() {
    let [mut a, b] = pair();
    a.send(&[0x55; 40_000]).unwrap();
    // The proxy by hand: the records are read off the socket, and one bit of the second one is turned.
    let mut records = vec![0; 60_000];
    let got = ffi::receive_runs(b.socket.as_fd(), &[RawRun::of_mut(&mut records)]).unwrap();
    assert!(got > 40_000, "{got}");
    records[16_384 + 200] ^= 4;
    let [near, far] = sockets();
    assert_eq!(ffi::send_runs(near.as_fd(), &[RawRun::of(&records[..got])]).unwrap(), got);
    let mut b = End { socket: far, ..b };
    let mut into = vec![0; 40_000];
    let mut came = 0;
    let error = loop {
        match b.receive(&mut into[came..]) {
            Ok(more) => came += more,
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
    assert!(into[16_384..].iter().all(|byte| *byte == 0));
    assert!(b.receive(&mut into).is_err(), "it stays broken");
}
