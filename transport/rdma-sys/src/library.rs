//! Opening the library.

use std::ffi::OsStr;
use std::ops::Deref;

use crate::bindings::Ibv;

/// The name under which the dynamic loader looks for it: the one that all releases since 2005 have.
pub const LIBRARY: &str = "libibverbs.so.1";

/// libibverbs, opened.
pub struct Verbs(Ibv);

/// Why libibverbs could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The dynamic loader did not find it, or could not load it.
    #[error(
        "{library} cannot be loaded; RDMA needs it: install rdma-core's user-space parts (Debian: libibverbs1 \
         ibverbs-providers; Red Hat: libibverbs), or put its folder on LD_LIBRARY_PATH"
    )]
    Missing {
        /// What was looked for.
        library: String,
        /// The loader's word.
        #[source]
        source: libloading::Error,
    },
    /// It lacks a call that is needed.
    #[error("{library} has no {symbol}: it is too old, or another library of that name; install rdma-core 17 or newer")]
    Symbol {
        /// What was loaded.
        library: String,
        /// What it lacks.
        symbol: &'static str,
    },
}

impl Verbs {
    /// Opens [`LIBRARY`] where the dynamic loader finds it.
    ///
    /// # Errors
    /// [`OpenError`]: it is missing, or lacks a needed call.
    pub fn open() -> Result<Self, OpenError> {
        // SAFETY: the library of this name is libibverbs, whose initialisers may run at any time.
        unsafe { Self::open_at(LIBRARY) }
    }

    /// Opens the library at a path, or of a name that the dynamic loader knows.
    ///
    /// # Safety
    /// The library is libibverbs: its initialisers are run, and its symbols are called by the declarations of this crate.
    ///
    /// # Errors
    /// [`OpenError`]: it is missing, or lacks a needed call.
    pub unsafe fn open_at(path: impl AsRef<OsStr>) -> Result<Self, OpenError> {
        let path = path.as_ref();
        let library = || path.to_string_lossy().into_owned();
        // SAFETY: the caller vouches for the library.
        let opened = unsafe { Ibv::new(path) };
        let verbs = opened.map_err(|source| OpenError::Missing { library: library(), source })?;
        match missing_symbol(&verbs) {
            None => Ok(Self(verbs)),
            Some(symbol) => Err(OpenError::Symbol { library: library(), symbol }),
        }
    }

    /// Whether memory of other devices can be registered by a dma-buf (rdma-core 34 or newer).
    #[must_use]
    pub fn has_dmabuf(&self) -> bool {
        self.0.ibv_reg_dmabuf_mr.is_ok()
    }

    /// Whether optional access flags, as relaxed ordering, can be asked for (rdma-core 28 or newer).
    #[must_use]
    pub fn has_optional_access(&self) -> bool {
        self.0.ibv_reg_mr_iova2.is_ok()
    }
}

impl Deref for Verbs {
    type Target = Ibv;

    fn deref(&self) -> &Ibv {
        &self.0
    }
}

/// The first call that the library lacks; a generated method would panic in its absence.
fn missing_symbol(verbs: &Ibv) -> Option<&'static str> {
    macro_rules! first_missing {
        ($($symbol:ident)*) => {
            $(if verbs.$symbol.is_err() {
                return Some(stringify!($symbol));
            })*
        };
    }
    first_missing!(
        ibv_get_device_list ibv_free_device_list ibv_get_device_name ibv_open_device ibv_close_device
        ibv_query_device ibv_query_port ibv_query_gid ibv_alloc_pd ibv_dealloc_pd ibv_reg_mr ibv_dereg_mr
        ibv_create_comp_channel ibv_destroy_comp_channel ibv_create_cq ibv_destroy_cq ibv_get_cq_event ibv_ack_cq_events
        ibv_create_qp ibv_modify_qp ibv_destroy_qp ibv_wc_status_str ibv_get_async_event ibv_ack_async_event
        ibv_event_type_str
    );
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_an_error_that_names_it_and_says_what_to_install() {
        // SAFETY: there is no such library.
        let error = unsafe { Verbs::open_at("libibverbs-that-nobody-has.so.1") }.err().unwrap();
        let text = error.to_string();
        assert!(text.contains("libibverbs-that-nobody-has.so.1"), "{text}");
        assert!(text.contains("ibverbs-providers") && text.contains("LD_LIBRARY_PATH"), "{text}");
        assert!(std::error::Error::source(&error).is_some());
    }

    #[test]
    fn another_library_is_an_error_that_names_the_call_that_it_lacks() {
        // SAFETY: the C library is loaded already.
        let error = unsafe { Verbs::open_at("libc.so.6") }.err().unwrap();
        assert!(matches!(&error, OpenError::Symbol { symbol: "ibv_get_device_list", .. }), "{error}");
    }
}
