//! What a router says of a request, in the words of the engine's `kv_transfer_params`.
//!
//! | key | leg | meaning |
//! |---|---|---|
//! | `do_remote_decode` | prefill | keep the prompt's KV for a decode engine |
//! | `do_remote_prefill` | decode | fetch it |
//! | `transfer_id` | both | names the hand-over, any text of at most 256 bytes; prefill draws one if there is none. On the wire it is hashed together with the prompt, so a leg with another prompt finds nothing under it |
//! | `remote_num_tokens` | decode | prefill's prompt; decode's must have as many tokens |
//! | `remote_prompt` | decode | the digest of prefill's prompt, 32 hexadecimal digits; decode's must be the same. With it prefill can be told that a leg was refused, whose prompt is not known |
//! | `remote_addresses` | decode | where prefill's workers listen, by tensor-parallel rank: `["10.0.0.7:7400"]` |
//! | `remote_host`, `remote_port` | decode | the same, for workers on consecutive ports |
//! | `remote_engine_id` | decode | prefill's engine; nobody else may answer, and a session that it dialled is used |
//! | `tp_size` | both | ranks of the other side, 1 to 1024; prefill takes its own number if there is none. Prefill's answer names prefill's |
//!
//! Null is as good as absent, and other keys are left alone: routers send those of other connectors, too.

use std::net::{IpAddr, SocketAddr};

use kvferry::contract::TransferParams;
use kvferry_protocol::{EngineId, TransferId};
use kvferry_transport::PeerAddress;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use sha2::{Digest, Sha256};

use crate::error::BindingError;
use crate::words::{distance, short};

/// A request's part in a transfer: what the router calls it, and whether this side drew that name.
#[derive(Debug)]
pub(crate) struct Parsed {
    pub(crate) params: TransferParams,
    pub(crate) name: String,
    pub(crate) is_drawn: bool,
}

/// What a prompt is: its tokens, and whatever else decides its KV.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Prompt {
    pub(crate) tokens: u32,
    digest: [u8; 16],
}

impl Prompt {
    /// `more` says in one canonical text what is not in the tokens: an adapter, images.
    pub(crate) fn new(tokens: &[u32], more: &str) -> Self {
        let mut hasher = Sha256::new();
        hasher.update((tokens.len() as u64).to_le_bytes());
        tokens.iter().for_each(|token| hasher.update(token.to_le_bytes()));
        hasher.update(more.as_bytes());
        // Prompts are far shorter than 2^32 tokens.
        Self { tokens: tokens.len() as u32, digest: half(hasher) }
    }

    /// What prefill tells of its prompt, so that decode finds at once that it has another one.
    fn digest(&self) -> String {
        format!("{:032x}", u128::from_be_bytes(self.digest))
    }

    /// The id of a hand-over of this prompt: both sides make the same of the same name and the same prompt, and of nothing else.
    pub(crate) fn transfer(&self, name: &str) -> TransferId {
        transfer_of(self.digest, name)
    }
}

fn transfer_of(prompt: [u8; 16], name: &str) -> TransferId {
    let mut hasher = Sha256::new();
    hasher.update(prompt);
    hasher.update(name.as_bytes());
    TransferId::new(u128::from_le_bytes(half(hasher)))
}

/// The first 128 bits of a hash: enough that no two prompts have the same.
fn half(hasher: Sha256) -> [u8; 16] {
    let hash: [u8; 32] = hasher.finalize().into();
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&hash[..16]);
    bytes
}

/// Reads them; `None` for a request that stays here.
pub(crate) fn parse(
    request: &str,
    said: &Bound<'_, PyDict>,
    prompt: &Prompt,
    own_tp_size: u16,
) -> Result<Option<Parsed>, BindingError> {
    let said = Said { request, said, prompt };
    match (said.get::<bool>("do_remote_prefill")?, said.get::<bool>("do_remote_decode")?) {
        (Some(true), Some(true)) => {
            Err(said.refuse("do_remote_prefill and do_remote_decode are both true; a request is of one leg".to_owned()))
        }
        (Some(true), _) => Ok(Some(said.fetch()?)),
        (_, Some(true)) => Ok(Some(said.keep(own_tp_size)?)),
        _ => Ok(None),
    }
}

/// The transfer that a refused decode leg names, and where it was to come from; `None` if the params do not say that much. `prompt` is the
/// leg's own, which may be another than prefill's or made up: prefill's is believed, if the params tell it.
pub(crate) fn unwanted(request: &str, said: &Bound<'_, PyDict>, prompt: &Prompt) -> Option<TransferParams> {
    let said = Said { request, said, prompt };
    if said.get::<bool>("do_remote_prefill").ok()? != Some(true) {
        return None;
    }
    let name = said.get::<String>("transfer_id").ok()??;
    let transfer = match said.get::<String>("remote_prompt").ok()? {
        Some(digits) => transfer_of(u128::from_str_radix(&digits, 16).ok()?.to_be_bytes(), &name),
        None => prompt.transfer(&name),
    };
    let from = said.addresses().ok()?.into_iter().map(PeerAddress::Tcp).collect();
    let engine = said.engine().ok()?;
    Some(TransferParams::Fetch { transfer, from, engine, ask: Vec::new() })
}

/// The keys of `kv_transfer_params` that speak of a transfer and say no leg, since that is misspelt or missing; none if all is well.
#[pyfunction]
pub(crate) fn keys_without_leg(said: &Bound<'_, PyDict>) -> Vec<String> {
    let is_said = |key: &&str| said.get_item(key).ok().flatten().is_some_and(|value| !value.is_none());
    if LEGS.iter().any(is_said) {
        return Vec::new(); // A leg that is false is one of another request's.
    }
    if !OURS.iter().any(is_said) && !said.keys().iter().any(|key| is_like_a_leg(&key)) {
        return Vec::new(); // Another connector's, or none.
    }
    said.keys().iter().take(SHOWN_KEYS).map(|key| short(&key.to_string())).collect()
}

fn is_like_a_leg(key: &Bound<'_, PyAny>) -> bool {
    const NEAR: usize = 3;
    let key = key.to_string();
    LEGS.iter().any(|leg| key.len().abs_diff(leg.len()) <= NEAR && distance(leg, &key) <= NEAR)
}

/// Whether a refused decode leg may have got another request's params: what they name is then somebody else's.
pub(crate) fn is_of_another(request: &str, said: &Bound<'_, PyDict>, prompt: &Prompt) -> bool {
    Said { request, said, prompt }.is_of_another().unwrap_or(false)
}

fn is_digest(text: &str) -> bool {
    text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// What prefill's engine answers, which the router passes to decode.
pub(crate) fn answer<'py>(
    py: Python<'py>,
    engine_id: &str,
    name: &str,
    addresses: &[SocketAddr],
    prompt: &Prompt,
) -> PyResult<Bound<'py, PyDict>> {
    let answer = PyDict::new(py);
    answer.set_item("do_remote_prefill", true)?;
    answer.set_item("do_remote_decode", false)?;
    answer.set_item("transfer_id", name)?;
    answer.set_item("remote_engine_id", engine_id)?;
    if let Some(first) = addresses.first() {
        answer.set_item("remote_host", first.ip().to_string())?;
        answer.set_item("remote_port", first.port())?;
    }
    answer.set_item("remote_addresses", PyList::new(py, addresses.iter().map(ToString::to_string))?)?;
    answer.set_item("tp_size", addresses.len())?;
    answer.set_item("remote_num_tokens", prompt.tokens)?;
    answer.set_item("remote_prompt", prompt.digest())?;
    Ok(answer)
}

/// A name that nobody can guess.
pub(crate) fn draw() -> Result<String, BindingError> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(BindingError::Random)?;
    Ok(format!("{:032x}", u128::from_le_bytes(bytes)))
}

struct Said<'a, 'py> {
    request: &'a str,
    said: &'a Bound<'py, PyDict>,
    prompt: &'a Prompt,
}

impl<'py> Said<'_, 'py> {
    fn get<T>(&self, key: &str) -> Result<Option<T>, BindingError>
    where
        T: for<'a> FromPyObject<'a, 'py>,
    {
        let value = self.said.get_item(key).map_err(|error| self.refuse(format!("{key}: {error}")))?;
        let Some(value) = value.filter(|value| !value.is_none()) else { return Ok(None) };
        match value.extract() {
            Ok(value) => Ok(Some(value)),
            Err(_) => {
                let wanted = WANTED.iter().find(|(of, _)| *of == key).map_or("another type", |(_, wanted)| wanted);
                let found =
                    value.get_type().name().map_or_else(|_| "something else".to_owned(), |name| name.to_string());
                Err(self.refuse(format!("{key} must be {wanted}; found {found}")))
            }
        }
    }

    fn fetch(&self) -> Result<Parsed, BindingError> {
        let Some(name) = self.name()? else {
            let problem =
                "transfer_id is missing: pass what the prefill engine answered, or give both legs one id".to_owned();
            return Err(self.refuse(problem));
        };
        let ours = self.prompt.tokens;
        if let Some(theirs) = self.get::<u32>("remote_num_tokens")?.filter(|&theirs| theirs != ours) {
            let problem = format!(
                "remote_num_tokens: prefill's prompt has {theirs} tokens, this one {ours}; send both legs one prompt"
            );
            return Err(self.refuse(problem));
        }
        let theirs = self.get::<String>("remote_prompt")?;
        if let Some(theirs) = theirs.as_ref().filter(|theirs| !is_digest(theirs)) {
            let theirs = short(theirs);
            return Err(
                self.refuse(format!("remote_prompt: \"{theirs}\" is not 32 hexadecimal digits, as prefill said it"))
            );
        }
        if theirs.is_some_and(|theirs| theirs != self.prompt.digest()) {
            let problem = "remote_prompt: prefill computed another prompt of this length, or this one with another adapter or \
                           other images; send both legs one prompt";
            return Err(self.refuse(problem.to_owned()));
        }
        let (ranks, addresses) = (self.ranks()?, self.addresses()?);
        if let Some(ranks) = ranks.filter(|&ranks| usize::from(ranks) != addresses.len()) {
            let found = addresses.len();
            return Err(self.refuse(format!("remote_addresses: {found} for tp_size {ranks}; give one for each rank")));
        }
        let from = addresses.into_iter().map(PeerAddress::Tcp).collect();
        let engine = self.engine()?;
        let params = TransferParams::Fetch { transfer: self.prompt.transfer(&name), from, engine, ask: Vec::new() };
        Ok(Parsed { params, name, is_drawn: false })
    }

    fn keep(&self, own_tp_size: u16) -> Result<Parsed, BindingError> {
        let readers = self.ranks()?.unwrap_or(own_tp_size);
        let given = self.name()?;
        let is_drawn = given.is_none();
        let name = given.map_or_else(draw, Ok)?;
        let params = TransferParams::Keep { transfer: self.prompt.transfer(&name), to: None, readers };
        Ok(Parsed { params, name, is_drawn })
    }

    fn engine(&self) -> Result<Option<EngineId>, BindingError> {
        let engine = self.get::<String>("remote_engine_id")?.map(|name| EngineId::new(&name));
        engine.transpose().map_err(|error| self.refuse(format!("remote_engine_id: {error}")))
    }

    /// The other side's tensor-parallel size, if it was said.
    fn ranks(&self) -> Result<Option<u16>, BindingError> {
        let ranks = self.get::<u16>("tp_size")?;
        match ranks.filter(|&ranks| ranks == 0 || usize::from(ranks) > MAX_RANKS) {
            Some(ranks) => Err(self.refuse(format!("tp_size: {ranks} ranks; write 1 to {MAX_RANKS}"))),
            None => Ok(ranks),
        }
    }

    fn addresses(&self) -> Result<Vec<SocketAddr>, BindingError> {
        if let Some(listed) = self.get::<Vec<String>>("remote_addresses")? {
            let parse = |text: &String| {
                text.parse().map_err(|_| {
                    self.refuse(format!(
                        "remote_addresses: \"{}\" is not IP:port; names are not looked up",
                        short(text)
                    ))
                })
            };
            return match listed.is_empty() || listed.len() > MAX_RANKS {
                true => Err(self.refuse(format!("remote_addresses: {} of them; give one for each rank", listed.len()))),
                false => self.checked(listed.iter().map(parse).collect::<Result<_, _>>()?),
            };
        }
        let (Some(host), Some(port)) = (self.get::<String>("remote_host")?, self.get::<u16>("remote_port")?) else {
            let problem = "neither remote_addresses nor remote_host and remote_port say where prefill's workers listen";
            return Err(self.refuse(problem.to_owned()));
        };
        let host = &host;
        let host: IpAddr = host.parse().map_err(|_| {
            self.refuse(format!("remote_host: \"{}\" is no IP address; names are not looked up", short(host)))
        })?;
        let ranks = self.ranks()?.unwrap_or(1);
        let ports = (0..ranks).map(|rank| port.checked_add(rank));
        let ports: Option<Vec<u16>> = ports.collect();
        let ports = ports.ok_or_else(|| self.refuse(format!("remote_port: {ranks} ranks do not fit above {port}")))?;
        self.checked(ports.into_iter().map(|port| SocketAddr::new(host, port)).collect())
    }

    /// Addresses that can be those of an engine's ranks.
    fn checked(&self, addresses: Vec<SocketAddr>) -> Result<Vec<SocketAddr>, BindingError> {
        let is_nobodys = |at: &&SocketAddr| {
            let is_broadcast = matches!(at.ip(), IpAddr::V4(ip) if ip.is_broadcast());
            at.port() == 0 || at.ip().is_unspecified() || at.ip().is_multicast() || is_broadcast
        };
        if let Some(at) = addresses.iter().find(is_nobodys) {
            return Err(
                self.refuse(format!("remote_addresses: nobody can listen on {at}; pass on what prefill answered"))
            );
        }
        let mut seen = std::collections::BTreeSet::new();
        if let Some(at) = addresses.iter().find(|at| !seen.insert(**at)) {
            return Err(self.refuse(format!("remote_addresses: {at} stands there twice; give one for each rank")));
        }
        Ok(addresses)
    }

    fn name(&self) -> Result<Option<String>, BindingError> {
        let name = self.get::<String>("transfer_id")?;
        match name.as_ref().map(String::len) {
            Some(0) => {
                Err(self.refuse("transfer_id is empty: give both legs one that no other request has".to_owned()))
            }
            Some(bytes) if bytes > MAX_NAME_BYTES => {
                Err(self.refuse(format!("transfer_id has {bytes} bytes; give it at most {MAX_NAME_BYTES}")))
            }
            _ => Ok(name),
        }
    }

    /// Whether the params are of another prompt than this one, and so perhaps of another request.
    fn is_of_another(&self) -> Result<bool, BindingError> {
        let theirs = self.get::<String>("remote_prompt")?;
        let tokens = self.get::<u32>("remote_num_tokens")?;
        Ok(theirs.is_some_and(|theirs| theirs != self.prompt.digest())
            || tokens.is_some_and(|tokens| tokens != self.prompt.tokens))
    }

    fn refuse(&self, problem: String) -> BindingError {
        BindingError::Params { request: self.request.to_owned(), problem }
    }
}

const MAX_RANKS: usize = 1024;
/// Of a `transfer_id`.
const MAX_NAME_BYTES: usize = 256;
/// Keys that a warning lists.
const SHOWN_KEYS: usize = 8;
const LEGS: [&str; 2] = ["do_remote_prefill", "do_remote_decode"];
/// Keys that only this connector has, or that say where a prompt's KV is.
const OURS: [&str; 4] = ["transfer_id", "remote_addresses", "remote_prompt", "remote_num_tokens"];
/// What each key must be.
const WANTED: [(&str, &str); 10] = [
    ("do_remote_prefill", "true or false"),
    ("do_remote_decode", "true or false"),
    ("transfer_id", "a text"),
    ("remote_num_tokens", "a whole number"),
    ("remote_prompt", "a text of 32 hexadecimal digits"),
    ("remote_addresses", "a list of texts, one for each rank, such as [\"10.0.0.7:7400\"]"),
    ("remote_host", "a text, an IP address"),
    ("remote_port", "a whole number, 1 to 65535"),
    ("remote_engine_id", "a text"),
    ("tp_size", "a whole number, 1 to 1024"),
];
