//! Samples of one request (`n` > 1): the engine makes a request of each, which share the prompt and the params.
//!
//! The first hands the prompt over; the others say the same to the router, since it hears of one of them only, whichever ends last. Source:
//! vLLM `v1/engine/parallel_sampling.py`: sample i of a request is named `i_` and that request's id.

use std::collections::{BTreeMap, VecDeque};

use kvferry::contract::RequestId;

use crate::params::Prompt;

/// The requests whose samples may still come, and the samples that wait for their end.
#[derive(Debug, Default)]
pub(crate) struct Samples {
    /// By the request's id, oldest first.
    first: VecDeque<(String, First)>,
    others: BTreeMap<RequestId, String>,
}

/// The sample that hands the prompt over.
#[derive(Debug)]
struct First {
    id: RequestId,
    /// What the router calls the transfer.
    name: String,
    prompt: Prompt,
}

impl Samples {
    /// Whether a request is to hand its prompt over itself, under this name: it is no sample, or the first one.
    pub(crate) fn is_first(&mut self, id: &RequestId, prompt: &Prompt, name: &str) -> bool {
        let Some(parent) = parent_of(id) else { return true };
        if let Some((_, first)) = self.first.iter().find(|(of, _)| of == parent)
            && first.id != *id
            && first.prompt == *prompt
        {
            self.others.insert(id.clone(), parent.to_owned());
            return false;
        }
        // One id may come again, after its request is over.
        self.first.retain(|(of, _)| of != parent);
        if self.first.len() >= REMEMBERED {
            self.first.pop_front();
        }
        let first = First { id: id.clone(), name: name.to_owned(), prompt: prompt.clone() };
        self.first.push_back((parent.to_owned(), first));
        true
    }

    /// The first sample's transfer goes by another name.
    pub(crate) fn renamed(&mut self, id: &RequestId, name: &str) {
        for (_, first) in self.first.iter_mut().filter(|(_, first)| first.id == *id) {
            name.clone_into(&mut first.name);
        }
    }

    /// Nothing will be handed over under a first sample's name: the others must not tell it any more.
    pub(crate) fn spent(&mut self, id: &RequestId) {
        self.first.retain(|(_, first)| first.id != *id);
    }

    /// A request ended; if it is a sample that hands nothing over, the name and the prompt of the first one.
    pub(crate) fn ended(&mut self, id: &RequestId) -> Option<(String, Prompt)> {
        let parent = self.others.remove(id)?;
        let (_, first) = self.first.iter().find(|(of, _)| *of == parent)?;
        Some((first.name.clone(), first.prompt.clone()))
    }
}

/// The request that this is a sample of, if its id is one of a sample.
fn parent_of(id: &RequestId) -> Option<&str> {
    let (index, parent) = id.as_str().split_once('_')?;
    (!index.is_empty() && index.bytes().all(|byte| byte.is_ascii_digit())).then_some(parent)
}

/// Samples come together, and end within seconds.
const REMEMBERED: usize = 1024;
