//! Which prefill node computes a prompt: all that are known take turns, and one that is down is passed over.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvferry::ConnectorError;
use kvferry::contract::TransferParams;
use kvferry::pd::PdHandle;
use kvferry_protocol::layout::{TpError, sources_of};
use kvferry_protocol::{TpRank, TransferId};
use kvferry_transport::PeerAddress;

use crate::http::{RouteError, Router};
use crate::messages::Ask;
use crate::pd::random_bits;

/// Where a prefill node's ranks listen, by rank. On command lines they are joined by `+`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PrefillAddress(Vec<SocketAddr>);

/// Why a text names no prefill node.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{text:?} is no IP:PORT; write one for each rank of the node, by rank, joined by +")]
pub struct BadPrefillAddress {
    /// The part that is no address.
    pub text: String,
}

impl FromStr for PrefillAddress {
    type Err = BadPrefillAddress;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let one = |text: &str| text.parse().map_err(|_| BadPrefillAddress { text: text.to_owned() });
        text.split('+').map(one).collect::<Result<_, _>>().map(Self)
    }
}

impl fmt::Display for PrefillAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().enumerate().try_for_each(|(rank, address)| match rank {
            0 => write!(f, "{address}"),
            _ => write!(f, "+{address}"),
        })
    }
}

impl From<Vec<SocketAddr>> for PrefillAddress {
    fn from(ranks: Vec<SocketAddr>) -> Self {
        Self(ranks)
    }
}

impl PrefillAddress {
    /// The ranks' addresses.
    #[must_use]
    pub fn ranks(&self) -> &[SocketAddr] {
        &self.0
    }
}

/// Why prefill nodes cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PrefillsError {
    /// Heads do not spread over a node's ranks.
    #[error("prefill node {node}: its {ranks} addresses are its tensor-parallel ranks")]
    Ranks {
        /// The node.
        node: PrefillAddress,
        /// How many addresses it was given.
        ranks: usize,
        /// What does not fit.
        #[source]
        source: TpError,
    },
    /// The connector has ended.
    #[error(transparent)]
    Connector(#[from] ConnectorError),
}

/// Sends prompts to prefill nodes in turn, and passes over one that is down while another is up.
#[derive(Debug)]
pub struct PrefillRouter {
    nodes: Vec<Node>,
    /// Tensor-parallel ranks of this engine.
    ranks: u16,
    turns: AtomicUsize,
}

#[derive(Debug)]
struct Node {
    from: Vec<PeerAddress>,
    /// Each of this engine's connectors with an address that it reads from.
    links: Vec<(PdHandle, PeerAddress)>,
}

impl PrefillRouter {
    /// A router to some nodes, for the engine beside `connectors`, one a rank; reaches the nodes ahead of requests.
    ///
    /// # Errors
    /// [`PrefillsError`].
    pub fn new(nodes: &[PrefillAddress], connectors: &[PdHandle], kv_heads: u16) -> Result<Self, PrefillsError> {
        let ranks = connectors.len() as u16;
        let node = |node: &PrefillAddress| {
            let explain = |source| PrefillsError::Ranks { node: node.clone(), ranks: node.0.len(), source };
            let from: Vec<_> = node.0.iter().map(|&address| PeerAddress::Tcp(address)).collect();
            let mut links = Vec::new();
            for (rank, connector) in (0..ranks).map(TpRank::new).zip(connectors) {
                for source in sources_of(rank, ranks, from.len() as u16, kv_heads).map_err(explain)? {
                    links.push((connector.clone(), from[usize::from(source.tp_rank.get())]));
                }
            }
            let node = Node { from, links };
            node.connect()?;
            Ok(node)
        };
        let nodes = nodes.iter().map(node).collect::<Result<_, PrefillsError>>()?;
        Ok(Self { nodes, ranks, turns: AtomicUsize::new(0) })
    }

    /// The next node in turn; if none is up at this moment, one that may be soon.
    fn next(&self) -> Option<&Node> {
        let first = self.turns.fetch_add(1, Ordering::Relaxed) % self.nodes.len().max(1);
        let mut in_turn = self.nodes[first..].iter().chain(&self.nodes[..first]);
        let up = in_turn.clone().find(|node| node.is_up());
        up.or_else(|| in_turn.next())
    }
}

impl Node {
    /// Whether every rank that is read has a session with whoever reads it.
    fn is_up(&self) -> bool {
        let up = self.links.iter().all(|(connector, address)| connector.reaches(*address));
        if !up {
            // It goes on trying by itself, unless it was refused: then somebody must ask. A connector that has ended tells the request.
            let _ = self.connect();
        }
        up
    }

    fn connect(&self) -> Result<(), ConnectorError> {
        self.links.iter().try_for_each(|(connector, address)| connector.connect(*address))
    }
}

impl Router for PrefillRouter {
    fn route(&self, prompt: &[u32]) -> Result<Option<TransferParams>, RouteError> {
        let Some(node) = self.next() else { return Ok(None) };
        let transfer =
            TransferId::new(random_bits().map_err(|error| RouteError::Unavailable { problem: error.to_string() })?);
        let ask = Ask { transfer, ranks: self.ranks, tokens: prompt.to_vec() };
        let ask = ask.encode().map_err(|error| RouteError::Prompt { problem: error.to_string() })?;
        Ok(Some(TransferParams::Fetch { transfer, from: node.from.clone(), engine: None, ask }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_written_as_its_ranks_addresses() {
        for text in ["127.0.0.1:7400", "127.0.0.1:7400+127.0.0.1:7401", "[::1]:1+[::1]:2+10.0.0.1:3"] {
            assert_eq!(text.parse::<PrefillAddress>().unwrap().to_string(), text);
        }
        for (text, bad) in [("", ""), ("127.0.0.1", "127.0.0.1"), ("127.0.0.1:1+", ""), ("127.0.0.1:1+x:2", "x:2")] {
            assert_eq!(text.parse::<PrefillAddress>(), Err(BadPrefillAddress { text: bad.to_owned() }));
        }
    }
}
