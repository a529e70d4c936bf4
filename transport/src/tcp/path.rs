//! Which way payload goes: what both ends offer, the best of it, and why not the others.

use std::fmt::Write as _;
use std::net::SocketAddr;

use kvferry_protocol::wire::{Offer, OfferKind, put_rails, take_rails};

use crate::api::{PathKind, PathReport};
use crate::core::random;

/// What names a running kernel: two endpoints with the same are on one host.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const BOOT_ID_BYTES: usize = 16;

/// What this endpoint can do.
pub(crate) struct Local {
    allowed: Vec<PathKind>,
    boot: Result<[u8; BOOT_ID_BYTES], String>,
    /// Whether an RDMA device can be used, or why not.
    rdma: Result<(), String>,
    /// Why UCX cannot be had here.
    ucx: Result<(), String>,
    /// The abstract name of the listener for Unix lanes.
    pub(crate) rendezvous: Option<String>,
    /// More addresses that we listen on for data lanes.
    rails: Vec<SocketAddr>,
    /// Whether memory is read where it lies.
    in_place: bool,
}

/// What two endpoints agree on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) route: Route,
    /// On Unix lanes, memory with a descriptor is shared.
    pub(crate) by_descriptor: bool,
    /// On Unix lanes, memory without one is read in the sender's process.
    pub(crate) by_address: bool,
    /// Memory with a descriptor may be read where it lies.
    pub(crate) in_place: bool,
    /// On TCP lanes, RDMA devices carry what they can reach.
    pub(crate) by_device: bool,
    /// The peer knows regions of the RDMA path that are memory of a device.
    pub(crate) device_memory: bool,
    /// On TCP lanes without that, a link over UCX carries the payload.
    pub(crate) by_ucx: bool,
    /// Why the better ways are not taken.
    pub(crate) not: Vec<(PathKind, String)>,
}

/// Where the data lanes are dialled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    /// The address that was dialled, and the peer's rails.
    Tcp(Vec<SocketAddr>),
    Unix(String),
    /// Nowhere: the two have no way in common.
    None,
}

impl Local {
    /// `rdma` and `ucx` say whether they can be had, if they are allowed.
    pub(crate) fn new(allowed: &[PathKind], rdma: Result<(), String>, ucx: Result<(), String>) -> Self {
        let mut allowed = allowed.to_vec();
        allowed.sort_unstable();
        let needs_unix = allowed.iter().any(|kind| *kind < PathKind::Rdma);
        let boot = std::fs::read_to_string(BOOT_ID).map_err(|error| format!("{BOOT_ID} cannot be read: {error}"));
        let boot = boot.and_then(|text| parse_boot_id(&text).ok_or_else(|| format!("{BOOT_ID} holds no identity")));
        let rendezvous = (needs_unix && boot.is_ok()).then(|| {
            let random: [u8; 16] = random();
            random.iter().fold("kvferry-".to_owned(), |mut name, byte| {
                // Writing to a string does not fail.
                let _ = write!(name, "{byte:02x}");
                name
            })
        });
        Self { allowed, boot, rdma, ucx, rendezvous, rails: Vec::new(), in_place: true }
    }

    /// The same with rails.
    pub(crate) fn with_rails(self, rails: Vec<SocketAddr>) -> Self {
        Self { rails, ..self }
    }

    /// The same, whether memory is read where it lies or not.
    pub(crate) fn with_in_place(self, in_place: bool) -> Self {
        Self { in_place, ..self }
    }

    pub(crate) fn allows(&self, kind: PathKind) -> bool {
        self.allowed.contains(&kind)
    }

    /// What peers are told.
    pub(crate) fn offers(&self) -> Vec<Offer> {
        let mut offers = Vec::new();
        let mut offer = |kind, parameters| offers.push(Offer { kind, parameters });
        if let (Ok(boot), Some(name)) = (&self.boot, &self.rendezvous) {
            if self.allows(PathKind::SharedMemory) {
                offer(OfferKind::SHARED_MEMORY, Vec::new());
                if self.in_place {
                    offer(OfferKind::IN_PLACE, Vec::new());
                }
            }
            if self.allows(PathKind::ProcessMemory) {
                offer(OfferKind::PROCESS_MEMORY, Vec::new());
            }
            // Memory is shared over Unix lanes, so these are offered with it.
            offer(OfferKind::UNIX, [&boot[..], name.as_bytes()].concat());
        }
        // What no lane can carry goes by TCP, so it is offered beside that.
        if self.rdma.is_ok() && self.allows(PathKind::Tcp) {
            offer(OfferKind::RDMA, RDMA_WORDS.to_vec());
            // Also where no such memory is registered: a peer's may be written.
            offer(OfferKind::DEVICE_MEMORY, Vec::new());
        }
        if self.ucx.is_ok() {
            offer(OfferKind::UCX, Vec::new());
        }
        if self.allows(PathKind::Tcp) {
            offer(OfferKind::TCP, put_rails(&self.rails));
        }
        offers
    }

    /// The best way that both have. `theirs` are the offers of a peer that speaks `version`.
    pub(crate) fn choose(&self, version: u16, theirs: &[Offer]) -> Choice {
        let find = |kind| theirs.iter().find(|offer| offer.kind == kind);
        let unix = self.unix_route(version, find(OfferKind::UNIX));
        let shares = |kind, offer| match (&unix, find(offer)) {
            (Err(why), _) => Err(why.clone()),
            (Ok(_), _) if !self.allows(kind) => Err(NOT_ALLOWED.to_owned()),
            (Ok(_), None) => Err("the peer does not offer it".to_owned()),
            (Ok(_), Some(_)) => Ok(()),
        };
        let by_descriptor = shares(PathKind::SharedMemory, OfferKind::SHARED_MEMORY);
        let by_address = shares(PathKind::ProcessMemory, OfferKind::PROCESS_MEMORY);
        let sockets = match &unix {
            Ok(_) if self.allows(PathKind::UnixSocket) => Ok(()),
            Ok(_) => Err(NOT_ALLOWED.to_owned()),
            Err(why) => Err(why.clone()),
        };
        let mut not = Vec::new();
        let mut reason = |kind, outcome: Result<(), &String>| {
            outcome.is_ok() || {
                not.push((kind, outcome.err().cloned().unwrap_or_default()));
                false
            }
        };
        let best = reason(PathKind::SharedMemory, by_descriptor.as_ref().map(|_| ()))
            || reason(PathKind::ProcessMemory, by_address.as_ref().map(|_| ()))
            || reason(PathKind::UnixSocket, sockets.as_ref().map(|_| ()));
        let mut beside_tcp = |kind, ours: &Result<(), String>, offer| match (ours, find(offer)) {
            (Ok(()), Some(offer)) if kind == PathKind::Rdma && offer.parameters != RDMA_WORDS => {
                not.push((kind, "the peer's release says it in other words".to_owned()));
                false
            }
            (Ok(()), Some(_)) => true,
            (Ok(()), None) => {
                not.push((kind, "the peer does not offer it".to_owned()));
                false
            }
            // Who does not ask for it is not told why it is not there.
            (Err(why), _) => {
                if self.allows(kind) {
                    not.push((kind, why.clone()));
                }
                false
            }
        };
        // Also beside Unix lanes, which the dialler may find out of reach.
        let by_device = beside_tcp(PathKind::Rdma, &self.rdma, OfferKind::RDMA);
        let by_ucx = beside_tcp(PathKind::Ucx, &self.ucx, OfferKind::UCX);
        let route = match unix {
            Ok(name) if best => {
                not.retain(|(kind, _)| *kind < PathKind::Rdma);
                Route::Unix(name)
            }
            _ => self.tcp_route(version, find(OfferKind::TCP), &mut not),
        };
        let (by_descriptor, by_address) = (by_descriptor.is_ok(), by_address.is_ok());
        let in_place = self.in_place && by_descriptor && find(OfferKind::IN_PLACE).is_some();
        let device_memory = by_device && find(OfferKind::DEVICE_MEMORY).is_some();
        Choice { route, by_descriptor, by_address, in_place, by_device, device_memory, by_ucx, not }
    }

    /// What to take when the chosen way failed with `problem`.
    pub(crate) fn without_unix(&self, version: u16, theirs: &[Offer], problem: &str) -> Choice {
        let without: Vec<Offer> = theirs.iter().filter(|offer| offer.kind != OfferKind::UNIX).cloned().collect();
        let mut choice = self.choose(version, &without);
        for (kind, reason) in &mut choice.not {
            if self.allows(*kind) && *kind < PathKind::Rdma {
                problem.clone_into(reason);
            }
        }
        choice
    }

    fn unix_route(&self, version: u16, theirs: Option<&Offer>) -> Result<String, String> {
        let (Ok(boot), true) = (&self.boot, self.rendezvous.is_some()) else {
            return Err(self.boot.as_ref().err().cloned().unwrap_or_else(|| NOT_ALLOWED.to_owned()));
        };
        let Some(offer) = theirs else {
            return Err(match version {
                ..3 => format!("the peer speaks version {version}, which knows TCP only"),
                _ => "the peer does not offer it".to_owned(),
            });
        };
        match offer.parameters.split_at_checked(BOOT_ID_BYTES) {
            Some((host, name)) if host == boot => {
                let name = String::from_utf8(name.to_vec()).ok().filter(|name| is_rendezvous(name));
                name.ok_or_else(|| "the peer's name for it makes no sense".to_owned())
            }
            _ => Err("the peer is on another host (its kernel has another boot id)".to_owned()),
        }
    }

    fn tcp_route(&self, version: u16, theirs: Option<&Offer>, not: &mut Vec<(PathKind, String)>) -> Route {
        if self.allows(PathKind::Tcp) && (theirs.is_some() || version < 3) {
            let rails = theirs.map(|offer| take_rails(&offer.parameters)).transpose();
            return Route::Tcp(rails.ok().flatten().unwrap_or_default());
        }
        let why = if self.allows(PathKind::Tcp) { "the peer does not offer it" } else { NOT_ALLOWED };
        not.push((PathKind::Tcp, why.to_owned()));
        Route::None
    }
}

impl Choice {
    /// Takes the next way: RDMA was tried, and does not work.
    pub(crate) fn without_device(&mut self, reason: String) {
        self.by_device = false;
        self.not.push((PathKind::Rdma, reason));
    }

    /// Takes the next way: a link over UCX was tried, and cannot be made.
    pub(crate) fn without_ucx(&mut self, reason: String) {
        self.by_ucx = false;
        self.not.push((PathKind::Ucx, reason));
    }

    /// What was taken, once the lanes are there.
    pub(crate) fn report(&self, lanes_are_unix: bool) -> PathReport {
        let mut not = self.not.clone();
        let kind = match (lanes_are_unix, self.by_descriptor, self.by_address) {
            (true, true, _) => PathKind::SharedMemory,
            (true, false, true) => PathKind::ProcessMemory,
            (true, false, false) => PathKind::UnixSocket,
            (false, ..) => {
                if !matches!(self.route, Route::Tcp(_)) {
                    not.push((PathKind::UnixSocket, "the peer dialled TCP lanes: it could not reach ours".to_owned()));
                }
                match (self.by_device, self.by_ucx) {
                    (true, _) => PathKind::Rdma,
                    (false, true) => PathKind::Ucx,
                    (false, false) => PathKind::Tcp,
                }
            }
        };
        not.retain(|(other, _)| *other < kind);
        not.sort_by_key(|(kind, _)| *kind);
        let plain = match (lanes_are_unix, self.by_address) {
            (true, true) => PathKind::ProcessMemory,
            (true, false) => PathKind::UnixSocket,
            (false, _) => kind,
        };
        PathReport { kind, plain, not }
    }

    /// In words, for an error.
    pub(crate) fn reasons(&self) -> String {
        let reasons: Vec<String> = self.not.iter().map(|(kind, why)| format!("{kind}: {why}")).collect();
        reasons.join("; ")
    }
}

/// The version of the words of the RDMA path, which are said on the control lane.
const RDMA_WORDS: &[u8] = &[1];

const NOT_ALLOWED: &str = "this side's configuration does not allow it";

fn is_rendezvous(name: &str) -> bool {
    // An abstract name has at most 107 bytes; anything else would be a file's.
    name.starts_with("kvferry-") && name.len() <= 100 && name.bytes().all(|byte| byte.is_ascii_graphic())
}

fn parse_boot_id(text: &str) -> Option<[u8; BOOT_ID_BYTES]> {
    let digits: Vec<u8> = text.trim().bytes().filter(|byte| *byte != b'-').collect();
    let mut id = [0; BOOT_ID_BYTES];
    if digits.len() != 2 * BOOT_ID_BYTES {
        return None;
    }
    for (byte, pair) in id.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use PathKind::{ProcessMemory, Rdma, SharedMemory, Tcp, Ucx, UnixSocket};

    fn local(allowed: &[PathKind], boot: u8) -> Local {
        let has = |kind| if allowed.contains(&kind) { Ok(()) } else { Err(NOT_ALLOWED.to_owned()) };
        Local { boot: Ok([boot; BOOT_ID_BYTES]), ..Local::new(allowed, has(Rdma), has(Ucx)) }
    }

    #[test]
    fn the_best_way_that_both_have_is_taken_and_the_others_have_a_reason() {
        let all = [Tcp, UnixSocket, ProcessMemory, SharedMemory];
        for (name, ours, theirs, host, (want, plain), reason) in [
            ("all", &all[..], &all[..], 1, (SharedMemory, ProcessMemory), ""),
            ("maps only", &all, &[Tcp, UnixSocket, SharedMemory], 1, (SharedMemory, UnixSocket), ""),
            (
                "one without a map",
                &all,
                &[Tcp, UnixSocket, ProcessMemory],
                1,
                (ProcessMemory, ProcessMemory),
                "does not offer",
            ),
            ("sockets only", &[Tcp, UnixSocket], &all, 1, (UnixSocket, UnixSocket), "configuration does not allow"),
            ("another host", &all, &all, 2, (Tcp, Tcp), "another host"),
            ("the peer has TCP only", &all, &[Tcp], 1, (Tcp, Tcp), "does not offer"),
        ] {
            let (ours, theirs) = (local(ours, 1), local(theirs, host));
            let choice = ours.choose(3, &theirs.offers());
            let report = choice.report(matches!(choice.route, Route::Unix(_)));
            assert_eq!((report.kind, report.plain), (want, plain), "{name}: {choice:?}");
            assert_eq!(report.not_taken() == "none", report.not.is_empty(), "{name}: {report:?}");
            assert!(report.not.iter().all(|(kind, why)| *kind < want && why.contains(reason)), "{name}: {report:?}");
            assert_eq!(report.not.len(), all.iter().filter(|kind| **kind < want).count(), "{name}: {report:?}");
        }
    }

    #[test]
    fn ucx_is_taken_between_hosts_and_only_where_both_have_it() {
        let both = [Ucx, Tcp, UnixSocket];
        for (name, ours, theirs, host, want) in [
            ("another host", &both[..], &both[..], 2, Ucx),
            ("one host", &both, &both, 1, UnixSocket),
            ("the peer has none", &both, &[Tcp], 2, Tcp),
            ("we have none", &[Tcp], &both, 2, Tcp),
        ] {
            let choice = local(ours, 1).choose(3, &local(theirs, host).offers());
            let report = choice.report(matches!(choice.route, Route::Unix(_)));
            assert_eq!(report.kind, want, "{name}: {choice:?}");
            let has_reason = report.not.iter().any(|(kind, _)| *kind == Ucx);
            assert_eq!(has_reason, want == Tcp && ours.contains(&Ucx), "{name}: {report:?}");
        }
    }

    #[test]
    fn rdma_is_taken_before_ucx_and_ucx_where_its_test_fails() {
        let all = [Rdma, Ucx, Tcp];
        let mut choice = local(&all, 1).choose(3, &local(&all, 2).offers());
        assert_eq!(choice.report(false).kind, Rdma);
        choice.without_device("spoilt".to_owned());
        let report = choice.report(false);
        assert_eq!((report.kind, report.not.last()), (Ucx, Some(&(Rdma, "spoilt".to_owned()))));
        let mut choice = local(&[Rdma, Tcp], 1).choose(3, &local(&all, 2).offers());
        choice.without_device("spoilt".to_owned());
        let report = choice.report(false);
        assert_eq!((report.kind, report.not.last()), (Tcp, Some(&(Rdma, "spoilt".to_owned()))));
    }

    #[test]
    fn memory_of_devices_is_told_to_those_who_know_the_word() {
        let (ours, mut offers) = (local(&[Rdma, Tcp], 1), local(&[Rdma, Tcp], 2).offers());
        assert!(ours.choose(3, &offers).device_memory);
        offers.retain(|offer| offer.kind != OfferKind::DEVICE_MEMORY);
        let choice = ours.choose(3, &offers);
        assert!(choice.by_device && !choice.device_memory, "an older release still takes the path: {choice:?}");
        let without = local(&[Tcp], 2).offers();
        assert!(!ours.choose(3, &without).device_memory, "only beside RDMA");
    }

    #[test]
    fn a_peer_that_says_the_words_of_rdma_otherwise_is_not_joined_by_it() {
        let (ours, mut offers) = (local(&[Rdma, Tcp], 1), local(&[Rdma, Tcp], 2).offers());
        for offer in offers.iter_mut().filter(|offer| offer.kind == OfferKind::RDMA) {
            offer.parameters = Vec::new();
        }
        let report = ours.choose(3, &offers).report(false);
        assert!(report.kind == Tcp && report.not_taken().contains("other words"), "{report:?}");
    }

    #[test]
    fn two_without_a_common_way_have_none_and_say_why() {
        let choice = local(&[UnixSocket], 1).choose(3, &local(&[Tcp], 1).offers());
        assert_eq!(choice.route, Route::None);
        assert!(choice.reasons().contains("tcp: this side's configuration"), "{}", choice.reasons());
        let choice = local(&[Tcp], 1).choose(3, &local(&[UnixSocket], 1).offers());
        assert_eq!(choice.route, Route::None);
        assert!(choice.reasons().contains("tcp: the peer does not offer it"), "{}", choice.reasons());
    }

    #[test]
    fn an_older_peer_gets_tcp() {
        let choice = local(&[Tcp, UnixSocket], 1).choose(2, &[]);
        assert_eq!(choice.route, Route::Tcp(Vec::new()));
        assert!(choice.reasons().contains("version 2"), "{}", choice.reasons());
    }

    #[test]
    fn a_peers_rails_are_found_and_what_makes_no_sense_is_none() {
        let rails = vec!["10.1.0.5:7401".parse().unwrap()];
        let choice = local(&[Tcp], 1).choose(3, &local(&[Tcp], 1).with_rails(rails.clone()).offers());
        assert_eq!(choice.route, Route::Tcp(rails));
        let torn = [Offer { kind: OfferKind::TCP, parameters: vec![4, 1] }];
        assert_eq!(local(&[Tcp], 1).choose(3, &torn).route, Route::Tcp(Vec::new()));
    }

    #[test]
    fn when_the_rendezvous_is_out_of_reach_tcp_is_next_with_that_reason() {
        let (ours, theirs) = (local(&[Tcp, UnixSocket], 1), local(&[Tcp, UnixSocket], 1).offers());
        let choice = ours.without_unix(3, &theirs, "refused");
        assert_eq!(choice.route, Route::Tcp(Vec::new()));
        assert_eq!(choice.not.last(), Some(&(UnixSocket, "refused".to_owned())));
    }

    #[test]
    fn a_name_that_is_not_of_our_kind_is_not_dialled() {
        let ours = local(&[Tcp, UnixSocket], 1);
        for name in ["", "/tmp/socket", "kvferry-\0", &format!("kvferry-{}", "x".repeat(100))] {
            let parameters = [&[1; BOOT_ID_BYTES][..], name.as_bytes()].concat();
            let offers =
                [Offer { kind: OfferKind::UNIX, parameters }, Offer { kind: OfferKind::TCP, parameters: vec![] }];
            assert_eq!(ours.choose(3, &offers).route, Route::Tcp(Vec::new()), "{name:?}");
        }
    }

    #[test]
    fn a_boot_id_is_read() {
        assert_eq!(parse_boot_id("00010203-0405-0607-0809-0a0b0c0d0e0f\n"), Some(std::array::from_fn(|at| at as u8)));
        assert_eq!(parse_boot_id("00010203"), None);
        assert_eq!(parse_boot_id("zz010203-0405-0607-0809-0a0b0c0d0e0f"), None);
    }
}
