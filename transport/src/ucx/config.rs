//! How UCX is set up.

use std::time::Duration;

use ucx_sys::Version;

use super::error::UcxError;

/// What a UCX node may be told; the defaults suit a cluster whose nodes name nothing.
///
/// What is set in the environment as `UCX_...` stays as it is, except for the list of transports, of which those are taken that
/// may carry puts.
#[derive(Clone, Debug, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct UcxConfigFile {
    /// Network devices (`UCX_NET_DEVICES`), as `mlx5_0:1,eth0`; all if left out.
    pub net_devices: Option<String>,
    /// Which entry of a RoCE port's GID table to use (`UCX_IB_GID_INDEX`); UCX's choice if left out.
    pub gid_index: Option<u8>,
    /// How long a peer may take to answer the first word.
    pub connect_ms: u64,
    /// How long nothing may move while something is under way.
    pub stall_ms: u64,
    /// How long a cancelled put and a closed endpoint may take to end before the worker is destroyed under them.
    pub drain_ms: u64,
    /// Whether links may go where UCX would emulate puts, too (tcp, ud). Sessions put nothing there, they send loads; but whoever can
    /// reach such a link's port can make UCX write, and end, this process: see [`UcxError::NoTransport`].
    pub emulated_puts: bool,
    /// The most posts of one link at once.
    pub max_posts: u32,
    /// The most links at once.
    pub max_links: u32,
}

/// A setup that was checked; see [`UcxConfigFile`] for its meaning.
#[derive(Clone, Debug, serde::Deserialize)]
#[serde(try_from = "UcxConfigFile")]
pub struct UcxConfig {
    pub(super) net_devices: Option<String>,
    pub(super) gid_index: Option<u8>,
    pub(super) connect: Duration,
    pub(super) stall: Duration,
    pub(super) drain: Duration,
    pub(super) emulated_puts: bool,
    pub(super) max_posts: usize,
    pub(super) max_links: usize,
}

impl Default for UcxConfigFile {
    fn default() -> Self {
        Self {
            net_devices: None,
            gid_index: None,
            connect_ms: 5_000,
            stall_ms: 10_000,
            drain_ms: 500,
            emulated_puts: false,
            max_posts: 4096,
            max_links: 1024,
        }
    }
}

impl Default for UcxConfig {
    fn default() -> Self {
        // The defaults pass their own checks: a test says so.
        Self::unchecked(UcxConfigFile::default())
    }
}

impl TryFrom<UcxConfigFile> for UcxConfig {
    type Error = UcxError;

    fn try_from(file: UcxConfigFile) -> Result<Self, UcxError> {
        let within = |what, found: u64, limit: u64| {
            if (1..=limit).contains(&found) { Ok(()) } else { Err(UcxError::Limit { what, found, limit }) }
        };
        const HOUR_MS: u64 = 3_600_000;
        within("ucx.connect_ms, from 1 on", file.connect_ms, HOUR_MS)?;
        within("ucx.stall_ms, from 1 on", file.stall_ms, HOUR_MS)?;
        within("ucx.drain_ms, from 1 on", file.drain_ms, HOUR_MS)?;
        within("ucx.max_posts, from 1 on", file.max_posts.into(), 1 << 20)?;
        within("ucx.max_links, from 1 on", file.max_links.into(), 1 << 16)?;
        Ok(Self::unchecked(file))
    }
}

impl UcxConfig {
    fn unchecked(file: UcxConfigFile) -> Self {
        Self {
            net_devices: file.net_devices,
            gid_index: file.gid_index,
            connect: Duration::from_millis(file.connect_ms),
            stall: Duration::from_millis(file.stall_ms),
            drain: Duration::from_millis(file.drain_ms),
            emulated_puts: file.emulated_puts,
            max_posts: file.max_posts as usize,
            max_links: file.max_links as usize,
        }
    }

    /// What UCX is told, but for the transports. `is_set` says whether the user set `UCX_` and a name in the environment.
    pub(super) fn settings(&self, is_set: impl Fn(&str) -> bool) -> Vec<Setting> {
        let mut settings: Vec<Setting> = DEFAULTS.iter().filter(|setting| !is_set(setting.key)).cloned().collect();
        let mut add = |key, value: &Option<String>| {
            if let Some(value) = value {
                settings.push(Setting { key, value: value.clone().into(), why: "asked for in the configuration" });
            }
        };
        add("NET_DEVICES", &self.net_devices);
        add("IB_GID_INDEX", &self.gid_index.map(|index| index.to_string()));
        settings
    }
}

impl Setting {
    /// What [`Setting::key`] is called when UCX of this version is told: before 1.17 it knew a transport's settings without the
    /// transport's name there, and would warn that nothing has the full name.
    pub(super) fn name_in(&self, version: Version) -> &'static str {
        let is_old = (version.major, version.minor) < (1, 17);
        self.key.strip_prefix("TCP_").filter(|_| is_old).unwrap_or(self.key)
    }
}

/// One of UCX's settings, and why we make it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Setting {
    /// Its name without `UCX_`.
    pub key: &'static str,
    /// Its value.
    pub value: std::borrow::Cow<'static, str>,
    /// Why.
    pub why: &'static str,
}

const DEFAULTS: [Setting; 3] = [
    Setting {
        key: "TCP_TX_SEG_SIZE",
        value: std::borrow::Cow::Borrowed("256k"),
        why: "before UCX 1.22 what goes over tcp is cut into messages of this size, puts acknowledge each: with the default of 8k they \
              are 5 to 70 times slower",
    },
    Setting {
        key: "TCP_RX_SEG_SIZE",
        value: std::borrow::Cow::Borrowed("1m"),
        why: "the other half of UCX_TCP_TX_SEG_SIZE: a receiver must be able to take what a sender sends",
    },
    Setting {
        key: "TCP_MAX_IOV",
        value: std::borrow::Cow::Borrowed("18"),
        why: "a load of scattered pages goes in one message without a copy: of 6, what is larger is cut, and put together again \
              in a copy of the receiver's",
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_pass_their_own_checks() {
        UcxConfig::try_from(UcxConfigFile::default()).unwrap();
    }

    #[test]
    fn a_wrong_value_is_named() {
        let file = UcxConfigFile { drain_ms: 0, ..UcxConfigFile::default() };
        let text = UcxConfig::try_from(file).unwrap_err().to_string();
        assert!(text.contains("drain_ms"), "{text}");
    }

    #[test]
    fn a_setting_is_called_as_the_version_knows_it() {
        let settings =
            UcxConfig::unchecked(UcxConfigFile { gid_index: Some(1), ..UcxConfigFile::default() }).settings(|_| false);
        let names = |minor| -> Vec<_> {
            settings.iter().map(|setting| setting.name_in(Version { major: 1, minor, release: 0 })).collect()
        };
        assert_eq!(names(16), ["TX_SEG_SIZE", "RX_SEG_SIZE", "MAX_IOV", "IB_GID_INDEX"]);
        assert_eq!(names(17), ["TCP_TX_SEG_SIZE", "TCP_RX_SEG_SIZE", "TCP_MAX_IOV", "IB_GID_INDEX"]);
    }

    #[test]
    fn what_the_user_set_is_left_alone() {
        let config = UcxConfig::unchecked(UcxConfigFile { gid_index: Some(0), ..UcxConfigFile::default() });
        let keys =
            |is_set: &dyn Fn(&str) -> bool| -> Vec<_> { config.settings(is_set).iter().map(|s| s.key).collect() };
        assert_eq!(keys(&|_| false), ["TCP_TX_SEG_SIZE", "TCP_RX_SEG_SIZE", "TCP_MAX_IOV", "IB_GID_INDEX"]);
        assert_eq!(keys(&|key| key == "TCP_RX_SEG_SIZE"), ["TCP_TX_SEG_SIZE", "TCP_MAX_IOV", "IB_GID_INDEX"]);
    }
}
