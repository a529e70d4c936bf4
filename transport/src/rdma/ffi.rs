//! The calls of libibverbs as types: each call returns a `Result`, and each object holds those that it lives in.
//!
//! libibverbs may be called from any thread for any object, so all of them are `Send` and `Sync` but for [`QueuePair`]'s posting,
//! which takes `&mut` for its scratch space.
#![expect(unsafe_code, reason = "calls into libibverbs")]

mod memory_region;

use std::ffi::{CStr, c_int};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use rdma_sys::{
    IBV_ACCESS_LOCAL_WRITE, Verbs, ibv_comp_channel, ibv_context, ibv_cq, ibv_device, ibv_device_attr, ibv_pd,
    ibv_port_attr, ibv_qp, ibv_qp_attr, ibv_qp_init_attr, ibv_recv_wr, ibv_send_wr, ibv_sge, ibv_wc, inline,
};

use crate::api::{Memory, MemoryKind};
use crate::raw::Region;

pub(crate) use self::memory_region::MemoryRegion;

/// A call's result: 0 or an errno.
fn check(errno: c_int) -> io::Result<()> {
    if errno == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(errno)) }
}

/// A call's result: an object, or null and errno.
fn object<T>(raw: *mut T) -> io::Result<NonNull<T>> {
    NonNull::new(raw).ok_or_else(io::Error::last_os_error)
}

/// The text at a pointer that the library gave.
///
/// # Safety
/// It is null or a string that lives for the call.
unsafe fn text(raw: *const std::ffi::c_char) -> String {
    if raw.is_null() {
        return String::new();
    }
    // SAFETY: the caller vouches for the string.
    unsafe { CStr::from_ptr(raw) }.to_string_lossy().into_owned()
}

/// The devices that the library sees.
pub(crate) struct DeviceList {
    verbs: Arc<Verbs>,
    raw: NonNull<*mut ibv_device>,
    devices: usize,
}

impl DeviceList {
    pub(crate) fn new(verbs: &Arc<Verbs>) -> io::Result<Self> {
        let mut count = 0;
        // SAFETY: the count is a valid place.
        let raw = object(unsafe { verbs.ibv_get_device_list(&raw mut count) })?;
        Ok(Self { verbs: Arc::clone(verbs), raw, devices: usize::try_from(count).unwrap_or(0) })
    }

    pub(crate) fn names(&self) -> Vec<String> {
        (0..self.devices).map(|at| self.name(at)).collect()
    }

    fn device(&self, at: usize) -> *mut ibv_device {
        assert!(at < self.devices, "an index from names()");
        // SAFETY: the list has this many entries and lives as long as this.
        let place = unsafe { self.raw.add(at) };
        // SAFETY: as above.
        unsafe { place.read() }
    }

    fn name(&self, at: usize) -> String {
        // SAFETY: a device of the list, which lives.
        let name = unsafe { self.verbs.ibv_get_device_name(self.device(at)) };
        // SAFETY: the name is a part of the device.
        unsafe { text(name) }
    }

    /// Opens the device of this index in [`names`](Self::names).
    pub(crate) fn open(&self, at: usize) -> io::Result<Context> {
        // SAFETY: a device of the list, which lives.
        let raw = object(unsafe { self.verbs.ibv_open_device(self.device(at)) })?;
        Ok(Context { verbs: Arc::clone(&self.verbs), raw, name: self.name(at) })
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: made by ibv_get_device_list and not freed before; opened devices do not need it.
        unsafe { self.verbs.ibv_free_device_list(self.raw.as_ptr()) }
    }
}

/// An opened device.
pub(crate) struct Context {
    verbs: Arc<Verbs>,
    raw: NonNull<ibv_context>,
    pub(crate) name: String,
}

// SAFETY: libibverbs locks what it shares.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub(crate) fn attributes(&self) -> io::Result<ibv_device_attr> {
        // SAFETY: all zeros are valid integers.
        let mut attributes: ibv_device_attr = unsafe { std::mem::zeroed() };
        // SAFETY: a live context and a valid place.
        check(unsafe { self.verbs.ibv_query_device(self.raw.as_ptr(), &raw mut attributes) })?;
        Ok(attributes)
    }

    /// A port's attributes. The exported call knows the older, shorter structure; what it does not fill stays 0.
    pub(crate) fn port(&self, port: u8) -> io::Result<ibv_port_attr> {
        // SAFETY: all zeros are valid integers.
        let mut attributes: ibv_port_attr = unsafe { std::mem::zeroed() };
        // SAFETY: a live context, and a place that is at least as long as the call fills.
        check(unsafe { self.verbs.ibv_query_port(self.raw.as_ptr(), port, (&raw mut attributes).cast()) })?;
        Ok(attributes)
    }

    /// The library's word for a completion's status.
    pub(crate) fn status_text(&self, status: u32) -> String {
        // SAFETY: any number may be asked for.
        let word = unsafe { self.verbs.ibv_wc_status_str(status) };
        // SAFETY: a constant of the library.
        unsafe { text(word) }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: everything made in it holds it, so it is the last.
        let _ = unsafe { self.verbs.ibv_close_device(self.raw.as_ptr()) };
    }
}

/// What memory and queue pairs share.
pub(crate) struct ProtectionDomain {
    pub(crate) context: Arc<Context>,
    raw: NonNull<ibv_pd>,
}

// SAFETY: libibverbs locks what it shares.
unsafe impl Send for ProtectionDomain {}
// SAFETY: as above.
unsafe impl Sync for ProtectionDomain {}

impl ProtectionDomain {
    pub(crate) fn new(context: &Arc<Context>) -> io::Result<Self> {
        // SAFETY: a live context.
        let raw = object(unsafe { context.verbs.ibv_alloc_pd(context.raw.as_ptr()) })?;
        Ok(Self { context: Arc::clone(context), raw })
    }

    /// What the driver says to a dma-buf that does not exist: `EBADF` if it takes any; nothing if the library lacks the call.
    pub(crate) fn dma_buf_answer(&self) -> Option<io::Error> {
        let verbs = &self.context.verbs;
        if !verbs.has_dmabuf() {
            return None;
        }
        // SAFETY: a live domain; -1 is no descriptor, so nothing is registered.
        let raw =
            unsafe { verbs.ibv_reg_dmabuf_mr(self.raw.as_ptr(), 0, 4096, 0, -1, IBV_ACCESS_LOCAL_WRITE as c_int) };
        let Some(raw) = NonNull::new(raw) else { return Some(io::Error::last_os_error()) };
        // SAFETY: registered above, against all expectation, and nobody knows it.
        let _ = unsafe { verbs.ibv_dereg_mr(raw.as_ptr()) };
        Some(io::Error::other("it registered a dma-buf that does not exist"))
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        // SAFETY: everything made in it holds it, so it is the last.
        let _ = unsafe { self.context.verbs.ibv_dealloc_pd(self.raw.as_ptr()) };
    }
}

/// Tells by a file descriptor that completion queues have something.
pub(crate) struct CompletionChannel {
    context: Arc<Context>,
    raw: NonNull<ibv_comp_channel>,
}

// SAFETY: libibverbs locks what it shares.
unsafe impl Send for CompletionChannel {}
// SAFETY: as above.
unsafe impl Sync for CompletionChannel {}

impl CompletionChannel {
    pub(crate) fn new(context: &Arc<Context>) -> io::Result<Self> {
        // SAFETY: a live context.
        let raw = object(unsafe { context.verbs.ibv_create_comp_channel(context.raw.as_ptr()) })?;
        let channel = Self { context: Arc::clone(context), raw };
        let flags = rustix::fs::fcntl_getfl(&channel)?;
        rustix::fs::fcntl_setfl(&channel, flags | rustix::fs::OFlags::NONBLOCK)?;
        Ok(channel)
    }

    /// The cookie of a queue that has something; `None` if there is none for now.
    pub(crate) fn next_event(&self) -> io::Result<Option<u64>> {
        let (mut cq, mut cookie) = (null_mut(), null_mut());
        // SAFETY: a live channel, which does not block, and valid places.
        let failed = unsafe { self.context.verbs.ibv_get_cq_event(self.raw.as_ptr(), &raw mut cq, &raw mut cookie) };
        if failed != 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::WouldBlock { Ok(None) } else { Err(error) };
        }
        // SAFETY: the queue lives: destroying one waits until each of its events was acknowledged, and this is one.
        unsafe { self.context.verbs.ibv_ack_cq_events(cq, 1) };
        Ok(Some(cookie as u64))
    }
}

impl AsFd for CompletionChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: a live channel, whose descriptor does not change.
        let fd = unsafe { (*self.raw.as_ptr()).fd };
        // SAFETY: open while this lives.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }
}

impl Drop for CompletionChannel {
    fn drop(&mut self) {
        // SAFETY: every queue of it holds it, so it is the last.
        let _ = unsafe { self.context.verbs.ibv_destroy_comp_channel(self.raw.as_ptr()) };
    }
}

/// Where requests tell their ends.
pub(crate) struct CompletionQueue {
    channel: Arc<CompletionChannel>,
    raw: NonNull<ibv_cq>,
}

// SAFETY: libibverbs locks what it shares.
unsafe impl Send for CompletionQueue {}
// SAFETY: as above.
unsafe impl Sync for CompletionQueue {}

/// Room for completions of one poll.
pub(crate) struct Completions(Vec<ibv_wc>);

impl Completions {
    pub(crate) fn new(most: usize) -> Self {
        // SAFETY: all zeros are a valid completion: integers only.
        let none: ibv_wc = unsafe { std::mem::zeroed() };
        Self(vec![none; most])
    }
}

impl CompletionQueue {
    pub(crate) fn new(channel: &Arc<CompletionChannel>, entries: usize, cookie: u64) -> io::Result<Self> {
        let context = &channel.context;
        let entries = c_int::try_from(entries).map_err(|_| io::ErrorKind::InvalidInput)?;
        let cookie = std::ptr::without_provenance_mut(cookie as usize);
        // SAFETY: a live context and channel; the cookie is given back and never followed.
        let raw =
            unsafe { context.verbs.ibv_create_cq(context.raw.as_ptr(), entries, cookie, channel.raw.as_ptr(), 0) };
        Ok(Self { channel: Arc::clone(channel), raw: object(raw)? })
    }

    /// Takes completions.
    pub(crate) fn poll<'a>(&self, room: &'a mut Completions) -> io::Result<&'a [ibv_wc]> {
        // At most the room's length, which is small.
        let most = room.0.len() as c_int;
        // SAFETY: a live queue, and room for as many as is said.
        let count = unsafe { inline::ibv_poll_cq(self.raw.as_ptr(), most, room.0.as_mut_ptr()) };
        match usize::try_from(count) {
            Ok(count) => Ok(&room.0[..count]),
            Err(_) => Err(io::Error::from_raw_os_error(-count)),
        }
    }

    /// Asks for an event with the next completion. What came before it makes none: poll once more.
    pub(crate) fn arm(&self) -> io::Result<()> {
        // SAFETY: a live queue that has a channel.
        check(unsafe { inline::ibv_req_notify_cq(self.raw.as_ptr(), 0) })
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: every queue pair of it holds it, so it is the last; all its events were acknowledged as they came.
        let _ = unsafe { self.channel.context.verbs.ibv_destroy_cq(self.raw.as_ptr()) };
    }
}

/// How large a queue pair is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueuePairSize {
    pub(crate) sends: u32,
    pub(crate) receives: u32,
    pub(crate) send_segments: u32,
    pub(crate) receive_segments: u32,
}

/// Two queues that are connected to two of a peer.
pub(crate) struct QueuePair {
    domain: Arc<ProtectionDomain>,
    _queue: Arc<CompletionQueue>,
    raw: NonNull<ibv_qp>,
    pub(crate) number: u32,
    sends: Vec<ibv_send_wr>,
    receives: Vec<ibv_recv_wr>,
    segments: Vec<ibv_sge>,
}

// SAFETY: libibverbs locks what it shares; the scratch holds no pointer between calls that is followed.
unsafe impl Send for QueuePair {}

impl QueuePair {
    pub(crate) fn new(
        domain: &Arc<ProtectionDomain>,
        queue: &Arc<CompletionQueue>,
        size: QueuePairSize,
    ) -> io::Result<Self> {
        // SAFETY: all zeros are valid: null pointers and integers.
        let mut init: ibv_qp_init_attr = unsafe { std::mem::zeroed() };
        (init.send_cq, init.recv_cq, init.qp_type) = (queue.raw.as_ptr(), queue.raw.as_ptr(), rdma_sys::IBV_QPT_RC);
        (init.cap.max_send_wr, init.cap.max_recv_wr) = (size.sends, size.receives);
        (init.cap.max_send_sge, init.cap.max_recv_sge) = (size.send_segments, size.receive_segments);
        // SAFETY: a live domain and live queues.
        let raw = object(unsafe { domain.context.verbs.ibv_create_qp(domain.raw.as_ptr(), &raw mut init) })?;
        // SAFETY: a live queue pair, whose number does not change.
        let number = unsafe { (*raw.as_ptr()).qp_num };
        let (domain, queue) = (Arc::clone(domain), Arc::clone(queue));
        Ok(Self { domain, _queue: queue, raw, number, sends: Vec::new(), receives: Vec::new(), segments: Vec::new() })
    }

    /// Sets attributes; `mask` names those that `fill` sets.
    pub(crate) fn modify(&self, mask: u32, fill: impl FnOnce(&mut ibv_qp_attr)) -> io::Result<()> {
        // SAFETY: all zeros are valid integers.
        let mut attributes: ibv_qp_attr = unsafe { std::mem::zeroed() };
        fill(&mut attributes);
        // SAFETY: a live queue pair and valid attributes. The mask fits.
        check(unsafe { self.domain.context.verbs.ibv_modify_qp(self.raw.as_ptr(), &raw mut attributes, mask as c_int) })
    }

    /// Posts receives, each of the given number and at most one buffer. On failure says how many were posted.
    pub(crate) fn receive(
        &mut self,
        buffers: impl Iterator<Item = (u64, Option<ibv_sge>)>,
    ) -> Result<(), (usize, io::Error)> {
        self.receives.clear();
        self.segments.clear();
        for (id, buffer) in buffers {
            // SAFETY: all zeros are valid: null pointers and integers.
            let mut request: ibv_recv_wr = unsafe { std::mem::zeroed() };
            (request.wr_id, request.num_sge) = (id, c_int::from(buffer.is_some()));
            self.segments.extend(buffer);
            self.receives.push(request);
        }
        let mut segment = self.segments.as_mut_ptr();
        let base = self.receives.as_mut_ptr();
        for (at, request) in self.receives.iter_mut().enumerate() {
            request.next = base.wrapping_add(at + 1);
            if request.num_sge > 0 {
                request.sg_list = segment;
                segment = segment.wrapping_add(1);
            }
        }
        let Some(last) = self.receives.last_mut() else { return Ok(()) };
        last.next = null_mut();
        let mut bad = null_mut();
        // SAFETY: a live queue pair and a chain in own memory. The device writes only what is registered, and checks the keys.
        let errno = unsafe { inline::ibv_post_recv(self.raw.as_ptr(), base, &raw mut bad) };
        check(errno).map_err(|error| (place(bad, base, self.receives.len()), error))
    }

    /// Posts send requests: each with how many of `segments` are its own, in order. On failure says how many were posted.
    pub(crate) fn send(
        &mut self,
        requests: impl Iterator<Item = (ibv_send_wr, usize)>,
        segments: impl Iterator<Item = ibv_sge>,
    ) -> Result<(), (usize, io::Error)> {
        self.segments.clear();
        self.segments.extend(segments);
        self.sends.clear();
        let mut first = 0;
        for (mut request, count) in requests {
            let own = &mut self.segments[first..first + count];
            // A chain's request has few.
            (request.sg_list, request.num_sge) = (own.as_mut_ptr(), count as c_int);
            first += count;
            self.sends.push(request);
        }
        let base = self.sends.as_mut_ptr();
        for (at, request) in self.sends.iter_mut().enumerate() {
            request.next = base.wrapping_add(at + 1);
        }
        let Some(last) = self.sends.last_mut() else { return Ok(()) };
        last.next = null_mut();
        let mut bad = null_mut();
        // SAFETY: a live queue pair and a chain in own memory. The device reads only what is registered, and checks the keys.
        let errno = unsafe { inline::ibv_post_send(self.raw.as_ptr(), base, &raw mut bad) };
        check(errno).map_err(|error| (place(bad, base, self.sends.len()), error))
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: made by ibv_create_qp and not destroyed before. After it returns the device does nothing for it.
        let _ = unsafe { self.domain.context.verbs.ibv_destroy_qp(self.raw.as_ptr()) };
    }
}

/// Which request of a chain a call names as the first that it did not take.
fn place<T>(bad: *mut T, base: *mut T, count: usize) -> usize {
    let bytes = (bad as usize).wrapping_sub(base as usize);
    (bytes / size_of::<T>().max(1)).min(if bad.is_null() { 0 } else { count })
}

/// A send request without segments: a write with or without an immediate, or a message.
pub(crate) fn send_request(id: u64, opcode: u32, flags: u32, immediate: u32) -> ibv_send_wr {
    // SAFETY: all zeros are valid: null pointers and integers.
    let mut request: ibv_send_wr = unsafe { std::mem::zeroed() };
    (request.wr_id, request.opcode, request.send_flags) = (id, opcode, flags);
    request.__bindgen_anon_1.imm_data = immediate.to_be();
    request
}

/// The same, into a place of the peer's memory.
pub(crate) fn write_request(mut request: ibv_send_wr, address: u64, key: u32) -> ibv_send_wr {
    // SAFETY: a plain structure of two integers, which the request was zeroed as.
    let target = unsafe { &mut request.wr.rdma };
    (target.remote_addr, target.rkey) = (address, key);
    request
}

/// The immediate of a completion that has one.
pub(crate) fn immediate(completion: &ibv_wc) -> u32 {
    // SAFETY: all views of the union are integers.
    u32::from_be(unsafe { completion.__bindgen_anon_1.imm_data })
}

/// Sets the peer's GID in an address.
pub(crate) fn set_gid(attributes: &mut ibv_qp_attr, gid: [u8; 16]) {
    attributes.ah_attr.grh.dgid.raw = gid;
}

/// Registered memory of its own, in equal slots, that the device and the program use in turns.
pub(crate) struct Slots {
    address: NonNull<u8>,
    layout: std::alloc::Layout,
    slot_bytes: usize,
    /// One for each rail that they are used on.
    regions: Vec<MemoryRegion>,
}

// SAFETY: it owns its memory; the device uses a slot only between the posting and the completion of a request on it.
unsafe impl Send for Slots {}

impl Slots {
    /// Slots that the devices of these domains read and write, and their peers too if `are_targets`.
    pub(crate) fn new<'a>(
        domains: impl IntoIterator<Item = &'a Arc<ProtectionDomain>>,
        slots: usize,
        slot_bytes: usize,
        are_targets: bool,
    ) -> io::Result<Self> {
        let bytes = slots.checked_mul(slot_bytes).filter(|bytes| *bytes > 0).ok_or(io::ErrorKind::InvalidInput)?;
        let layout = std::alloc::Layout::from_size_align(bytes, 4096).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: the layout has more than no bytes.
        let address = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }).ok_or(io::ErrorKind::OutOfMemory)?;
        let mut slots = Self { address, layout, slot_bytes, regions: Vec::new() };
        let memory = Memory { address, bytes, kind: MemoryKind::Host, file: None };
        let run = Region::of(&memory).and_then(|region| region.run(0, bytes as u64));
        let run = run.ok_or(io::ErrorKind::InvalidInput)?;
        for domain in domains {
            slots.regions.push(MemoryRegion::new(domain, run, are_targets)?);
        }
        Ok(slots)
    }

    /// The first slot's address.
    pub(crate) fn address(&self) -> u64 {
        self.start(0).as_ptr() as u64
    }

    /// Its registrations, in the order of the domains.
    pub(crate) fn regions(&self) -> &[MemoryRegion] {
        &self.regions
    }

    /// The buffer of a slot, or of its first bytes, for the first domain.
    pub(crate) fn buffer(&self, slot: usize, bytes: usize) -> ibv_sge {
        let addr = self.start(slot).as_ptr() as u64;
        let lkey = self.regions.first().map_or(0, |region| region.local_key);
        // At most a slot, which is far shorter than 4 GiB.
        ibv_sge { addr, length: bytes.min(self.slot_bytes) as u32, lkey }
    }

    /// Fills the slot from its begin, with as much as fits.
    pub(crate) fn fill(&mut self, slot: usize, parts: &[&[u8]]) {
        let (mut to, mut left) = (self.start(slot), self.slot_bytes);
        for part in parts {
            let bytes = part.len().min(left);
            // SAFETY: inside the slot, which no request uses, and which nothing else overlaps.
            unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), to.as_ptr(), bytes) };
            // SAFETY: at most the end of the slot.
            to = unsafe { to.add(bytes) };
            left -= bytes;
        }
    }

    /// The first bytes of a slot, copied.
    pub(crate) fn copy(&self, slot: usize, bytes: usize) -> Vec<u8> {
        let mut copied = vec![0; bytes.min(self.slot_bytes)];
        // SAFETY: inside the slot, which no request uses any more.
        unsafe { std::ptr::copy_nonoverlapping(self.start(slot).as_ptr(), copied.as_mut_ptr(), copied.len()) };
        copied
    }

    fn start(&self, slot: usize) -> NonNull<u8> {
        let offset = slot * self.slot_bytes;
        assert!(offset + self.slot_bytes <= self.layout.size(), "a slot of this");
        // SAFETY: checked to be inside.
        unsafe { self.address.add(offset) }
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        self.regions.clear();
        // SAFETY: allocated with this layout, and no device knows it any more.
        unsafe { std::alloc::dealloc(self.address.as_ptr(), self.layout) }
    }
}
