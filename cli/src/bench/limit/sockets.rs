//! The limit of a socket: plain blocking connections, a thread on each end of each direction.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use socket2::{Domain, SockAddr, Socket, Type};

use crate::bench::case::{Case, Span};
use crate::error::CliError;

/// Kernel buffers, each way: what the transport asks for between processes of one host.
const BUFFER_BYTES: usize = 512 << 10;
/// Bytes of a call.
const CALL_BYTES: usize = 1 << 20;
/// After this without a byte the other side is given up.
const SILENCE: Duration = Duration::from_secs(60);

/// Which family of sockets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Family {
    /// TCP to this IP; `near` between processes of one host.
    Tcp { ip: IpAddr, near: bool },
    /// Unix stream sockets of this host, under a name that is no file.
    Unix,
}

/// Where the other side connects.
pub(crate) struct Listener {
    socket: Socket,
    address: String,
}

/// Connections, in the same order on both sides.
pub(crate) struct Sockets(Vec<Socket>);

impl Family {
    fn socket(self) -> io::Result<Socket> {
        let (domain, is_near) = match self {
            Self::Tcp { ip, near } => (Domain::for_address(SocketAddr::new(ip, 0)), near),
            Self::Unix => (Domain::UNIX, true),
        };
        let socket = Socket::new(domain, Type::STREAM, None)?;
        // Between hosts the system's own choice grows with the path.
        if is_near {
            socket.set_send_buffer_size(BUFFER_BYTES)?;
            socket.set_recv_buffer_size(BUFFER_BYTES)?;
        }
        socket.set_read_timeout(Some(SILENCE))?;
        socket.set_write_timeout(Some(SILENCE))?;
        Ok(socket)
    }
}

impl Listener {
    pub(crate) fn bind(family: Family) -> Result<Self, CliError> {
        Self::try_bind(family).map_err(CliError::io("plain sockets cannot listen"))
    }

    fn try_bind(family: Family) -> io::Result<Self> {
        let socket = family.socket()?;
        let address = match family {
            Family::Tcp { ip, .. } => {
                socket.bind(&SocketAddr::new(ip, 0).into())?;
                let bound = socket.local_addr()?.as_socket();
                bound.ok_or_else(|| io::Error::other("a bound address that is no IP and port"))?.to_string()
            }
            Family::Unix => {
                let mut random = [0; 8];
                getrandom::fill(&mut random).map_err(io::Error::other)?;
                let name = format!("kvferry-bench-{:016x}", u64::from_le_bytes(random));
                socket.bind(&abstract_address(&name)?)?;
                name
            }
        };
        socket.listen(16)?;
        Ok(Self { socket, address })
    }

    /// What the other side gives to [`Sockets::connect`].
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// Takes as many connections as the other side makes.
    pub(crate) fn accept(&self, count: u32) -> Result<Sockets, CliError> {
        self.try_accept(count).map_err(CliError::io("plain sockets were not connected"))
    }

    fn try_accept(&self, count: u32) -> io::Result<Sockets> {
        let mut found: Vec<Option<Socket>> = (0..count).map(|_| None).collect();
        for _ in 0..count {
            let socket = self.socket.accept()?.0;
            prepare(&socket)?;
            let mut index = [0];
            (&socket).read_exact(&mut index)?;
            let place = found.get_mut(usize::from(index[0])).filter(|place| place.is_none());
            *place.ok_or_else(|| io::Error::other("a connection that nobody announced"))? = Some(socket);
        }
        Ok(Sockets(found.into_iter().flatten().collect()))
    }
}

impl Sockets {
    /// Connects so many, to what [`Listener::address`] said.
    pub(crate) fn connect(family: Family, address: &str, count: u32) -> Result<Self, CliError> {
        let connect = |index: u32| -> io::Result<Socket> {
            let socket = family.socket()?;
            let to = match family {
                // Only the port is news: whoever listens on a wildcard address does not know how it is reached.
                Family::Tcp { ip, .. } => {
                    let port = address.parse::<SocketAddr>().map_err(io::Error::other)?.port();
                    SocketAddr::new(ip, port).into()
                }
                Family::Unix => abstract_address(address)?,
            };
            socket.connect(&to)?;
            prepare(&socket)?;
            (&socket).write_all(&[index as u8])?;
            Ok(socket)
        };
        let sockets = (0..count).map(connect).collect::<io::Result<_>>();
        sockets.map(Self).map_err(CliError::io(format!("plain sockets cannot connect to {address}")))
    }

    /// Moves both buffers once over the first `count` sockets, contiguous bytes, each socket its share; returns how many bytes
    /// went or came, whichever is more.
    pub(crate) fn stream(&self, count: u32, source: Option<&[u8]>, target: Option<&mut [u8]>) -> Result<u64, CliError> {
        let count = (count as usize).clamp(1, self.0.len());
        let share = source.map(<[u8]>::len).max(target.as_ref().map(|target| target.len())).unwrap_or(0) / count;
        let mut targets = target.map(|target| target.chunks_exact_mut(share));
        let mut sources = source.map(|source| source.chunks_exact(share));
        let moved = std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for socket in &self.0[..count] {
                if let Some(source) = sources.as_mut().and_then(Iterator::next) {
                    threads.push(
                        scope.spawn(move || source.chunks(CALL_BYTES).try_for_each(|part| (&*socket).write_all(part))),
                    );
                }
                if let Some(target) = targets.as_mut().and_then(Iterator::next) {
                    threads.push(
                        scope.spawn(move || {
                            target.chunks_mut(CALL_BYTES).try_for_each(|part| (&*socket).read_exact(part))
                        }),
                    );
                }
            }
            threads
                .into_iter()
                .try_for_each(|thread| thread.join().unwrap_or_else(|_| Err(io::Error::other("a panic"))))
        });
        moved.map(|()| (share * count) as u64).map_err(CliError::io("a plain socket broke"))
    }

    /// Sends scattered blocks over the first socket, with as few calls as there can be.
    pub(crate) fn send_blocks(&self, source: &[u8], blocks: &[u32], block_bytes: u64) -> io::Result<()> {
        let bytes = block_bytes as usize;
        let mut parts: Vec<IoSlice<'_>> =
            blocks.iter().map(|block| IoSlice::new(&source[*block as usize * bytes..][..bytes])).collect();
        let mut parts = &mut parts[..];
        while !parts.is_empty() {
            let sent = (&self.0[0]).write_vectored(parts)?;
            IoSlice::advance_slices(&mut parts, sent);
        }
        Ok(())
    }

    /// Receives scattered blocks in place.
    pub(crate) fn receive_blocks(&self, target: &mut [u8], blocks: &[u32], block_bytes: u64) -> io::Result<()> {
        let mut parts = disjoint(target, blocks, block_bytes as usize);
        let mut parts = &mut parts[..];
        while !parts.is_empty() {
            let got = (&self.0[0]).read_vectored(parts)?;
            if got == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            IoSliceMut::advance_slices(&mut parts, got);
        }
        Ok(())
    }

    /// Says one byte: a request, or that it was served.
    pub(crate) fn knock(&self) -> io::Result<()> {
        (&self.0[0]).write_all(&[1])
    }

    /// Waits for the other side's [`knock`](Self::knock).
    pub(crate) fn await_knock(&self) -> io::Result<()> {
        (&self.0[0]).read_exact(&mut [0])
    }

    /// Serves `count` requests of `blocks` blocks as the other side of [`crate::bench::limit::Limit::request`] does.
    pub(crate) fn serve(
        &self,
        case: &Case,
        spans: impl Iterator<Item = Span>,
        mut memory: Memory<'_>,
        order: &[u32],
    ) -> Result<(), CliError> {
        let serve = || -> io::Result<()> {
            for span in spans {
                let blocks = span.of(order);
                match &mut memory {
                    Memory::Source(source) => {
                        self.await_knock()?;
                        self.send_blocks(source, blocks, case.block_bytes)?;
                    }
                    Memory::Target(target) => {
                        self.receive_blocks(target, blocks, case.block_bytes)?;
                        self.knock()?;
                    }
                }
            }
            Ok(())
        };
        serve().map_err(CliError::io("a plain socket broke"))
    }
}

/// What a side that serves requests sends from or receives into.
pub(crate) enum Memory<'a> {
    Source(&'a [u8]),
    Target(&'a mut [u8]),
}

fn prepare(socket: &Socket) -> io::Result<()> {
    // Only TCP has this option, and only there does it matter.
    if socket.domain()? != Domain::UNIX {
        socket.set_tcp_nodelay(true)?;
    }
    socket.set_read_timeout(Some(SILENCE))?;
    socket.set_write_timeout(Some(SILENCE))
}

/// A name in the abstract namespace: gone with its socket, whatever ends the process.
fn abstract_address(name: &str) -> io::Result<SockAddr> {
    SockAddr::unix(format!("\0{name}"))
}

/// The blocks as slices, in the order in which they are named; each block once.
fn disjoint<'a>(target: &'a mut [u8], blocks: &[u32], bytes: usize) -> Vec<IoSliceMut<'a>> {
    let mut sorted: Vec<(usize, usize)> = blocks.iter().map(|block| *block as usize).zip(0..).collect();
    sorted.sort_unstable();
    let mut places: Vec<Option<&'a mut [u8]>> = blocks.iter().map(|_| None).collect();
    let (mut rest, mut at) = (target, 0);
    for (block, order) in sorted {
        let (place, tail) = rest[(block - at) * bytes..].split_at_mut(bytes);
        places[order] = Some(place);
        (rest, at) = (tail, block + 1);
    }
    places.into_iter().flatten().map(IoSliceMut::new).collect()
}
