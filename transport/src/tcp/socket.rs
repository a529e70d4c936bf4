//! Sockets and their options.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};

use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use super::stream::{Socket as Carrier, Stream};

/// Kernel buffers of a lane within one host. The system's own grow to megabytes, which leave the L2 cache and halve the rate;
/// smaller ones wake a lane for less: 0.38 CPU seconds a GB with these, 0.42 with 256 KiB, 0.48 with 128 KiB
/// (benches/tcp_goodput.rs on 2 busy cores).
const SAME_HOST_BUFFER_BYTES: usize = 512 << 10;

/// Connections that wait to be accepted.
const BACKLOG: i32 = 256;

pub(crate) fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM.nonblocking().cloexec(), Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// Listens under an abstract name: it lives in the network namespace, and nothing of it is left when the process is gone.
pub(crate) fn listen_unix(name: &str) -> io::Result<UnixListener> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM.nonblocking().cloexec(), None)?;
    socket.bind(&abstract_name(name)?)?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// Connects a data lane to an abstract name; it is there at once or not at all.
pub(crate) fn dial_unix(name: &str, buffer_bytes: Option<usize>) -> io::Result<Stream> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM.nonblocking().cloexec(), None)?;
    size_buffers(&socket, true, buffer_bytes)?;
    socket.connect(&abstract_name(name)?)?;
    Ok(Stream::new(Carrier::Unix(socket.into())))
}

fn abstract_name(name: &str) -> io::Result<SockAddr> {
    SockAddr::unix(format!("\0{name}"))
}

/// Begins to connect, from one of our addresses if that matters; the socket is writable when it is done.
pub(crate) fn dial(
    address: SocketAddr,
    from: Option<IpAddr>,
    is_data: bool,
    buffer_bytes: Option<usize>,
) -> io::Result<Stream> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM.nonblocking().cloexec(), Some(Protocol::TCP))?;
    socket.set_tcp_nodelay(true)?;
    if is_data {
        size_buffers(&socket, address.ip().is_loopback(), buffer_bytes)?;
    }
    if let Some(from) = from {
        socket.bind(&SocketAddr::new(from, 0).into())?;
    }
    match socket.connect(&address.into()) {
        Ok(()) => {}
        Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {}
        Err(error) => return Err(error),
    }
    Ok(Stream::new(Carrier::Tcp(socket.into())))
}

/// Prepares a connection that was accepted.
pub(crate) fn accepted(stream: TcpStream) -> io::Result<Stream> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    Ok(Stream::new(Carrier::Tcp(stream)))
}

/// Prepares a Unix connection that was accepted.
pub(crate) fn accepted_unix(stream: UnixStream) -> io::Result<Stream> {
    stream.set_nonblocking(true)?;
    Ok(Stream::new(Carrier::Unix(stream)))
}

/// Sizes the buffers of an accepted data lane.
pub(crate) fn size_accepted(stream: &Stream, buffer_bytes: Option<usize>) -> io::Result<()> {
    let is_same_host = match &**stream.socket() {
        Carrier::Tcp(stream) => same_host(stream),
        Carrier::Unix(_) => true,
    };
    size_buffers(&socket2::SockRef::from(stream), is_same_host, buffer_bytes)
}

/// Whether both ends of a connection have the same address.
pub(crate) fn same_host(stream: &TcpStream) -> bool {
    let ip = |address: io::Result<SocketAddr>| address.map(|address| address.ip().to_canonical()).ok();
    let (ours, theirs) = (ip(stream.local_addr()), ip(stream.peer_addr()));
    ours.is_some_and(|ours| theirs == Some(ours) || IpAddr::is_loopback(&ours))
}

fn size_buffers(socket: &Socket, is_same_host: bool, buffer_bytes: Option<usize>) -> io::Result<()> {
    let bytes = match (buffer_bytes, is_same_host) {
        (Some(bytes), _) => bytes,
        (None, true) => SAME_HOST_BUFFER_BYTES,
        (None, false) => return Ok(()),
    };
    socket.set_send_buffer_size(bytes)?;
    socket.set_recv_buffer_size(bytes)
}
