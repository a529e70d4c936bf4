//! Finding and opening libucp.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::ops::Deref;
use std::sync::OnceLock;

use crate::generated::{UCP_API_MAJOR, UCP_API_MINOR, Ucp};

/// The environment variable that names the library to open, instead of the usual names.
pub const LIBRARY_VARIABLE: &str = "KVFERRY_UCX_LIB";
/// What is looked for, in this order, where the system's loader looks: all 1.x releases have the first name.
const NAMES: [&str; 2] = ["libucp.so.0", "libucp.so"];

/// libucp, opened and of a version that the declarations fit. Its functions are reached through [`Deref`].
pub struct Library {
    ucp: Ucp,
    name: String,
    version: Version,
}

/// A release of UCX.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Version {
    /// Of the binary interface.
    pub major: u32,
    /// Of the programming interface.
    pub minor: u32,
    /// Of the fixes.
    pub release: u32,
}

/// Why UCX cannot be used here.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// No such library, or one that cannot be loaded.
    #[error(
        "UCX is missing: looked for {looked_for} ({loader}); install libucx0 (Debian, Ubuntu) or ucx (Fedora, RHEL, conda), \
         or set {LIBRARY_VARIABLE} to the path of libucp.so.0"
    )]
    Missing {
        /// The names, in order.
        looked_for: String,
        /// The loader's word about each.
        loader: String,
    },
    /// The library lacks a function.
    #[error("{library} is not UCX of version {UCP_API_MAJOR}.{UCP_API_MINOR} or newer: a function is missing")]
    Function {
        /// The library's name.
        library: String,
        /// Which one.
        #[source]
        source: libloading::Error,
    },
    /// The library is of another version.
    #[error(
        "{library} is UCX {found}, but {UCP_API_MAJOR}.{UCP_API_MINOR} or a newer {UCP_API_MAJOR}.x is needed; set \
         {LIBRARY_VARIABLE} to the path of such a libucp.so.0"
    )]
    Version {
        /// The library's name.
        library: String,
        /// Its version.
        found: Version,
    },
}

/// libucp, opened at the first call and kept open: UCX leaves threads and hooks behind that must not be unmapped.
///
/// # Errors
/// [`LoadError`], the same one at each call.
pub fn library() -> Result<&'static Library, &'static LoadError> {
    static LIBRARY: OnceLock<Result<Library, LoadError>> = OnceLock::new();
    LIBRARY.get_or_init(|| Library::open(&names(std::env::var_os(LIBRARY_VARIABLE)))).as_ref()
}

fn names(chosen: Option<OsString>) -> Vec<OsString> {
    match chosen.filter(|name| !name.is_empty()) {
        Some(name) => vec![name],
        None => NAMES.map(OsString::from).to_vec(),
    }
}

impl Library {
    fn open(names: &[OsString]) -> Result<Self, LoadError> {
        let mut causes = Vec::new();
        for name in names {
            // SAFETY: loading runs the initialisers of libucp and of what it needs, which ask for nothing; whoever sets
            // the variable to another library answers for it.
            match unsafe { libloading::Library::new(name) } {
                Ok(library) => return Self::check(library, name),
                Err(cause) => causes.push(cause.to_string()),
            }
        }
        let looked_for: Vec<_> = names.iter().map(|name| name.to_string_lossy()).collect();
        Err(LoadError::Missing { looked_for: looked_for.join(", "), loader: causes.join("; ") })
    }

    fn check(library: libloading::Library, name: &OsStr) -> Result<Self, LoadError> {
        let name = name.to_string_lossy().into_owned();
        // SAFETY: the functions of these names have the declared types in every UCX 1.x; which one it is is asked below,
        // before any other is called.
        let ucp = match unsafe { Ucp::from_library(library) } {
            Ok(ucp) => ucp,
            Err(source) => return Err(LoadError::Function { library: name, source }),
        };
        let mut version = Version { major: 0, minor: 0, release: 0 };
        let Version { major, minor, release } = &mut version;
        // SAFETY: three valid places for an integer each, as the function asks.
        unsafe { ucp.ucp_get_version(major, minor, release) };
        if version.major != UCP_API_MAJOR || version.minor < UCP_API_MINOR {
            return Err(LoadError::Version { library: name, found: version });
        }
        Ok(Self { ucp, name, version })
    }

    /// The name by which it was found.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it says of itself.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }
}

impl Deref for Library {
    type Target = Ucp;

    fn deref(&self) -> &Ucp {
        &self.ucp
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library").field("name", &self.name).field("version", &self.version).finish_non_exhaustive()
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.release)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_named_with_the_way_to_mend_it() {
        let error = Library::open(&names(Some("libucp-that-is-nowhere.so".into()))).unwrap_err();
        let text = error.to_string();
        for word in ["libucp-that-is-nowhere.so", LIBRARY_VARIABLE, "libucx0"] {
            assert!(text.contains(word), "{text}");
        }
    }

    #[test]
    fn all_names_are_tried_and_all_are_told() {
        assert_eq!(names(None), NAMES.map(OsString::from));
        assert_eq!(names(Some(OsString::new())), NAMES.map(OsString::from));
        let text = Library::open(&["no-such-a.so".into(), "no-such-b.so".into()]).unwrap_err().to_string();
        assert!(text.contains("no-such-a.so, no-such-b.so"), "{text}");
    }

    #[test]
    fn a_library_that_is_not_ucx_is_refused() {
        // Every program here is linked with it.
        let error = Library::open(&["libc.so.6".into()]).unwrap_err();
        assert!(matches!(error, LoadError::Function { .. }), "{error}");
        assert!(error.to_string().contains("libc.so.6"), "{error}");
    }

    #[test]
    #[ignore = "needs libucp"]
    fn the_installed_library_has_a_version_that_fits() {
        let library = library().unwrap();
        assert!(library.version() >= Version { major: UCP_API_MAJOR, minor: UCP_API_MINOR, release: 0 });
        assert!(library.name().contains("libucp"));
    }
}
