//! A connection to a peer's worker, and what is done over it.
#![expect(unsafe_code, reason = "every call of a C library is")]

use std::cell::Cell;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::rc::Rc;

use ucx_sys as sys;
use ucx_sys::{Outcome, ucs_status_t};

use super::super::error::UcxError;
use super::super::ticket::Ticket;
use super::{HEADER_BYTES, MESSAGE_ID, Mapped, Worker, check, printed, text};
use crate::raw::RawRun;

/// Zeroes that follow what a peer sent where UCX reads it without being told a length: a count in it that lies is then mostly
/// read as nothing instead of as whatever lies behind.
const PADDING_BYTES: usize = 4 << 10;

/// A connection from a worker to one of a peer's.
pub(in crate::ucx) struct Endpoint {
    worker: Rc<Worker>,
    raw: sys::ucp_ep_h,
    keys: Vec<sys::ucp_rkey_h>,
    is_closed: bool,
    /// Whether no operation is under way any more.
    is_drained: bool,
}

/// Where a put goes: an address in the peer's memory, under a key of this endpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::ucx) struct RemotePlace {
    pub(in crate::ucx) address: u64,
    pub(in crate::ucx) key: usize,
}

impl Endpoint {
    /// Starts to connect to the worker at `address`.
    pub(in crate::ucx) fn new(worker: &Rc<Worker>, address: &[u8]) -> Result<Self, UcxError> {
        let library = worker.context.library;
        let padded = padded(address);
        // SAFETY: all fields are integers or may be null; the mask says which are read.
        let mut params: sys::ucp_ep_params_t = unsafe { std::mem::zeroed() };
        let fields = sys::UCP_EP_PARAM_FIELD_REMOTE_ADDRESS
            | sys::UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE
            | sys::UCP_EP_PARAM_FIELD_ERR_HANDLER;
        params.field_mask = u64::from(fields);
        params.address = padded.as_ptr().cast();
        // Without it a lost peer is never told, and an endpoint cannot be closed by force.
        params.err_mode = sys::UCP_ERR_HANDLING_MODE_PEER;
        params.err_handler =
            sys::ucp_err_handler { cb: Some(on_fault), arg: (&raw const worker.fault).cast_mut().cast() };
        let mut raw = null_mut();
        // SAFETY: the worker is live and belongs to this thread; the address is read during the call; the cell of the fault
        // is the worker's, in which the endpoint lives.
        let status = unsafe { library.ucp_ep_create(worker.raw, &raw const params, &raw mut raw) };
        check(library, "make an endpoint for the peer's worker", status)?;
        Ok(Self { worker: Rc::clone(worker), raw, keys: Vec::new(), is_closed: false, is_drained: false })
    }

    /// Why the peer is lost, if it is.
    pub(in crate::ucx) fn fault(&self) -> Option<String> {
        let status = self.worker.fault.get();
        (status != sys::UCS_OK).then(|| text(self.worker.context.library, status))
    }

    /// UCX's word for a status.
    pub(in crate::ucx) fn text(&self, status: ucs_status_t) -> String {
        text(self.worker.context.library, status)
    }

    /// What UCX prints of its lanes.
    pub(in crate::ucx) fn printed(&self) -> Result<String, UcxError> {
        self.check_open("print an endpoint")?;
        // SAFETY: the endpoint is live, the stream is open.
        printed(|stream| unsafe { self.worker.context.library.ucp_ep_print_info(self.raw, stream) })
    }

    /// Takes a packed key of the peer's; returns its number.
    pub(in crate::ucx) fn unpack(&mut self, packed: &[u8]) -> Result<usize, UcxError> {
        self.check_open("take a key of the peer's")?;
        let library = self.worker.context.library;
        let padded = padded(packed);
        let mut key = null_mut();
        // SAFETY: the endpoint is live; the buffer is read during the call; the place is valid.
        let status = unsafe { library.ucp_ep_rkey_unpack(self.raw, padded.as_ptr().cast(), &raw mut key) };
        check(library, "take a key of the peer's", status)?;
        self.keys.push(key);
        Ok(self.keys.len() - 1)
    }

    /// Writes `run` to the peer's memory. The run stays mapped and unchanged until `ticket` is done.
    pub(in crate::ucx) fn put(
        &self,
        run: RawRun,
        local: Option<&Mapped>,
        to: RemotePlace,
        ticket: &Rc<Ticket>,
    ) -> Result<(), ucs_status_t> {
        self.check_open("put").map_err(|_| sys::UCS_ERR_NOT_CONNECTED)?;
        let Some(&key) = self.keys.get(to.key) else { return Err(sys::UCS_ERR_INVALID_PARAM) };
        let library = self.worker.context.library;
        self.start(ticket, |params| {
            if let Some(local) = local {
                params.op_attr_mask |= sys::UCP_OP_ATTR_FIELD_MEMH;
                params.memh = local.raw;
            }
            let (start, count) = (run.start().cast(), run.bytes());
            // SAFETY: endpoint, key and region are live; the caller keeps the run. Where it goes is the peer's affair.
            unsafe { library.ucp_put_nbx(self.raw, start, count, to.address, key, &raw const *params) }
        })
    }

    /// Ends when all that was put before is in place at the peer.
    pub(in crate::ucx) fn flush(&self, ticket: &Rc<Ticket>) -> Result<(), ucs_status_t> {
        self.check_open("flush").map_err(|_| sys::UCS_ERR_NOT_CONNECTED)?;
        let library = self.worker.context.library;
        self.start(ticket, |params| {
            // SAFETY: the endpoint is live and belongs to this thread.
            unsafe { library.ucp_ep_flush_nbx(self.raw, &raw const *params) }
        })
    }

    /// Sends an active message. Both parts stay unchanged until `ticket` is done.
    pub(in crate::ucx) fn send(
        &self,
        header: &[u8; HEADER_BYTES],
        data: &[u8],
        ticket: &Rc<Ticket>,
    ) -> Result<(), ucs_status_t> {
        self.check_open("send").map_err(|_| sys::UCS_ERR_NOT_CONNECTED)?;
        let library = self.worker.context.library;
        self.start(ticket, |params| {
            // Eager whatever its length: the other way makes the peer fetch it from this process.
            params.op_attr_mask |= sys::UCP_OP_ATTR_FIELD_FLAGS;
            params.flags = sys::UCP_AM_SEND_FLAG_EAGER;
            let (start, count) = (data.as_ptr().cast(), data.len());
            let header = header.as_ptr().cast();
            // SAFETY: the endpoint is live and belongs to this thread; the caller keeps header and data.
            unsafe {
                library.ucp_am_send_nbx(self.raw, MESSAGE_ID, header, HEADER_BYTES, start, count, &raw const *params)
            }
        })
    }

    /// The same for data that lies in several places. The list stays, too, until `ticket` is done.
    pub(in crate::ucx) fn send_runs(
        &self,
        header: &[u8; HEADER_BYTES],
        runs: &[RawRun],
        ticket: &Rc<Ticket>,
    ) -> Result<(), ucs_status_t> {
        const { assert!(size_of::<RawRun>() == size_of::<sys::ucp_dt_iov>()) }
        self.check_open("send").map_err(|_| sys::UCS_ERR_NOT_CONNECTED)?;
        let library = self.worker.context.library;
        self.start(ticket, |params| {
            params.op_attr_mask |= sys::UCP_OP_ATTR_FIELD_FLAGS | sys::UCP_OP_ATTR_FIELD_DATATYPE;
            params.flags = sys::UCP_AM_SEND_FLAG_EAGER;
            params.datatype = sys::UCP_DATATYPE_IOV.into();
            // A run is an address and a length, as a `ucp_dt_iov` is.
            let (start, count) = (runs.as_ptr().cast(), runs.len());
            let header = header.as_ptr().cast();
            // SAFETY: the endpoint is live and belongs to this thread; the caller keeps header, list and runs.
            unsafe {
                library.ucp_am_send_nbx(self.raw, MESSAGE_ID, header, HEADER_BYTES, start, count, &raw const *params)
            }
        })
    }

    /// Gives the connection up without the peer's help; all operations end, with an error if they had not yet.
    pub(in crate::ucx) fn close(&mut self, ticket: &Rc<Ticket>) {
        if std::mem::replace(&mut self.is_closed, true) {
            return;
        }
        let library = self.worker.context.library;
        let closed = self.start(ticket, |params| {
            params.op_attr_mask |= sys::UCP_OP_ATTR_FIELD_FLAGS;
            params.flags = sys::UCP_EP_CLOSE_FLAG_FORCE;
            // SAFETY: the endpoint is live, belongs to this thread, and is not used after this, but for destroying its keys.
            unsafe { library.ucp_ep_close_nbx(self.raw, &raw const *params) }
        });
        if let Err(status) = closed {
            tracing::warn!(
                status = self.text(status),
                "UCX did not close an endpoint; its worker is destroyed all the same"
            );
        }
    }

    fn check_open(&self, operation: &'static str) -> Result<(), UcxError> {
        let closed = || UcxError::Call { operation, status: self.text(sys::UCS_ERR_NOT_CONNECTED) };
        if self.is_closed { Err(closed()) } else { Ok(()) }
    }

    /// No operation is under way any more.
    pub(in crate::ucx) fn set_drained(&mut self) {
        self.is_drained = true;
    }

    fn start(
        &self,
        ticket: &Rc<Ticket>,
        call: impl FnOnce(&mut sys::ucp_request_param_t) -> sys::ucs_status_ptr_t,
    ) -> Result<(), ucs_status_t> {
        let given = Rc::into_raw(Rc::clone(ticket));
        // SAFETY: all fields are integers or may be null; the mask says which are read.
        let mut params: sys::ucp_request_param_t = unsafe { std::mem::zeroed() };
        params.op_attr_mask = sys::UCP_OP_ATTR_FIELD_CALLBACK | sys::UCP_OP_ATTR_FIELD_USER_DATA;
        params.cb.send = Some(on_end);
        params.user_data = given.cast_mut().cast();
        ticket.begin();
        let status = match sys::outcome(call(&mut params)) {
            Outcome::Pending(_) => return Ok(()),
            Outcome::Done => sys::UCS_OK,
            Outcome::Failed(status) => status,
        };
        // SAFETY: given above; without a request the callback is not called, so this count is still ours.
        drop(unsafe { Rc::from_raw(given) });
        ticket.end(status);
        if status == sys::UCS_OK { Ok(()) } else { Err(status) }
    }
}

/// Called by UCX, inside `progress` or `close`, when an operation that had a request ended.
unsafe extern "C" fn on_end(request: *mut c_void, status: ucs_status_t, ticket: *mut c_void) {
    // SAFETY: the count that `start` gave; UCX calls back once, on the thread that owns the ticket.
    let ticket = unsafe { Rc::from_raw(ticket.cast_const().cast::<Ticket>()) };
    if let Ok(library) = sys::library() {
        // SAFETY: the request is over, and nobody else has it.
        unsafe { library.ucp_request_free(request) };
    }
    ticket.end(status);
}

/// Called by UCX, inside `progress`, when a peer is lost.
unsafe extern "C" fn on_fault(fault: *mut c_void, _endpoint: sys::ucp_ep_h, status: ucs_status_t) {
    // SAFETY: what `Endpoint::new` gave; the worker has it until it is destroyed, and this thread alone uses it.
    unsafe { &*fault.cast::<Cell<ucs_status_t>>() }.set(status);
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if !self.is_drained {
            // A put under way may name its key until the worker is destroyed, which takes what is left along.
            return;
        }
        for key in self.keys.drain(..) {
            // SAFETY: the worker is live, and no put under the key is under way.
            unsafe { self.worker.context.library.ucp_rkey_destroy(key) }
        }
    }
}

fn padded(bytes: &[u8]) -> Vec<u8> {
    let mut padded = bytes.to_vec();
    padded.resize(bytes.len() + PADDING_BYTES, 0);
    padded
}
