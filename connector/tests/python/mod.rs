//! A script beside a test: each question a line of JSON, and so is each answer.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::Value;

pub(crate) struct Python {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Python {
    /// Starts a script of the tests' folder with the Python that a variable of the environment names.
    pub(crate) fn start(variable: &str, what_it_has: &str, script: &str) -> Self {
        let python = std::env::var(variable).unwrap_or_else(|_| panic!("{variable} names a Python with {what_it_has}"));
        let script = format!("{}/tests/{script}", env!("CARGO_MANIFEST_DIR"));
        let mut child = Command::new(python).arg(script).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (to, from) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, to, from }
    }

    pub(crate) fn ask(&mut self, question: &Value) -> Value {
        writeln!(self.to, "{question}").unwrap();
        let mut answer = String::new();
        self.from.read_line(&mut answer).unwrap();
        serde_json::from_str(&answer).unwrap_or_else(|_| panic!("the reference answers {question}, and not {answer:?}"))
    }

    pub(crate) fn stop(self) {
        let Self { mut child, to, .. } = self;
        drop(to);
        assert!(child.wait().unwrap().success());
    }
}
