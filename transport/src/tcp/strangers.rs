//! Connections that have not proved themselves: so many at once, so many from one address, and the oldest goes first.
//!
//! Whoever holds many has no more than its own address's share, and loses the oldest for each one more. A handshake that goes on is
//! safe from that for [`Strangers::grace`]; until then who comes in excess is told that we are busy, or nothing at all.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// Where a connection comes from.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum Source {
    Address(IpAddr),
    /// A process of this host, over a Unix socket.
    Host,
}

impl Source {
    /// Of an address; an IPv6 host has a whole /64 to itself.
    pub(crate) fn of(address: IpAddr) -> Self {
        Self::Address(match address.to_canonical() {
            IpAddr::V6(address) if !(address.is_loopback() || address.is_unicast_link_local()) => {
                IpAddr::V6((u128::from(address) & !u128::from(u64::MAX)).into())
            }
            address => address,
        })
    }
}

/// What becomes of one more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Admission {
    Welcome,
    /// Welcome, once this one is let go.
    InsteadOf(u64),
    /// It is told that we are busy.
    Busy,
    /// It is told nothing.
    Refused,
}

pub(crate) struct Strangers {
    most: usize,
    most_of_source: usize,
    grace: Duration,
    sources: HashMap<u64, Source>,
    /// Of each source, since when; the keys grow with time.
    since: BTreeMap<Source, BTreeMap<u64, Instant>>,
}

impl Strangers {
    pub(crate) fn new(most: usize, most_of_source: usize, grace: Duration) -> Self {
        let (sources, since) = Default::default();
        Self { most, most_of_source, grace, sources, since }
    }

    /// What to do with one more of `source`.
    pub(crate) fn admit(&self, source: Source, now: Instant) -> Admission {
        let of_source = self.since.get(&source);
        let held = of_source.map_or(0, BTreeMap::len);
        let crowd = if held >= self.most_of_source {
            of_source
        } else if self.sources.len() >= self.most {
            self.since.values().max_by_key(|since| since.len())
        } else {
            None
        };
        let Some((oldest, since)) = crowd.and_then(BTreeMap::first_key_value) else { return Admission::Welcome };
        if now.saturating_duration_since(*since) >= self.grace {
            Admission::InsteadOf(*oldest)
        } else if held < 2 * self.most_of_source && self.sources.len() < 2 * self.most {
            Admission::Busy
        } else {
            Admission::Refused
        }
    }

    /// `key` is larger than all before.
    pub(crate) fn add(&mut self, key: u64, source: Source, now: Instant) {
        self.sources.insert(key, source);
        self.since.entry(source).or_default().insert(key, now);
    }

    /// It proved itself, or is over.
    pub(crate) fn forget(&mut self, key: u64) {
        let Some(source) = self.sources.remove(&key) else { return };
        if let Some(since) = self.since.get_mut(&source) {
            since.remove(&key);
            if since.is_empty() {
                self.since.remove(&source);
            }
        }
    }
}

/// How many sources' refusals are counted.
const MAX_REFUSED: usize = 1024;
/// A source that was not refused for so long begins anew.
const QUIET: Duration = Duration::from_secs(600);

/// Who was refused how often: one that tries for ever is told of ever more seldom.
#[derive(Default)]
pub(crate) struct Refusals {
    counts: HashMap<Source, (u64, Instant)>,
}

impl Refusals {
    /// Counts one more; gives how many there were if that is to be told: the first, the second, the fourth and so on.
    pub(crate) fn note(&mut self, source: Source, now: Instant) -> Option<u64> {
        if self.counts.len() >= MAX_REFUSED && !self.counts.contains_key(&source) {
            self.counts.clear();
        }
        let (count, last) = self.counts.entry(source).or_insert((0, now));
        if now.saturating_duration_since(*last) >= QUIET {
            *count = 0;
        }
        (*count, *last) = (*count + 1, now);
        count.is_power_of_two().then_some(*count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_millis(50);

    fn address(last: u8) -> Source {
        Source::of([192, 0, 2, last].into())
    }

    #[test]
    fn a_source_that_holds_its_share_loses_its_oldest_and_nobody_elses() {
        let start = Instant::now();
        let mut strangers = Strangers::new(6, 4, GRACE);
        for key in 0..4 {
            assert_eq!(strangers.admit(address(1), start), Admission::Welcome);
            strangers.add(key, address(1), start);
        }
        assert_eq!(strangers.admit(address(1), start), Admission::Busy, "all are young");
        assert_eq!(strangers.admit(address(1), start + GRACE), Admission::InsteadOf(0));
        assert_eq!(strangers.admit(address(2), start), Admission::Welcome);
        assert_eq!(strangers.admit(Source::Host, start), Admission::Welcome);
        strangers.add(4, address(2), start);
        strangers.add(5, Source::Host, start);
        let later = start + GRACE;
        assert_eq!(strangers.admit(address(3), later), Admission::InsteadOf(0), "of who holds most");
        strangers.forget(0);
        strangers.forget(0);
        assert_eq!(strangers.admit(address(1), later), Admission::Welcome);
        strangers.add(6, address(1), later);
        assert_eq!(strangers.admit(address(1), later), Admission::InsteadOf(1));
    }

    #[test]
    fn who_comes_in_excess_within_the_grace_is_told_so_and_then_nothing() {
        let start = Instant::now();
        let mut strangers = Strangers::new(6, 2, GRACE);
        for (key, want) in
            [Admission::Welcome, Admission::Welcome, Admission::Busy, Admission::Busy].into_iter().enumerate()
        {
            assert_eq!(strangers.admit(address(1), start), want);
            strangers.add(key as u64, address(1), start);
        }
        assert_eq!(strangers.admit(address(1), start), Admission::Refused);
        assert_eq!(strangers.admit(address(2), start), Admission::Welcome);
    }

    /// However fast an address fills its share anew, another one's handshake is not in its way.
    #[test]
    fn a_flood_of_one_address_leaves_the_others_their_place() {
        let start = Instant::now();
        let mut strangers = Strangers::new(8, 4, GRACE);
        let (mut key, mut others) = (0, None);
        for step in 0..1000_u32 {
            let now = start + step * Duration::from_millis(1);
            if step == 20 {
                assert_ne!(strangers.admit(address(2), now), Admission::Refused);
                strangers.add(key, address(2), now);
                others = Some(key);
                key += 1;
            }
            match strangers.admit(address(1), now) {
                Admission::InsteadOf(oldest) => {
                    assert_ne!(Some(oldest), others, "step {step}");
                    strangers.forget(oldest);
                }
                Admission::Refused => continue,
                Admission::Welcome | Admission::Busy => {}
            }
            strangers.add(key, address(1), now);
            key += 1;
        }
        assert!(others.is_some_and(|key| strangers.sources.contains_key(&key)));
    }

    #[test]
    fn an_ipv6_host_is_one_source_whatever_it_calls_itself() {
        let of = |text: &str| Source::of(text.parse().unwrap());
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:1:2"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:192.0.2.1"), of("192.0.2.1"));
        assert_ne!(of("fe80::1"), of("fe80::2"));
    }

    #[test]
    fn who_is_refused_for_ever_is_told_of_ever_more_seldom_and_each_source_by_itself() {
        let (start, mut refusals) = (Instant::now(), Refusals::default());
        let told: Vec<u64> = (0..1000).filter_map(|_| refusals.note(address(1), start)).collect();
        assert_eq!(told, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]);
        assert_eq!(refusals.note(address(2), start), Some(1));
        assert_eq!(refusals.note(address(1), start + QUIET), Some(1), "it was quiet meanwhile");
        for last in 0..2 * MAX_REFUSED as u32 {
            refusals.note(Source::of(std::net::Ipv4Addr::from(last).into()), start);
        }
        assert!(refusals.counts.len() <= MAX_REFUSED);
    }
}
