//! What UCX offers on this machine, for `doctor` and for choosing its transports.

use std::collections::BTreeSet;
use std::rc::Rc;

use ucx_sys::{Library, Version};

use super::config::{Setting, UcxConfig};
use super::error::UcxError;
use super::ffi::Context;
use super::lanes;

/// What UCX is and can do here.
#[derive(Clone, Debug)]
pub struct UcxFacts {
    /// By which name the library was found.
    pub library: String,
    /// Its version.
    pub version: String,
    /// Every transport and device that UCX found, as `tcp/eth0`.
    pub found: Vec<String>,
    /// The transports that links use.
    pub transports: Vec<String>,
    /// The kinds of memory that UCX can put, as `host`, `cuda`.
    pub memory_kinds: Vec<String>,
    /// What we set.
    pub settings: Vec<Setting>,
    /// What a person should know.
    pub notes: Vec<String>,
}

/// Opens the library and says what it offers.
///
/// # Errors
/// [`UcxError`] if there is no library, no transport that may carry puts, or UCX does not start.
pub fn survey(config: &UcxConfig) -> Result<UcxFacts, UcxError> {
    let library = ucx_sys::library().map_err(UcxError::Library)?;
    Ok(start(library, config)?.1)
}

/// Starts UCX with the transports that may carry puts.
pub(super) fn start(library: &'static Library, config: &UcxConfig) -> Result<(Rc<Context>, UcxFacts), UcxError> {
    let is_set = |key: &str| std::env::var_os(format!("UCX_{key}")).is_some();
    let mut settings = config.settings(is_set);
    let wish = std::env::var("UCX_TLS").ok();
    // Naming a transport that is not there makes UCX warn, so it is asked first what there is.
    let found = find(library, config)?;
    let names: BTreeSet<String> = found.iter().filter_map(|one| one.split('/').next().map(str::to_owned)).collect();
    let transports = lanes::choose(&names, wish.as_deref(), config.emulated_puts);
    if transports.is_empty() {
        return Err(UcxError::NoTransport {
            found: names.into_iter().collect::<Vec<_>>().join(", "),
            allowed: wish.unwrap_or_else(|| "all".to_owned()),
        });
    }
    settings
        .retain(|setting| !setting.key.starts_with("TCP_") || transports.iter().any(|transport| transport == "tcp"));
    let version = library.version();
    let listed: Vec<(&str, &str)> =
        settings.iter().map(|setting| (setting.name_in(version), &*setting.value)).collect();
    let context = Context::new(library, &transports, &listed)?;
    let facts = UcxFacts {
        library: library.name().to_owned(),
        version: library.version().to_string(),
        memory_kinds: memory_kinds(context.memory_kinds()?),
        notes: notes(library.version(), &found, &transports, &settings),
        found,
        transports,
        settings,
    };
    Ok((context, facts))
}

/// Every transport and device that there is.
fn find(library: &'static Library, config: &UcxConfig) -> Result<Vec<String>, UcxError> {
    let devices = config.net_devices.as_deref().map(|devices| ("NET_DEVICES", devices));
    let context = Context::new(library, &["all".to_owned()], devices.as_slice())?;
    Ok(lanes::resources(&context.printed()?))
}

/// Names of `UCS_MEMORY_TYPE_...`, by their number. Source: `ucs/memory/memory_type.h`.
const MEMORY_KINDS: [&str; 5] = ["host", "cuda", "cuda-managed", "rocm", "rocm-managed"];

fn memory_kinds(mask: u64) -> Vec<String> {
    let name = |kind: usize| MEMORY_KINDS.get(kind).map_or_else(|| format!("kind {kind}"), |&name| name.to_owned());
    (0..64).filter(|kind| mask >> kind & 1 == 1).map(name).collect()
}

fn notes(version: Version, found: &[String], transports: &[String], settings: &[Setting]) -> Vec<String> {
    let mut notes = Vec::new();
    let has = |name: &str| transports.iter().any(|transport| transport.starts_with(name));
    let left_out: BTreeSet<&str> = found
        .iter()
        .filter_map(|one| one.split('/').next())
        .filter(|name| !transports.iter().any(|transport| transport == name))
        .collect();
    if !left_out.is_empty() {
        let left_out: Vec<_> = left_out.into_iter().collect();
        notes.push(format!(
            "not used: {}; where the sender's own process writes the receiver's memory, the receiver cannot stop it, or \
             UCX_TLS leaves it out, or (tcp, ud) UCX would emulate puts there and emulated_puts is not set",
            left_out.join(", ")
        ));
    }
    if has("tcp") {
        for setting in settings.iter().filter(|setting| setting.key.starts_with("TCP_")) {
            notes.push(format!("UCX_{}={} is set: {}", setting.key, setting.value, setting.why));
        }
        let segments = ["TCP_TX_SEG_SIZE", "TCP_RX_SEG_SIZE"];
        let is_ours = |key: &str| settings.iter().any(|setting| setting.key == key);
        if (version.major, version.minor) < (1, 22) && !segments.iter().all(|key| is_ours(key)) {
            notes.push(format!(
                "UCX_TCP_TX_SEG_SIZE or UCX_TCP_RX_SEG_SIZE is set in the environment; UCX {version} puts over tcp in such \
                 segments, and is fast with 256k and 1m"
            ));
        }
        notes.push(
            "puts over tcp are emulated by UCX, which aborts the receiving process if a sender dies amid them; sessions send active \
             messages there instead, and kvferry's own tcp is faster"
                .to_owned(),
        );
        notes.push(
            "UCX's tcp listens on every interface of UCX_NET_DEVICES, proves nobody and hides nothing: use it only where every \
             machine that can reach the port is trusted; kvferry's own tcp is authenticated"
                .to_owned(),
        );
    }
    if has("rc") && !has("ud") {
        notes.push(
            "rc without ud: UCX needs ud to set rc up, and fails with \"no auxiliary transport\"; add ud to UCX_TLS"
                .to_owned(),
        );
    }
    if has("rc") || has("ud") || has("dc") {
        notes.push(
            "on RoCE both sides need GIDs of one kind; if a link does not come up though both networks do, choose the entry \
             with gid_index (UCX_IB_GID_INDEX): UCX 1.13 cannot use the IPv4 entry of a soft-RoCE device, entry 0 works"
                .to_owned(),
        );
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notes_of(version: (u32, u32), found: &[&str], transports: &[&str], is_set: bool) -> String {
        let strings = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        let version = Version { major: version.0, minor: version.1, release: 0 };
        let settings = UcxConfig::default().settings(|_| is_set);
        notes(version, &strings(found), &strings(transports), &settings).join("\n")
    }

    #[test]
    fn the_traps_are_explained_where_they_are() {
        let text = notes_of((1, 13), &["tcp/lo", "posix/memory", "cma/memory"], &["tcp"], false);
        for word in ["cma, posix", "UCX_TCP_TX_SEG_SIZE=256k is set", "UCX_TCP_RX_SEG_SIZE=1m is set", "proves nobody"]
        {
            assert!(text.contains(word), "{word}: {text}");
        }
        assert!(!text.contains("gid_index"), "{text}");
        assert!(notes_of((1, 13), &["tcp/lo"], &["tcp"], true).contains("set in the environment"));
        assert!(!notes_of((1, 22), &["tcp/lo"], &["tcp"], true).contains("set in the environment"));
        let text = notes_of((1, 13), &["rc_verbs/rxe0:1"], &["rc_verbs"], false);
        assert!(text.contains("auxiliary") && text.contains("UCX_IB_GID_INDEX"), "{text}");
        assert!(!notes_of((1, 13), &["x/y"], &["rc_verbs", "ud_verbs"], false).contains("auxiliary"));
    }

    #[test]
    fn memory_kinds_have_names() {
        assert_eq!(memory_kinds(0b1), ["host"]);
        assert_eq!(memory_kinds(0b110_0011), ["host", "cuda", "kind 5", "kind 6"]);
    }
}
