//! A TCP proxy that breaks what it carries: for what only a network does.

mod valve;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

pub use valve::Flow;
use valve::{Fate, Valve};

/// What the proxy does to what flows in one direction.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProxyPlan {
    /// Break what flows from the listener to the dialler, instead of the other way.
    pub towards_dialler: bool,
    /// Cuts a connection after it carried this many bytes.
    pub cut_after_bytes: Option<u64>,
    /// Flips one bit of byte `n` of each connection that carries as many.
    pub flip_at_byte: Option<u64>,
}

/// A direction of a proxy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Towards {
    /// What the target says.
    Dialler,
    /// What is said to the target.
    Target,
}

/// Listens on a port of its own and carries to another; each connection in its own threads.
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    target: Mutex<SocketAddr>,
    plan: Mutex<ProxyPlan>,
    is_stopping: AtomicBool,
    is_refusing: AtomicBool,
    towards_dialler: Valve,
    towards_target: Valve,
    open: Mutex<BTreeMap<u64, Arc<Connection>>>,
}

struct Connection {
    near: TcpStream,
    far: TcpStream,
    is_over: AtomicBool,
}

impl Proxy {
    /// Starts to carry to `target`.
    ///
    /// # Panics
    /// If the system has no port or thread for it.
    #[must_use]
    pub fn new(target: SocketAddr, plan: ProxyPlan) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let shared = Arc::new(Shared::new(target, plan));
        let of_thread = Arc::clone(&shared);
        let thread = std::thread::spawn(move || listen(&of_thread, &listener));
        Self { address, shared, thread: Some(thread) }
    }

    /// Where to dial instead of the target.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where connections go from now on: who was there is started elsewhere.
    pub fn set_target(&self, target: SocketAddr) {
        *lock(&self.shared.target) = target;
    }

    /// What is done to connections from now on.
    pub fn set_plan(&self, plan: ProxyPlan) {
        *lock(&self.shared.plan) = plan;
    }

    /// How bytes of a direction flow from now on, on the connections that are open and on later ones.
    pub fn set_flow(&self, towards: Towards, flow: Flow) {
        self.shared.valve(towards).set(flow);
    }

    /// Flips one bit of the next piece that comes in a direction.
    pub fn flip_next(&self, towards: Towards) {
        self.shared.valve(towards).flip_next();
    }

    /// Bytes that came for a direction so far, over all connections.
    #[must_use]
    pub fn carried(&self, towards: Towards) -> u64 {
        self.shared.valve(towards).carried()
    }

    /// Whether connections are closed as soon as they are made.
    pub fn set_refusing(&self, is_refusing: bool) {
        self.shared.is_refusing.store(is_refusing, Ordering::SeqCst);
    }

    /// Cuts every connection that is open.
    pub fn cut_all(&self) {
        self.shared.end_all();
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.is_stopping.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address); // wakes the listener
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn new(target: SocketAddr, plan: ProxyPlan) -> Self {
        let (is_stopping, is_refusing, towards_dialler, towards_target, open) = Default::default();
        let (target, plan) = (Mutex::new(target), Mutex::new(plan));
        Self { target, plan, is_stopping, is_refusing, towards_dialler, towards_target, open }
    }

    fn valve(&self, towards: Towards) -> &Valve {
        match towards {
            Towards::Dialler => &self.towards_dialler,
            Towards::Target => &self.towards_target,
        }
    }

    /// Ends a connection, also where its bytes are held.
    fn end(&self, connection: &Connection) {
        connection.is_over.store(true, Ordering::SeqCst);
        let _ = (connection.near.shutdown(Shutdown::Both), connection.far.shutdown(Shutdown::Both));
        self.towards_dialler.wake();
        self.towards_target.wake();
    }

    fn end_all(&self) {
        for connection in std::mem::take(&mut *lock(&self.open)).into_values() {
            self.end(&connection);
        }
    }
}

fn listen(shared: &Arc<Shared>, listener: &TcpListener) {
    let mut carriers: Vec<JoinHandle<()>> = Vec::new();
    for (number, near) in (0..).zip(listener.incoming()) {
        if shared.is_stopping.load(Ordering::SeqCst) {
            break;
        }
        carriers.retain(|carrier| !carrier.is_finished());
        if shared.is_refusing.load(Ordering::SeqCst) {
            continue;
        }
        let target = *lock(&shared.target);
        let (Ok(near), Ok(far)) = (near, TcpStream::connect(target)) else { continue };
        let _ = (near.set_nodelay(true), far.set_nodelay(true));
        let plan = *lock(&shared.plan);
        let connection = Arc::new(Connection { near, far, is_over: AtomicBool::new(false) });
        lock(&shared.open).insert(number, Arc::clone(&connection));
        let shared = Arc::clone(shared);
        carriers.push(std::thread::spawn(move || {
            let whole = ProxyPlan::default();
            let (forth, back) = if plan.towards_dialler { (whole, plan) } else { (plan, whole) };
            std::thread::scope(|scope| {
                scope.spawn(|| carry(&shared, &connection, Towards::Target, forth));
                carry(&shared, &connection, Towards::Dialler, back);
            });
            lock(&shared.open).remove(&number);
        }));
    }
    shared.end_all();
    for carrier in carriers {
        let _ = carrier.join();
    }
}

fn carry(shared: &Shared, connection: &Connection, towards: Towards, plan: ProxyPlan) {
    let (mut from, mut to) = match towards {
        Towards::Dialler => (&connection.far, &connection.near),
        Towards::Target => (&connection.near, &connection.far),
    };
    let valve = shared.valve(towards);
    let mut buffer = vec![0; 64 << 10];
    let mut carried = 0u64;
    loop {
        let got = match from.read(&mut buffer) {
            // The other direction may have more to say.
            Ok(0) => return drop(to.shutdown(Shutdown::Write)),
            Ok(got) => got,
            Err(_) => return shared.end(connection),
        };
        let mut keep = got;
        if let Some(at) = plan.flip_at_byte.and_then(|at| at.checked_sub(carried)).filter(|at| *at < got as u64) {
            buffer[at as usize] ^= 0x10;
        }
        if let Some(left) = plan.cut_after_bytes.map(|cut| cut.saturating_sub(carried)) {
            keep = keep.min(usize::try_from(left).unwrap_or(usize::MAX));
        }
        valve.take(&mut buffer[..got]);
        let (mut at, came) = (0, Instant::now());
        while at < keep {
            match valve.pass(keep - at, came, &connection.is_over) {
                Fate::Carry(bytes) if to.write_all(&buffer[at..at + bytes]).is_ok() => at += bytes,
                Fate::Drop => break,
                Fate::Carry(_) | Fate::End => return shared.end(connection),
            }
        }
        if keep < got {
            return shared.end(connection);
        }
        carried += got as u64;
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
