//! Which of the RDMA cards here register memory of other devices, as GPUs, and by which way.

use std::process::ExitCode;

use kvferry_transport::rdma::{self, RdmaConfig};
use serde::{Deserialize, Serialize};

use super::probes::itself;
use super::root::Root;
use super::row::Row;
use crate::error::{CliError, with_causes};

const NAME: &str = "RDMA device memory";

/// What a card registers, from the process that asked it to the one that tells.
#[derive(Debug, Serialize, Deserialize)]
struct Card {
    device: String,
    /// By which ways, or why by none.
    ways: Result<String, String>,
}

/// Asks the cards in this process, and prints what they say.
pub(crate) fn survey() -> Result<ExitCode, CliError> {
    match rdma::probe(&RdmaConfig::default()) {
        Ok(report) => {
            let mut cards: Vec<Card> = Vec::new();
            for port in report.usable {
                if cards.iter().all(|card| card.device != port.device) {
                    cards.push(Card { device: port.device, ways: port.device_memory.ways() });
                }
            }
            let text = serde_json::to_string(&cards);
            println!("{}", text.map_err(|source| CliError::Json { what: "what RDMA cards register", source })?);
            Ok(ExitCode::SUCCESS)
        }
        Err(error) => {
            eprintln!("{}", with_causes(&error));
            Ok(ExitCode::FAILURE)
        }
    }
}

/// A row for each card that can be used; asked in a process of its own, which a driver's library may take down.
pub(super) fn rows(root: &Root) -> Vec<Row> {
    if root.names("sys/class/infiniband").is_empty() {
        return Vec::new(); // another row says so
    }
    let printed = itself(&["survey-rdma"]);
    rows_of(printed.as_deref().map_err(String::as_str))
}

fn rows_of(printed: Result<&[u8], &str>) -> Vec<Row> {
    const STAGED: &str = "KV of a GPU is staged in host memory";
    let printed = match printed {
        Ok(printed) => printed,
        Err(why) => return vec![Row::note(NAME, format!("no card was asked: {why}"), STAGED)],
    };
    let Ok(cards) = serde_json::from_slice::<Vec<Card>>(printed) else {
        let said = String::from_utf8_lossy(&printed[..printed.len().min(200)]);
        return vec![Row::note(NAME, said, "a driver's library writes into the output: unset its variables for logs")];
    };
    let row = |Card { device, ways }| match ways {
        Ok(ways) => Row::ok(NAME, format!("{device}: {ways}")),
        Err(why) => Row::note(NAME, format!("{device}: none; {why}"), STAGED),
    };
    cards.into_iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::super::row::State;
    use super::*;

    #[test]
    fn each_card_gets_a_row_with_its_ways_or_its_reasons() {
        let cards = [
            Card { device: "mlx5_0".to_owned(), ways: Ok("by a dma-buf".to_owned()) },
            Card { device: "rxe0".to_owned(), ways: Err("dma-buf: no; peer memory: no".to_owned()) },
        ];
        let rows = rows_of(Ok(&serde_json::to_vec(&cards).unwrap()));
        assert_eq!(rows[0], Row::ok(NAME, "mlx5_0: by a dma-buf"));
        assert_eq!((rows[1].state, rows.len()), (State::Note, 2));
        assert!(rows[1].found.starts_with("rxe0: none; dma-buf: no"), "{:?}", rows[1]);
        assert!(rows_of(Err("libibverbs.so.1: not found"))[0].found.contains("not found"));
        assert!(rows_of(Ok(b"libibverbs: Warning"))[0].found.contains("Warning"));
    }
}
