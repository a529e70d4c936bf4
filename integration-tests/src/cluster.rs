//! Several nodes with a proxy on every link between them, and a load of requests whose answers are checked.

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use kvferry_transport::testing::{Flow, Proxy, ProxyPlan, Towards};

use crate::node::wait_closely;
use crate::{Answer, Ask, Asks, Chance, HttpError, Idle, Node, Reference, Setup, Shape};

/// Prefill and decode nodes; every decode node reaches every rank of every prefill node through a proxy of its own.
pub struct Cluster {
    setup: Setup,
    shape: Shape,
    prefill: Vec<Node>,
    decode: Vec<Node>,
    /// `links[d][p][rank]`.
    links: Vec<Vec<Vec<Proxy>>>,
    /// What each node has when nothing is under way.
    at_rest: Resources,
    reference: Arc<Reference>,
    asks: Arc<Asks>,
}

/// What nodes of a role hold of their system.
#[derive(Clone, Debug, Default)]
struct Resources {
    prefill: Usage,
    decode: Usage,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Usage {
    descriptors: usize,
    threads: usize,
}

impl Usage {
    fn of(node: &Node) -> Self {
        Self { descriptors: node.descriptors(), threads: node.threads() }
    }

    fn fits(self, limit: Self) -> bool {
        self.descriptors <= limit.descriptors && self.threads <= limit.threads
    }
}

impl Cluster {
    /// Starts `prefill` and `decode` nodes, and waits until each decode node has a session with each prefill node.
    ///
    /// # Panics
    /// If they do not come up.
    #[must_use]
    pub fn new(setup: &Setup, shape: Shape, prefill: usize, decode: usize, reference: Arc<Reference>) -> Self {
        let at = SocketAddr::from(([127, 0, 0, 1], 0));
        let prefill_node = |index| named(&shape.prefill(setup), "prefill", index).prefill_at(at);
        let prefill: Vec<_> = (0..prefill).map(prefill_node).collect();
        let proxy = |&address: &SocketAddr| Proxy::new(address, ProxyPlan::default());
        let link = |node: &Node| node.addresses().iter().map(proxy).collect();
        let links: Vec<Vec<Vec<_>>> = (0..decode).map(|_| prefill.iter().map(link).collect()).collect();
        let mut cluster = Self {
            setup: setup.clone(),
            shape,
            prefill,
            decode: Vec::new(),
            links,
            at_rest: Resources::default(),
            reference,
            asks: Arc::new(Asks::of(shape)),
        };
        cluster.decode = (0..decode).map(|index| cluster.start_decode(index)).collect();
        cluster.wait_until_whole();
        // One request on every link, so that what is made once is made.
        for index in 0..cluster.decode.len() {
            (0..cluster.prefill.len()).for_each(|_| cluster.serve_one(index, &mut Chance::new(index as u64)));
        }
        cluster.wait_until_free();
        cluster.at_rest = Resources { prefill: Usage::of(&cluster.prefill[0]), decode: Usage::of(&cluster.decode[0]) };
        cluster
    }

    fn start_decode(&self, index: usize) -> Node {
        let ranks = |link: &Vec<Proxy>| link.iter().map(|proxy| proxy.address().to_string()).collect::<Vec<_>>();
        let nodes: Vec<_> = self.links[index].iter().map(|link| ranks(link).join("+")).collect();
        named(&self.shape.decode(&self.setup), "decode", index).decode_reading(&nodes)
    }

    /// What is asked of these nodes, and what of it was answered.
    #[must_use]
    pub fn asks(&self) -> &Arc<Asks> {
        &self.asks
    }

    /// How both sides are configured.
    #[must_use]
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The prefill nodes.
    #[must_use]
    pub fn prefill(&self) -> &[Node] {
        &self.prefill
    }

    /// The decode nodes.
    #[must_use]
    pub fn decode(&self) -> &[Node] {
        &self.decode
    }

    /// The proxies, one for each rank of a prefill node; those of the first decode node first.
    pub fn links(&self) -> impl Iterator<Item = &Proxy> {
        self.links.iter().flatten().flatten()
    }

    /// What a single process says.
    #[must_use]
    pub fn reference(&self) -> &Arc<Reference> {
        &self.reference
    }

    /// Kills a prefill node and starts it anew under its name, and at its address as decode nodes see it: another incarnation.
    ///
    /// # Panics
    /// If it has logged at ERROR.
    pub fn restart_prefill(&mut self, index: usize) {
        self.prefill[index].assert_calm(&format!("prefill {index}"));
        let old = self.prefill[index].address();
        let links = || self.links.iter().flat_map(|links| &links[index]);
        self.prefill[index].kill_now();
        let setup = named(&self.shape.prefill(&self.setup), "prefill", index);
        self.prefill[index] = if self.shape.prefill_tp == 1 {
            setup.prefill_at(old)
        } else {
            // Ranks listen on ports in a row, and those behind the first may be another process's by now.
            links().for_each(|link| link.set_refusing(true));
            setup.prefill()
        };
        for (link, &address) in
            self.links.iter().flat_map(|links| links[index].iter().zip(self.prefill[index].addresses()))
        {
            link.set_target(address);
            link.set_refusing(false);
        }
    }

    /// Kills a decode node and starts it anew under its name.
    ///
    /// # Panics
    /// If it has logged at ERROR.
    pub fn restart_decode(&mut self, index: usize) {
        self.decode[index].assert_calm(&format!("decode {index}"));
        self.decode[index].kill_now();
        self.decode[index] = self.start_decode(index);
    }

    /// Bytes that went over all links in both directions.
    #[must_use]
    pub fn carried(&self) -> u64 {
        self.links().map(|link| link.carried(Towards::Dialler) + link.carried(Towards::Target)).sum()
    }

    /// Lets all links flow again.
    pub fn heal(&self) {
        for link in self.links() {
            link.set_refusing(false);
            link.set_flow(Towards::Dialler, Flow::Pass);
            link.set_flow(Towards::Target, Flow::Pass);
        }
    }

    /// Sends `count` requests to decode nodes at once.
    #[must_use]
    pub fn load(&self, count: usize, chance: &mut Chance) -> Load {
        let from = self.carried();
        let clients = (0..count).map(|_| {
            let node = chance.below(self.decode.len() as u64) as usize;
            self.client(node, chance)
        });
        Load { clients: clients.collect(), from }
    }

    /// Sends `count` requests to one decode node at once.
    #[must_use]
    pub fn load_on(&self, node: usize, count: usize, chance: &mut Chance) -> Load {
        let from = self.carried();
        Load { clients: (0..count).map(|_| self.client(node, chance)).collect(), from }
    }

    fn client(&self, node: usize, chance: &mut Chance) -> Client {
        let request = self.asks.draw(chance);
        let at = &self.decode[node];
        let (complete, asked, watch) = (at.client(), request.clone(), at.watch());
        let thread = std::thread::spawn(move || {
            let idle = Idle::begin([watch]);
            let answer = complete(&asked.prompt, asked.max_tokens);
            (answer, idle.so_far())
        });
        let (limit, asks) = (at.limits().answer, Arc::clone(&self.asks));
        Client { node, request, limit, asks, thread }
    }

    /// Waits for a moment in the traffic of a load that chance picks: between its first messages, in the middle of its bytes, or
    /// at its end.
    pub fn wait_for_moment(&self, load: &Load, chance: &mut Chance) {
        let tokens: usize = load.clients.iter().map(|client| client.request.prompt.len()).sum();
        let bytes = tokens as u64 * BYTES_PER_TOKEN;
        let moment = match chance.below(4) {
            0 => chance.below(4 << 10),
            _ => chance.below(bytes + bytes / 8),
        };
        wait_closely("a moment of the load", || self.carried() >= load.from + moment || load.is_over());
    }

    /// Waits until all links are up and requests travel over them, nothing is held anywhere, and every node has what it had
    /// at first.
    ///
    /// # Panics
    /// If that does not come, or a node has logged at ERROR.
    pub fn settle(&self, chance: &mut Chance) {
        self.wait_until_whole();
        for index in 0..self.decode.len() {
            self.serve_one(index, chance);
        }
        self.wait_until_free();
        let roles = [(&self.prefill, self.at_rest.prefill, "prefill"), (&self.decode, self.at_rest.decode, "decode")];
        for (nodes, at_rest, role) in roles {
            for (index, node) in nodes.iter().enumerate() {
                let what = || format!("{role} {index} has {:?} as at first: {at_rest:?}", Usage::of(node));
                node.wait_within(node.limits().free, &what, || Usage::of(node).fits(at_rest));
            }
        }
    }

    /// Waits until no node holds anything for a request.
    ///
    /// # Panics
    /// If that does not come, or a node has logged at ERROR.
    pub fn wait_until_free(&self) {
        self.decode.iter().enumerate().for_each(|(index, node)| node.wait_until_free(&format!("decode {index}")));
        self.prefill.iter().enumerate().for_each(|(index, node)| node.wait_until_free(&format!("prefill {index}")));
    }

    /// Waits until every decode node has a session with every prefill node, and they with it.
    ///
    /// # Panics
    /// If that does not come.
    pub fn wait_until_whole(&self) {
        let each = usize::from(self.shape.sessions());
        for (nodes, peers, role) in
            [(&self.decode, self.prefill.len(), "decode"), (&self.prefill, self.decode.len(), "prefill")]
        {
            for (index, node) in nodes.iter().enumerate() {
                let live = || node.metric("kvferry_sessions_live", "");
                let what = || format!("{role} {index} has {} sessions: {}", peers * each, live());
                node.wait_within(node.limits().whole, &what, || live() == (peers * each) as f64);
            }
        }
    }

    /// Asks a decode node until an answer's KV came from a prefill node.
    fn serve_one(&self, index: usize, chance: &mut Chance) {
        let node = &self.decode[index];
        let done = || node.metric("kvferry_transfers_done_total", "side=\"receive\"");
        let before = done();
        node.wait_within(node.limits().answer, &|| format!("a request travels to decode {index}"), || {
            let request = Ask::draw(chance);
            let answer = node.complete(&request.prompt, request.max_tokens);
            self.asks.check(&request, &self.reference, answer);
            done() > before
        });
    }
}

/// Requests under way.
pub struct Load {
    clients: Vec<Client>,
    /// Bytes that the links had carried before.
    from: u64,
}

struct Client {
    node: usize,
    request: Ask,
    /// How long its node may wait idle for the answer.
    limit: Duration,
    asks: Arc<Asks>,
    thread: JoinHandle<(Result<Answer, HttpError>, Duration)>,
}

impl Load {
    /// Whether all have their answers.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.clients.iter().all(|client| client.thread.is_finished())
    }

    /// Waits for the answers and compares each with the reference. Clients of `killed` decode nodes may have none.
    ///
    /// # Panics
    /// If an answer is wrong, missing, or came later than the node's deadlines allow.
    pub fn check(self, reference: &Reference, killed: &[usize]) {
        for Client { node, request, limit, asks, thread } in self.clients {
            let (answer, idle) = thread.join().expect("a client does not panic");
            match answer {
                // Its process is gone; whatever it still said must be right.
                Err(HttpError { status: 0, .. }) if killed.contains(&node) => continue,
                answer => asks.check(&request, reference, answer),
            }
            asks.check_idle(idle, limit);
        }
    }
}

fn named(setup: &Setup, role: &str, index: usize) -> Setup {
    setup.clone().env("KVFERRY_ENGINE_ID", &format!("{role}-{index}"))
}

/// K/V of one token of the embedded model: 4 layers, 2 planes, 2 heads of 32 elements of 2 bytes.
const BYTES_PER_TOKEN: u64 = 4 * 2 * 2 * 32 * 2;
