//! What proves that a transport keeps the contract of [`Transport`](crate::Transport).
//!
//! [`contract_tests!`](crate::contract_tests) makes one test of each case; every transport runs all of them. No case sleeps or
//! asserts on time: each waits for an event, and gives up after [`PATIENCE`] with a word about what did not come.

mod arena;
mod borders;
mod cases;
#[cfg(feature = "tls")]
pub mod certificates;
pub mod decoders;
mod device_arena;
mod node;
mod pages;
mod proxy;
mod raw_pair;
mod watches;

pub use arena::Arena;
pub use borders::*;
pub use cases::*;
pub use device_arena::DeviceArena;
pub use node::{Make, Node, PATIENCE, patience, peer, with_patience};
pub use pages::{ScatteredWrite, scattered_write};
pub use proxy::{Flow, Proxy, ProxyPlan, Towards};
pub use raw_pair::{RawPair, scattered};
pub use watches::*;

/// Makes one test of each case of the contract, ignored for a reason if one is given. The argument is an expression that gives a [`Make`](crate::testing::Make).
#[macro_export]
macro_rules! contract_tests {
    (@one [$(#[$attribute:meta])*] $make:expr; $case:ident) => {
        #[test]
        $(#[$attribute])*
        fn $case() {
            $crate::testing::$case(&$make);
        }
    };
    (@each $attributes:tt $make:expr; $($case:ident),+ $(,)?) => {$(
        $crate::contract_tests!(@one $attributes $make; $case);
    )+};
    (@all $attributes:tt $make:expr) => {
        $crate::contract_tests!(@each $attributes $make;
            scattered_bytes_arrive_exactly,
            writes_of_many_frames_land_whole_in_both_directions,
            each_write_lands_once_after_its_bytes_with_its_notification,
            nothing_lands_after_revoke_returned,
            nothing_lands_in_what_is_sealed_and_the_rest_stays_open,
            what_may_not_be_written_is_refused_and_the_session_goes_on,
            a_write_that_makes_no_sense_is_handed_back,
            cancel_ends_each_post_once,
            what_lands_is_what_was_posted,
            a_packed_source_is_let_go_with_its_post,
            messages_come_in_order_beside_payload,
            what_is_too_long_is_refused_in_writing,
            disconnect_ends_posts_and_grants_first_and_the_dialler_comes_back,
            a_forgotten_address_is_not_dialled_again_and_its_session_stays,
            a_restarted_peer_is_a_new_one,
            shutdown_amid_traffic_ends_everything,
            a_peer_that_is_not_there_is_reported_and_found_later,
            a_grant_is_of_no_use_to_another_peer,
            nothing_lands_after_a_session_ended,
            what_is_limited_comes_back,
            watches_see_each_byte_once,
            a_watch_that_fails_ends_its_post_alone,
            watches_look_no_more_after_a_revoke_or_a_cancel,
        );
    };
    (ignored: $reason:literal, $make:expr) => {
        $crate::contract_tests!(@all [#[ignore = $reason]] $make);
    };
    ($make:expr) => {
        $crate::contract_tests!(@all [] $make);
    };
}
