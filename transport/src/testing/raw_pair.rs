//! Scattered blocks over plain sockets.

use std::io::{IoSlice, IoSliceMut, Read, Write as _};
use std::net::{TcpListener, TcpStream};

/// A sender and a receiver joined by plain blocking connections: the limit that a transport is measured against.
///
/// Each connection has a thread on either side: one vectored write of a table and a batch of scattered blocks, and vectored
/// reads straight into place.
pub struct RawPair {
    connections: Vec<Connection>,
    block_bytes: usize,
}

struct Connection {
    sender: TcpStream,
    receiver: TcpStream,
    source: Vec<u8>,
    target: Vec<u8>,
}

impl RawPair {
    /// Joins the two over loopback, with `arena_bytes` of memory on each side and socket buffers of `buffer_bytes`.
    ///
    /// # Panics
    /// If the system refuses a connection.
    #[must_use]
    pub fn new(connections: usize, arena_bytes: usize, block_bytes: usize, buffer_bytes: usize) -> Self {
        let arena_bytes = arena_bytes / connections;
        let connect = |_| {
            let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
            let listening = socket2::SockRef::from(&listener);
            listening.set_recv_buffer_size(buffer_bytes).expect("a buffer");
            let sender = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).expect("a socket");
            sender.set_send_buffer_size(buffer_bytes).expect("a buffer");
            sender.set_recv_buffer_size(buffer_bytes).expect("a buffer");
            sender.connect(&listener.local_addr().expect("an address").into()).expect("a connection");
            let (sender, receiver) = (TcpStream::from(sender), listener.accept().expect("a connection").0);
            for stream in [&sender, &receiver] {
                stream.set_nodelay(true).expect("an option");
            }
            Connection { sender, receiver, source: vec![1; arena_bytes], target: vec![2; arena_bytes] }
        };
        Self { connections: (0..connections).map(connect).collect(), block_bytes }
    }

    /// Moves `total_bytes`, a multiple of 1 MiB for each connection, and returns when the receiver has them.
    ///
    /// # Panics
    /// If a connection breaks.
    pub fn run(&mut self, total_bytes: usize) {
        let (block_bytes, each) = (self.block_bytes, total_bytes / self.connections.len());
        std::thread::scope(|scope| {
            for connection in &mut self.connections {
                let Connection { sender, receiver, source, target } = connection;
                scope.spawn(move || raw_send(sender, source, block_bytes, each));
                scope.spawn(move || raw_receive(receiver, target, block_bytes, each));
            }
        });
    }
}

/// A table of block numbers, then the blocks; [`BATCH_BYTES`] at a time, and one byte back at the end.
fn raw_send(stream: &mut TcpStream, source: &[u8], block_bytes: usize, total_bytes: usize) {
    let blocks = scattered(source.len() / block_bytes, 104_729);
    let batch = (BATCH_BYTES / block_bytes).max(1);
    let mut next = blocks.iter().copied().cycle();
    for _ in 0..total_bytes / block_bytes / batch {
        let chosen: Vec<usize> = next.by_ref().take(batch).collect();
        let table: Vec<u8> = chosen.iter().flat_map(|block| [(*block as u64).to_le_bytes(), [0; 8]].concat()).collect();
        let mut parts = vec![IoSlice::new(&table)];
        parts.extend(chosen.iter().map(|block| IoSlice::new(&source[block * block_bytes..][..block_bytes])));
        let mut parts = &mut parts[..];
        while !parts.is_empty() {
            let sent = stream.write_vectored(parts).expect("the receiver reads");
            IoSlice::advance_slices(&mut parts, sent);
        }
    }
    stream.read_exact(&mut [0]).expect("the receiver's word");
}

fn raw_receive(stream: &mut TcpStream, target: &mut [u8], block_bytes: usize, total_bytes: usize) {
    let batch = (BATCH_BYTES / block_bytes).max(1);
    let mut table = vec![0; 16 * batch];
    for _ in 0..total_bytes / block_bytes / batch {
        stream.read_exact(&mut table).expect("a table");
        let mut wanted: Vec<(usize, usize)> = table
            .chunks_exact(16)
            .map(|entry| u64::from_le_bytes(entry[..8].try_into().expect("eight bytes")) as usize)
            .enumerate()
            .map(|(order, block)| (block, order))
            .collect();
        wanted.sort_unstable();
        // Disjoint mutable blocks in the order of the table.
        let mut places: Vec<Option<&mut [u8]>> = (0..batch).map(|_| None).collect();
        let (mut rest, mut at) = (&mut target[..], 0);
        for (block, order) in wanted {
            let (place, tail) = rest[(block - at) * block_bytes..].split_at_mut(block_bytes);
            places[order] = Some(place);
            (rest, at) = (tail, block + 1);
        }
        let mut parts: Vec<IoSliceMut<'_>> = places.into_iter().flatten().map(IoSliceMut::new).collect();
        let mut parts = &mut parts[..];
        while !parts.is_empty() {
            let got = stream.read_vectored(parts).expect("blocks");
            assert!(got > 0, "the sender hung up");
            IoSliceMut::advance_slices(&mut parts, got);
        }
    }
    stream.write_all(&[1]).expect("the sender listens");
}

/// Block numbers in scattered order; `step` shares no factor with `blocks`.
#[must_use]
pub fn scattered(blocks: usize, step: usize) -> Vec<usize> {
    (0..blocks).map(|at| at * step % blocks).collect()
}

const BATCH_BYTES: usize = 1 << 20;
