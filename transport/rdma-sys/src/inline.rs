//! The calls of the data path, which are inline functions of the C header: they go through the device's own table.
//!
//! Each is what `infiniband/verbs.h` has under the same name.

use std::ffi::c_int;

use crate::bindings::{ibv_cq, ibv_qp, ibv_recv_wr, ibv_send_wr, ibv_wc};

/// What a call returns if the driver has no such entry: the C header would jump to null.
const NO_SUCH_CALL: c_int = libc::EOPNOTSUPP;

/// Posts a chain of send requests; returns 0 or an errno, and then `bad` is the first request that was not posted.
///
/// # Safety
/// `qp` is a live queue pair, `requests` a chain of valid requests whose lists live for the call, `bad` a valid place. What the
/// requests read stays registered until they complete.
pub unsafe fn ibv_post_send(qp: *mut ibv_qp, requests: *mut ibv_send_wr, bad: *mut *mut ibv_send_wr) -> c_int {
    // SAFETY: a live queue pair has a live context.
    let context = unsafe { (*qp).context };
    // SAFETY: as above.
    let call = unsafe { (*context).ops.post_send };
    match call {
        // SAFETY: the driver's own entry, with what the caller vouches for.
        Some(call) => unsafe { call(qp, requests, bad) },
        None => NO_SUCH_CALL,
    }
}

/// Posts a chain of receive requests; returns 0 or an errno, and then `bad` is the first request that was not posted.
///
/// # Safety
/// As for [`ibv_post_send`]; what the requests write stays registered until they complete.
pub unsafe fn ibv_post_recv(qp: *mut ibv_qp, requests: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> c_int {
    // SAFETY: a live queue pair has a live context.
    let context = unsafe { (*qp).context };
    // SAFETY: as above.
    let call = unsafe { (*context).ops.post_recv };
    match call {
        // SAFETY: the driver's own entry, with what the caller vouches for.
        Some(call) => unsafe { call(qp, requests, bad) },
        None => NO_SUCH_CALL,
    }
}

/// Takes up to `count` completions; returns how many, or a negative number on failure.
///
/// # Safety
/// `cq` is a live completion queue, and `completions` has room for `count`.
pub unsafe fn ibv_poll_cq(cq: *mut ibv_cq, count: c_int, completions: *mut ibv_wc) -> c_int {
    // SAFETY: a live completion queue has a live context.
    let context = unsafe { (*cq).context };
    // SAFETY: as above.
    let call = unsafe { (*context).ops.poll_cq };
    match call {
        // SAFETY: the driver's own entry, with what the caller vouches for.
        Some(call) => unsafe { call(cq, count, completions) },
        None => -NO_SUCH_CALL,
    }
}

/// Asks for one event on the queue's channel with the next completion; returns 0 or an errno.
///
/// # Safety
/// `cq` is a live completion queue with a channel.
pub unsafe fn ibv_req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: a live completion queue has a live context.
    let context = unsafe { (*cq).context };
    // SAFETY: as above.
    let call = unsafe { (*context).ops.req_notify_cq };
    match call {
        // SAFETY: the driver's own entry, with what the caller vouches for.
        Some(call) => unsafe { call(cq, solicited_only) },
        None => NO_SUCH_CALL,
    }
}
