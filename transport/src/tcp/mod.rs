//! Sessions over TCP: one listener, and per peer one control lane and some data lanes. On one host the data lanes are Unix sockets,
//! and their payload stays in memory that the receiver reads itself (`share`).
//!
//! One *control thread* owns the listener, all handshakes, all control lanes and all timers; sessions begin and end there and
//! nowhere else. A few *data threads* own the data lanes. All of them wait in epoll(7) and make non-blocking calls; a round costs what
//! is ready, due or called to, however many peers there are.
//!
//! Lock order: the endpoint's state, then a session's locks, then the core's. No lock is held in a system call, but for the
//! guards of grants and sources, each around one call that does not wait.

mod accept;
mod beside;
mod calls;
mod coming;
mod config;
mod control;
mod data;
mod dial;
mod driver;
mod endpoint;
mod estate;
mod handshaking;
mod lane;
mod path;
mod pending;
mod poller;
mod rails;
mod rate;
mod session;
mod shake;
mod socket;
mod strangers;
mod stream;
mod target;
mod timers;
mod ucx;
mod verbs;
mod verbs_link;
mod verbs_window;
mod verbs_words;
pub(crate) mod wake;

pub use config::{ConfigError, TcpConfig, TcpConfigFile};
pub use endpoint::Tcp;
pub(crate) use stream::Socket;
