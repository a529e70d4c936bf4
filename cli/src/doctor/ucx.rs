//! What UCX offers here.

use std::process::ExitCode;

use kvferry_transport::ucx::{self, UcxConfig};
use serde::{Deserialize, Serialize};

use super::probes::itself;
use super::row::Row;
use crate::error::{CliError, with_causes};

const NAME: &str = "UCX";

/// What a survey tells, from the process that made it to the one that asked.
#[derive(Debug, Serialize, Deserialize)]
struct Facts {
    library: String,
    version: String,
    transports: Vec<String>,
    memory_kinds: Vec<String>,
    notes: Vec<String>,
}

/// Starts UCX in this process and prints what it offers.
pub(crate) fn survey() -> Result<ExitCode, CliError> {
    match ucx::survey(&UcxConfig::default()) {
        Ok(found) => {
            let facts = Facts {
                library: found.library,
                version: found.version,
                transports: found.transports,
                memory_kinds: found.memory_kinds,
                notes: found.notes,
            };
            let text = serde_json::to_string(&facts);
            println!("{}", text.map_err(|source| CliError::Json { what: "what UCX offers", source })?);
            Ok(ExitCode::SUCCESS)
        }
        Err(error) => {
            eprintln!("{}", with_causes(&error));
            Ok(ExitCode::FAILURE)
        }
    }
}

/// Asks a process of its own, which UCX may take down.
pub(super) fn row() -> Row {
    let printed = itself(&["survey-ucx"]);
    row_of(printed.as_deref().map_err(String::as_str))
}

fn row_of(printed: Result<&[u8], &str>) -> Row {
    let printed = match printed {
        Ok(printed) => printed,
        Err(why) => return Row::note(NAME, why, "the transport ucx needs UCX 1.13 or later: apt-get install libucx0"),
    };
    let Ok(facts) = serde_json::from_slice::<Facts>(printed) else {
        let mend = "UCX writes into the output: unset UCX_LOG_LEVEL and UCX_LOG_FILE";
        return Row::note(NAME, String::from_utf8_lossy(&printed[..printed.len().min(200)]), mend);
    };
    let (transports, memory) = (facts.transports.join(", "), facts.memory_kinds.join(", "));
    let found = format!("{} of {}; transports {transports}; memory {memory}", facts.version, facts.library);
    match facts.notes.is_empty() {
        true => Row::ok(NAME, found),
        false => Row::note(NAME, found, facts.notes.join("; ")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::row::State;
    use super::*;

    #[test]
    fn a_survey_becomes_a_row_with_its_notes() {
        let facts = |notes: &[&str]| Facts {
            library: "libucp.so.0".to_owned(),
            version: "1.13.1".to_owned(),
            transports: vec!["rc_verbs".to_owned(), "tcp".to_owned()],
            memory_kinds: vec!["host".to_owned()],
            notes: notes.iter().map(|&note| note.to_owned()).collect(),
        };
        let row = |notes: &[&str]| row_of(Ok(&serde_json::to_vec(&facts(notes)).unwrap()));
        let found = "1.13.1 of libucp.so.0; transports rc_verbs, tcp; memory host";
        assert_eq!(row(&[]), Row::ok(NAME, found));
        assert_eq!(row(&["not used: cma", "slow"]), Row::note(NAME, found, "not used: cma; slow"));
        assert_eq!(row_of(Err("libucp.so.0: not found")).state, State::Note);
        assert!(row_of(Ok(b"[ucx] WARN")).mend.unwrap().contains("UCX_LOG_LEVEL"));
    }
}
