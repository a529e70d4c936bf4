//! Alone in its process: it uses up all of its descriptors.

mod common;

use std::fs::File;
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::TcpStream;

use common::{address, config, dialler, identity, node};
use kvferry_protocol::wire::{Challenge, Introduction, VERSIONS};
use kvferry_transport::testing::PATIENCE;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

#[test]
fn a_node_without_descriptors_serves_its_peers_and_takes_new_ones_when_it_has_some() {
    let (mut a, mut b) = (node("a", config(), 1 << 20), node("b", config(), 1 << 20));
    a.meet(&mut b);
    let open = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(open + 64), ..limit }).unwrap();
    let mut held = Vec::new();
    let refused = loop {
        match File::open("/dev/null") {
            Ok(file) => held.push(file),
            Err(error) => break error,
        }
    };
    assert_eq!(refused.raw_os_error(), Some(rustix::io::Errno::MFILE.raw_os_error()));
    held.pop();
    let hello = dialler(Introduction::Peer(identity("x")), VERSIONS).poll_output().unwrap();
    let mut waiting = TcpStream::connect(address(&b)).unwrap();
    waiting.write_all(&hello).unwrap();
    // It tries and fails meanwhile.
    for sequence in 0..200 {
        let grant = b.grant(&a.peer, 0, 1 << 20);
        let post = a.post(&b.peer, grant, sequence, 0, 0, 1 << 20);
        a.wait_posted(post).unwrap();
        b.wait_landed(grant);
        b.transport.revoke(grant);
    }
    let mut challenge = [0; 48];
    waiting.set_nonblocking(true).unwrap();
    let unheard = waiting.read(&mut challenge).map_err(|error| error.kind());
    assert_eq!(unheard, Err(ErrorKind::WouldBlock), "there was a descriptor for it");
    drop(held);
    waiting.set_nonblocking(false).unwrap();
    waiting.set_read_timeout(Some(PATIENCE)).unwrap();
    waiting.read_exact(&mut challenge).unwrap();
    Challenge::decode(&challenge).unwrap();
    let mut c = node("c", config(), 64);
    c.meet(&mut b);
}
