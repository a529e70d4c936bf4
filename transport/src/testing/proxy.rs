//! A TCP proxy that breaks what it carries: for what only a network does.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

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

/// Listens on a port of its own and carries to another; each connection in its own threads.
pub struct Proxy {
    address: SocketAddr,
    plan: Arc<Mutex<ProxyPlan>>,
    is_stopping: Arc<AtomicBool>,
    open: Arc<Mutex<Vec<TcpStream>>>,
    thread: Option<JoinHandle<()>>,
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
        let plan = Arc::new(Mutex::new(plan));
        let is_stopping = Arc::new(AtomicBool::new(false));
        let open = Arc::new(Mutex::new(Vec::new()));
        let of_thread = (Arc::clone(&plan), Arc::clone(&is_stopping), Arc::clone(&open));
        let thread = std::thread::spawn(move || {
            let (plan, is_stopping, open) = of_thread;
            let mut carriers = Vec::new();
            for near in listener.incoming() {
                if is_stopping.load(Ordering::SeqCst) {
                    break;
                }
                let (Ok(near), Ok(far)) = (near, TcpStream::connect(target)) else { continue };
                let plan = *plan.lock().unwrap_or_else(PoisonError::into_inner);
                let _ = (near.set_nodelay(true), far.set_nodelay(true));
                let whole = ProxyPlan::default();
                let (forth, back) = if plan.towards_dialler { (whole, plan) } else { (plan, whole) };
                let both = [(near.try_clone(), far.try_clone(), forth), (Ok(far), Ok(near), back)];
                for (from, to, plan) in both {
                    let (Ok(from), Ok(to)) = (from, to) else { continue };
                    open.lock().unwrap_or_else(PoisonError::into_inner).extend(from.try_clone());
                    carriers.push(std::thread::spawn(move || carry(from, to, plan)));
                }
            }
            for carrier in carriers {
                let _ = carrier.join();
            }
        });
        Self { address, plan, is_stopping, open, thread: Some(thread) }
    }

    /// Where to dial instead of the target.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What is done to connections from now on.
    pub fn set_plan(&self, plan: ProxyPlan) {
        *self.plan.lock().unwrap_or_else(PoisonError::into_inner) = plan;
    }

    /// Cuts every connection that is open.
    pub fn cut_all(&self) {
        for stream in std::mem::take(&mut *self.open.lock().unwrap_or_else(PoisonError::into_inner)) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.is_stopping.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address); // wakes the listener
        self.cut_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn carry(mut from: TcpStream, mut to: TcpStream, plan: ProxyPlan) {
    let mut buffer = vec![0; 64 << 10];
    let mut carried = 0u64;
    while let Ok(got @ 1..) = from.read(&mut buffer) {
        let mut keep = got;
        if let Some(at) = plan.flip_at_byte.and_then(|at| at.checked_sub(carried)).filter(|at| *at < got as u64) {
            buffer[at as usize] ^= 0x10;
        }
        if let Some(left) = plan.cut_after_bytes.map(|cut| cut.saturating_sub(carried)) {
            keep = keep.min(usize::try_from(left).unwrap_or(usize::MAX));
        }
        if to.write_all(&buffer[..keep]).is_err() || keep < got {
            break;
        }
        carried += got as u64;
    }
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}
