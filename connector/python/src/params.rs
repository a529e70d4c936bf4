//! What a router says of a request, in the words of the engine's `kv_transfer_params`.
//!
//! | key | leg | meaning |
//! |---|---|---|
//! | `do_remote_decode` | prefill | keep the prompt's KV for a decode engine |
//! | `do_remote_prefill` | decode | fetch it |
//! | `transfer_id` | both | names the hand-over: 32 hexadecimal digits, or any text, which is hashed; prefill draws one if there is none |
//! | `remote_addresses` | decode | where prefill's workers listen, by tensor-parallel rank: `["10.0.0.7:7400"]` |
//! | `remote_host`, `remote_port` | decode | the same, for workers on consecutive ports |
//! | `tp_size` | both | ranks of the other side; prefill takes its own number if there is none |
//!
//! Null is as good as absent, and other keys are left alone: routers send those of other connectors, too.

use std::net::{IpAddr, SocketAddr};

use kvferry::contract::TransferParams;
use kvferry_protocol::TransferId;
use kvferry_transport::PeerAddress;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use sha2::{Digest, Sha256};

use crate::error::BindingError;

/// A request's part in a transfer, and whether this side drew its id.
#[derive(Debug)]
pub(crate) struct Parsed {
    pub(crate) params: TransferParams,
    pub(crate) is_drawn: bool,
}

/// Reads them; `None` for a request that stays here.
pub(crate) fn parse(request: &str, said: &Bound<'_, PyDict>, own_tp_size: u16) -> Result<Option<Parsed>, BindingError> {
    let said = Said { request, said };
    match (said.get::<bool>("do_remote_prefill")?, said.get::<bool>("do_remote_decode")?) {
        (Some(true), Some(true)) => {
            Err(said.refuse("do_remote_prefill and do_remote_decode are both true; a request is of one leg".to_owned()))
        }
        (Some(true), _) => Ok(Some(Parsed { params: said.fetch()?, is_drawn: false })),
        (_, Some(true)) => Ok(Some(said.keep(own_tp_size)?)),
        _ => Ok(None),
    }
}

/// What prefill's engine answers, which the router passes to decode.
pub(crate) fn answer<'py>(
    py: Python<'py>,
    engine_id: &str,
    transfer: TransferId,
    addresses: &[SocketAddr],
    prompt_tokens: u32,
) -> PyResult<Bound<'py, PyDict>> {
    let answer = PyDict::new(py);
    answer.set_item("do_remote_prefill", true)?;
    answer.set_item("do_remote_decode", false)?;
    answer.set_item("transfer_id", transfer.to_string())?;
    answer.set_item("remote_engine_id", engine_id)?;
    if let Some(first) = addresses.first() {
        answer.set_item("remote_host", first.ip().to_string())?;
        answer.set_item("remote_port", first.port())?;
    }
    answer.set_item("remote_addresses", PyList::new(py, addresses.iter().map(ToString::to_string))?)?;
    answer.set_item("tp_size", addresses.len())?;
    answer.set_item("remote_num_tokens", prompt_tokens)?;
    Ok(answer)
}

/// An id that nobody can guess.
pub(crate) fn draw() -> Result<TransferId, BindingError> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(BindingError::Random)?;
    Ok(TransferId::new(u128::from_le_bytes(bytes)))
}

/// Both sides make the same id of the same text.
fn transfer_of(text: &str) -> TransferId {
    if text.len() == 32
        && let Ok(bits) = u128::from_str_radix(text, 16)
    {
        return TransferId::new(bits);
    }
    let hash = Sha256::digest(text.as_bytes());
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&hash[..16]);
    TransferId::new(u128::from_le_bytes(bytes))
}

struct Said<'a, 'py> {
    request: &'a str,
    said: &'a Bound<'py, PyDict>,
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
            Err(_) => Err(self.refuse(format!("{key} has another type, or is out of range"))),
        }
    }

    fn fetch(&self) -> Result<TransferParams, BindingError> {
        let Some(transfer) = self.get::<String>("transfer_id")? else {
            let problem =
                "transfer_id is missing: pass what the prefill engine answered, or give both legs one id".to_owned();
            return Err(self.refuse(problem));
        };
        let from = self.addresses()?.into_iter().map(PeerAddress::Tcp).collect();
        Ok(TransferParams::Fetch { transfer: transfer_of(&transfer), from, ask: Vec::new() })
    }

    fn keep(&self, own_tp_size: u16) -> Result<Parsed, BindingError> {
        let readers = self.get("tp_size")?.unwrap_or(own_tp_size);
        let named = self.get::<String>("transfer_id")?.map(|text| transfer_of(&text));
        let is_drawn = named.is_none();
        let transfer = named.map_or_else(draw, Ok)?;
        Ok(Parsed { params: TransferParams::Keep { transfer, to: None, readers }, is_drawn })
    }

    fn addresses(&self) -> Result<Vec<SocketAddr>, BindingError> {
        if let Some(listed) = self.get::<Vec<String>>("remote_addresses")? {
            let parse = |text: &String| {
                text.parse().map_err(|_| {
                    self.refuse(format!("remote_addresses: {text:?} is not IP:port; names are not looked up"))
                })
            };
            return match listed.is_empty() || listed.len() > MAX_RANKS {
                true => Err(self.refuse(format!("remote_addresses: {} of them; give one for each rank", listed.len()))),
                false => listed.iter().map(parse).collect(),
            };
        }
        let (Some(host), Some(port)) = (self.get::<String>("remote_host")?, self.get::<u16>("remote_port")?) else {
            let problem = "neither remote_addresses nor remote_host and remote_port say where prefill's workers listen";
            return Err(self.refuse(problem.to_owned()));
        };
        let host: IpAddr = host
            .parse()
            .map_err(|_| self.refuse(format!("remote_host: {host:?} is no IP address; names are not looked up")))?;
        let ranks = self.get::<u16>("tp_size")?.unwrap_or(1).max(1);
        let ports = (0..ranks).map(|rank| port.checked_add(rank));
        let ports: Option<Vec<u16>> = ports.collect();
        let ports = ports.ok_or_else(|| self.refuse(format!("remote_port: {ranks} ranks do not fit above {port}")))?;
        Ok(ports.into_iter().map(|port| SocketAddr::new(host, port)).collect())
    }

    fn refuse(&self, problem: String) -> BindingError {
        BindingError::Params { request: self.request.to_owned(), problem }
    }
}

const MAX_RANKS: usize = 1024;
