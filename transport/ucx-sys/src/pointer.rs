//! UCX's macros for pointers that may be a status instead.

use std::ffi::c_void;
use std::ptr::NonNull;

use crate::generated::{UCS_ERR_LAST, UCS_OK, ucs_status_ptr_t, ucs_status_t};

/// What a call of the `_nbx` family returned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// It is over, and no callback comes.
    Done,
    /// It failed at once, and no callback comes.
    Failed(ucs_status_t),
    /// It goes on; the callback comes, and the request has to be freed.
    Pending(NonNull<c_void>),
}

/// Takes a returned pointer apart: null is success, the last 100 addresses are errors, anything else is a request.
///
/// Source: `UCS_PTR_IS_ERR`, `UCS_PTR_RAW_STATUS` of `ucs/type/status.h`.
#[must_use]
pub fn outcome(returned: ucs_status_ptr_t) -> Outcome {
    let address = returned as isize;
    if (isize::from(UCS_ERR_LAST)..0).contains(&address) {
        return Outcome::Failed(ucs_status_t::try_from(address).unwrap_or(UCS_ERR_LAST));
    }
    NonNull::new(returned).map_or(Outcome::Done, Outcome::Pending)
}

const _: () = assert!(UCS_OK == 0, "null is success");

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generated::{UCS_ERR_CANCELED, UCS_ERR_NO_MESSAGE};

    #[test]
    fn a_pointer_is_success_an_error_or_a_request() {
        let pointer = |address: isize| address as ucs_status_ptr_t;
        assert_eq!(outcome(pointer(0)), Outcome::Done);
        for status in [UCS_ERR_NO_MESSAGE, UCS_ERR_CANCELED, UCS_ERR_LAST] {
            assert_eq!(outcome(pointer(status.into())), Outcome::Failed(status));
        }
        for address in [1, 0x7fff_dead_beef, -101] {
            assert_eq!(outcome(pointer(address)), Outcome::Pending(NonNull::new(pointer(address)).unwrap()));
        }
    }
}
