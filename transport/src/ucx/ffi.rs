//! Calls of UCX. All handles belong to the one thread that made them; none is `Send`.
//!
//! A child holds its parent, so that the order of destruction is a fact of types: region and worker hold the context, an
//! endpoint its worker. What an operation reads or writes must outlive it: the caller keeps it until the operation's [`Ticket`](super::ticket::Ticket)
//! is done or the worker is destroyed, after which UCX touches nothing of it.
#![expect(unsafe_code, reason = "every call of a C library is")]

mod endpoint;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ffi::{CStr, CString, c_void};
use std::os::fd::BorrowedFd;
use std::ptr::{null, null_mut};
use std::rc::Rc;

use bytes::Bytes;
use ucx_sys as sys;
use ucx_sys::{Library, ucs_status_t};

use super::card::Token;
use super::error::UcxError;
use crate::raw::RawRun;

pub(super) use endpoint::{Endpoint, RemotePlace};

/// The number of our active messages; a worker of ours takes no other.
const MESSAGE_ID: u32 = 1;
/// The token and what the message is.
pub(super) const HEADER_BYTES: usize = size_of::<Token>() + 1;
/// The longest active message.
pub(super) const MAX_MESSAGE_BYTES: usize = 1 << 20;
/// What a message is whose bytes are taken while UCX still has them; others wait in the inbox.
pub(super) const LOAD: u8 = 4;

fn text(library: &Library, status: ucs_status_t) -> String {
    // SAFETY: takes any number and returns a string that is never freed.
    let text = unsafe { library.ucs_status_string(status) };
    if text.is_null() {
        return format!("status {status}");
    }
    // SAFETY: not null, and ends with a zero, as the function says.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

fn check(library: &Library, operation: &'static str, status: ucs_status_t) -> Result<(), UcxError> {
    if status == sys::UCS_OK { Ok(()) } else { Err(UcxError::Call { operation, status: text(library, status) }) }
}

/// Collects what a function of UCX prints.
fn printed(print: impl FnOnce(*mut sys::FILE)) -> Result<String, UcxError> {
    let (mut buffer, mut bytes) = (null_mut(), 0);
    // SAFETY: two valid places, which outlive the stream.
    let stream = unsafe { libc::open_memstream(&raw mut buffer, &raw mut bytes) };
    if stream.is_null() {
        return Err(UcxError::io("open a stream")(std::io::Error::last_os_error()));
    }
    print(stream.cast());
    // SAFETY: the stream is open, and nobody uses it after this.
    let closed = unsafe { libc::fclose(stream) };
    if closed != 0 || buffer.is_null() {
        return Err(UcxError::io("write a stream")(std::io::Error::last_os_error()));
    }
    // SAFETY: closing set the buffer, of `bytes` bytes, which is ours to free.
    let copied = unsafe { std::slice::from_raw_parts(buffer.cast::<u8>(), bytes) }.to_vec();
    // SAFETY: allocated by the stream, and not used after this.
    unsafe { libc::free(buffer.cast()) };
    Ok(String::from_utf8_lossy(&copied).into_owned())
}

/// UCX with one configuration.
pub(super) struct Context {
    library: &'static Library,
    raw: sys::ucp_context_h,
    /// The transports that it was started with.
    transports: Vec<String>,
}

impl Context {
    /// Starts UCX for puts and active messages, with workers that can be slept on; `settings` are names without `UCX_`.
    pub(super) fn new(
        library: &'static Library,
        transports: &[String],
        settings: &[(&str, &str)],
    ) -> Result<Rc<Self>, UcxError> {
        let mut config = null_mut();
        // SAFETY: null stands for the prefix `UCX_` and for no file; the place is valid.
        let status = unsafe { library.ucp_config_read(null(), null(), &raw mut config) };
        check(library, "read the configuration", status)?;
        let made = Self::with_config(library, config, transports, settings);
        // SAFETY: was read above, and is not used after this.
        unsafe { library.ucp_config_release(config) };
        made
    }

    fn with_config(
        library: &'static Library,
        config: *mut sys::ucp_config_t,
        transports: &[String],
        settings: &[(&str, &str)],
    ) -> Result<Rc<Self>, UcxError> {
        let listed = transports.join(",");
        for &(key, value) in [("TLS", &*listed)].iter().chain(settings) {
            let refused = |status| UcxError::Setting { key: key.to_owned(), value: value.to_owned(), status };
            let c_string = |text: &str| CString::new(text).map_err(|_| refused("it has a zero byte".to_owned()));
            let (name, wanted) = (c_string(key)?, c_string(value)?);
            // SAFETY: the configuration is live, both strings end with a zero.
            let status = unsafe { library.ucp_config_modify(config, name.as_ptr(), wanted.as_ptr()) };
            if status != sys::UCS_OK {
                return Err(refused(text(library, status)));
            }
        }
        // SAFETY: all fields are integers or may be null; the mask says which are read.
        let mut params: sys::ucp_params_t = unsafe { std::mem::zeroed() };
        params.field_mask = u64::from(sys::UCP_PARAM_FIELD_FEATURES);
        params.features = u64::from(sys::UCP_FEATURE_RMA | sys::UCP_FEATURE_AM | sys::UCP_FEATURE_WAKEUP);
        let (major, minor) = (sys::UCP_API_MAJOR, sys::UCP_API_MINOR);
        let mut raw = null_mut();
        // SAFETY: parameters and configuration are live; the place is valid.
        let status = unsafe { library.ucp_init_version(major, minor, &raw const params, config, &raw mut raw) };
        check(library, "start", status)?;
        Ok(Rc::new(Self { library, raw, transports: transports.to_vec() }))
    }

    /// What UCX prints of its transports and devices.
    pub(super) fn printed(&self) -> Result<String, UcxError> {
        // SAFETY: the context is live, the stream is open.
        printed(|stream| unsafe { self.library.ucp_context_print_info(self.raw, stream) })
    }

    /// Bit `n` is set if memory of kind `n` (`UCS_MEMORY_TYPE_...`) can be put.
    pub(super) fn memory_kinds(&self) -> Result<u64, UcxError> {
        // SAFETY: plain integers; the mask says which are written.
        let mut attributes: sys::ucp_context_attr_t = unsafe { std::mem::zeroed() };
        attributes.field_mask = u64::from(sys::UCP_ATTR_FIELD_MEMORY_TYPES);
        // SAFETY: the context is live, the place is valid.
        let status = unsafe { self.library.ucp_context_query(self.raw, &raw mut attributes) };
        check(self.library, "ask for the kinds of memory", status)?;
        Ok(attributes.memory_types)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: regions and workers hold the context, so there are none left.
        unsafe { self.library.ucp_cleanup(self.raw) }
    }
}

/// Registered memory.
pub(super) struct Mapped {
    context: Rc<Context>,
    raw: sys::ucp_mem_h,
}

impl Mapped {
    /// Registers memory, to be written by peers and read by puts.
    ///
    /// # Safety
    /// The memory stays mapped until this is dropped.
    pub(super) unsafe fn new(context: &Rc<Context>, memory: RawRun) -> Result<Self, UcxError> {
        // SAFETY: all fields are integers or may be null; the mask says which are read.
        let mut params: sys::ucp_mem_map_params_t = unsafe { std::mem::zeroed() };
        let fields = sys::UCP_MEM_MAP_PARAM_FIELD_ADDRESS
            | sys::UCP_MEM_MAP_PARAM_FIELD_LENGTH
            | sys::UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
        params.field_mask = u64::from(fields);
        params.address = memory.start().cast();
        params.length = memory.bytes();
        params.memory_type = sys::UCS_MEMORY_TYPE_HOST;
        let mut raw = null_mut();
        // SAFETY: the context is live; the caller keeps the memory mapped; the place is valid.
        let status = unsafe { context.library.ucp_mem_map(context.raw, &raw const params, &raw mut raw) };
        if status != sys::UCS_OK {
            return Err(UcxError::Memory { bytes: memory.bytes(), problem: text(context.library, status) });
        }
        Ok(Self { context: Rc::clone(context), raw })
    }

    /// What a peer needs to write it.
    pub(super) fn pack(&self) -> Result<Bytes, UcxError> {
        let library = self.context.library;
        let (mut buffer, mut bytes) = (null_mut(), 0);
        // SAFETY: context and region are live; the places are valid.
        let status = unsafe { library.ucp_rkey_pack(self.context.raw, self.raw, &raw mut buffer, &raw mut bytes) };
        check(library, "pack the key of a region", status)?;
        // SAFETY: the call set both: a buffer of that many bytes.
        let packed = Bytes::copy_from_slice(unsafe { std::slice::from_raw_parts(buffer.cast::<u8>(), bytes) });
        // SAFETY: was given above, and is not used after this.
        unsafe { library.ucp_rkey_buffer_release(buffer) };
        Ok(packed)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the context is live. Whoever drops a region has destroyed the workers whose puts name it.
        let status = unsafe { self.context.library.ucp_mem_unmap(self.context.raw, self.raw) };
        if status != sys::UCS_OK {
            tracing::warn!(status = text(self.context.library, status), "UCX did not let go of a region");
        }
    }
}

/// Takes a load, inside of `progress`: it calls nothing of UCX.
pub(super) type TakeLoad = Box<dyn Fn(&[u8])>;

/// Active messages that came to a worker.
pub(super) struct Inbox {
    token: Token,
    take_load: TakeLoad,
    loads: Cell<u64>,
    is_shut: Cell<bool>,
    messages: RefCell<VecDeque<(u8, Bytes)>>,
    strangers: Cell<u64>,
    problem: Cell<Option<&'static str>>,
}

impl Inbox {
    fn new(token: Token, take_load: TakeLoad) -> Self {
        let (loads, is_shut, messages, strangers, problem) = Default::default();
        Self { token, take_load, loads, is_shut, messages, strangers, problem }
    }

    /// How many loads came, ever.
    pub(super) fn loads(&self) -> u64 {
        self.loads.get()
    }

    /// Loads that come after this are dropped.
    pub(super) fn shut(&self) {
        self.is_shut.set(true);
    }

    /// The oldest message: what it is, and its bytes.
    pub(super) fn next(&self) -> Option<(u8, Bytes)> {
        self.messages.borrow_mut().pop_front()
    }

    /// What the peer did that it must not.
    pub(super) fn problem(&self) -> Option<&'static str> {
        self.problem.get()
    }

    /// Messages without the peer's token; they are dropped.
    pub(super) fn strangers(&self) -> u64 {
        self.strangers.get()
    }

    fn take(&self, header: &[u8], data: Option<&[u8]>) {
        let Some((&what, _)) = header.split_last().filter(|(_, token)| is_same(token, &self.token)) else {
            self.strangers.set(self.strangers.get() + 1);
            return;
        };
        match data {
            Some(data) if what == LOAD && data.len() <= MAX_MESSAGE_BYTES => {
                self.loads.set(self.loads.get() + 1);
                if !self.is_shut.get() {
                    (self.take_load)(data);
                }
            }
            Some(data) if data.len() <= MAX_MESSAGE_BYTES => {
                self.messages.borrow_mut().push_back((what, Bytes::copy_from_slice(data)));
            }
            Some(_) => self.problem.set(Some("it sent an active message that is too long")),
            None => self.problem.set(Some("it sent an active message that has to be fetched")),
        }
    }
}

/// Compares in a time that does not depend on where they differ.
fn is_same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |differing, (a, b)| differing | (a ^ b)) == 0
}

/// One set of queues and sockets of UCX: what a link has for itself, so that it can be shut without others.
pub(super) struct Worker {
    context: Rc<Context>,
    raw: sys::ucp_worker_h,
    inbox: Rc<Inbox>,
    /// What UCX said when the peer was lost, and `UCS_OK` before. A worker has one endpoint.
    fault: Cell<ucs_status_t>,
}

impl Worker {
    /// Makes a worker whose active messages must carry `token`; `take_load` is called inside of [`Worker::progress`].
    pub(super) fn new(context: &Rc<Context>, token: Token, take_load: TakeLoad) -> Result<Rc<Self>, UcxError> {
        let library = context.library;
        // SAFETY: all fields are integers or may be null; the mask says which are read.
        let mut params: sys::ucp_worker_params_t = unsafe { std::mem::zeroed() };
        let fields = sys::UCP_WORKER_PARAM_FIELD_THREAD_MODE | sys::UCP_WORKER_PARAM_FIELD_FLAGS;
        params.field_mask = u64::from(fields);
        params.thread_mode = sys::UCS_THREAD_MODE_SINGLE;
        // A worker that is destroyed to fence a peer off may leave requests behind; that is meant.
        params.flags = u64::from(sys::UCP_WORKER_FLAG_IGNORE_REQUEST_LEAK);
        let mut raw = null_mut();
        // SAFETY: the context is live; the place is valid.
        let status = unsafe { library.ucp_worker_create(context.raw, &raw const params, &raw mut raw) };
        check(library, "make a worker", status)?;
        let inbox = Rc::new(Inbox::new(token, take_load));
        let worker = Self { context: Rc::clone(context), raw, inbox, fault: Cell::new(sys::UCS_OK) };
        worker.listen()?;
        Ok(Rc::new(worker))
    }

    fn listen(&self) -> Result<(), UcxError> {
        // SAFETY: all fields are integers or may be null; the mask says which are read.
        let mut params: sys::ucp_am_handler_param_t = unsafe { std::mem::zeroed() };
        let fields = sys::UCP_AM_HANDLER_PARAM_FIELD_ID
            | sys::UCP_AM_HANDLER_PARAM_FIELD_FLAGS
            | sys::UCP_AM_HANDLER_PARAM_FIELD_CB
            | sys::UCP_AM_HANDLER_PARAM_FIELD_ARG;
        params.field_mask = u64::from(fields);
        params.id = MESSAGE_ID;
        params.flags = sys::UCP_AM_FLAG_WHOLE_MSG;
        params.cb = Some(on_message);
        params.arg = Rc::as_ptr(&self.inbox).cast_mut().cast();
        // SAFETY: the worker is live; the inbox, which the handler is given, outlives it (see `Drop`).
        let status = unsafe { self.context.library.ucp_worker_set_am_recv_handler(self.raw, &raw const params) };
        check(self.context.library, "set the handler of active messages", status)
    }

    /// The transports that it may use.
    pub(super) fn transports(&self) -> &[String] {
        &self.context.transports
    }

    pub(super) fn inbox(&self) -> &Inbox {
        &self.inbox
    }

    /// Whether this UCX, if built with assertions, ends the process when an endpoint is closed before its first word left.
    pub(super) fn aborts_if_closed_early(&self) -> bool {
        let version = self.context.library.version();
        (version.major, version.minor) < (1, 14)
    }

    /// What a peer needs to reach it.
    pub(super) fn address(&self) -> Result<Bytes, UcxError> {
        let library = self.context.library;
        let (mut address, mut bytes) = (null_mut(), 0);
        // SAFETY: the worker is live; the places are valid.
        let status = unsafe { library.ucp_worker_get_address(self.raw, &raw mut address, &raw mut bytes) };
        check(library, "ask for a worker's address", status)?;
        // SAFETY: the call set both: an address of that many bytes.
        let copied = Bytes::copy_from_slice(unsafe { std::slice::from_raw_parts(address.cast::<u8>(), bytes) });
        // SAFETY: was given above, and is not used after this.
        unsafe { library.ucp_worker_release_address(self.raw, address) };
        Ok(copied)
    }

    /// Readable while an armed worker has something to do.
    pub(super) fn event_fd(&self) -> Result<BorrowedFd<'_>, UcxError> {
        let mut fd = -1;
        // SAFETY: the worker is live; the place is valid.
        let status = unsafe { self.context.library.ucp_worker_get_efd(self.raw, &raw mut fd) };
        check(self.context.library, "ask for a worker's event descriptor", status)?;
        // SAFETY: the worker keeps it open until it is destroyed, and the result borrows the worker.
        Ok(unsafe { BorrowedFd::borrow_raw(fd) })
    }

    /// Does some of what there is to do, callbacks included. Returns whether there was anything.
    pub(super) fn progress(&self) -> bool {
        // SAFETY: the worker is live and belongs to this thread.
        unsafe { self.context.library.ucp_worker_progress(self.raw) != 0 }
    }

    /// Prepares for sleeping on [`Worker::event_fd`]; false if there is something to do instead.
    pub(super) fn arm(&self) -> Result<bool, UcxError> {
        // SAFETY: the worker is live and belongs to this thread.
        match unsafe { self.context.library.ucp_worker_arm(self.raw) } {
            sys::UCS_ERR_BUSY => Ok(false),
            status => check(self.context.library, "arm a worker", status).map(|()| true),
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // SAFETY: endpoints hold the worker, so there is none left of ours. Inbox and fault are dropped after this.
        unsafe { self.context.library.ucp_worker_destroy(self.raw) }
    }
}

/// Called by UCX, inside `progress`, for each active message.
unsafe extern "C" fn on_message(
    inbox: *mut c_void,
    header: *const c_void,
    header_bytes: usize,
    data: *mut c_void,
    data_bytes: usize,
    params: *const sys::ucp_am_recv_param_t,
) -> ucs_status_t {
    // SAFETY: what `listen` gave; it lives as long as the worker, and is used by this thread only.
    let inbox = unsafe { &*inbox.cast::<Inbox>() };
    // SAFETY: valid for this call, as UCX says.
    let header = unsafe { bytes(header, header_bytes) };
    // SAFETY: valid for this call, as UCX says.
    let attributes = unsafe { (*params).recv_attr };
    if attributes & u64::from(sys::UCP_AM_RECV_ATTR_FLAG_RNDV) != 0 {
        inbox.take(header, None);
    } else {
        // SAFETY: an eager message: valid for this call, as UCX says.
        inbox.take(header, Some(unsafe { bytes(data, data_bytes) }));
    }
    // The data was copied, or is not wanted.
    sys::UCS_OK
}

/// # Safety
/// `start` points at that many bytes for as long as the result is used, or there are none.
unsafe fn bytes<'a>(start: *const c_void, count: usize) -> &'a [u8] {
    if start.is_null() || count == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(start.cast(), count) }
}
