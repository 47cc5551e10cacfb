//! Commands for maintainers.

mod bench;
mod fuzz;
mod policy;
mod schema;
mod test;
mod unused;

use std::process::ExitCode;

/// A command: its name, its arguments, its description, and the function that runs it with them.
struct Row {
    name: &'static str,
    arguments: &'static str,
    what: &'static str,
    run: fn(&[String]) -> Result<(), String>,
}

const COMMANDS: &[Row] = &[
    Row {
        name: "test",
        arguments: "[--install] [--quick]",
        what: "formatting, dependency policy, lints, documentation, unit tests and, unless quick, end-to-end tests and attacks",
        run: test::run,
    },
    Row {
        name: "bench",
        arguments: "[cluster] [controllers] [network] [runtime] [scheduler] [server] [store]",
        what: "times and memory of the release build, beside others where they are installed",
        run: bench::run,
    },
    Row {
        name: "fuzz",
        arguments: "<target> [seconds] | --list",
        what: "hunt for inputs that break a decoder; needs a C++ compiler",
        run: fuzz::run,
    },
    Row {
        name: "schema",
        arguments: "<checkout>",
        what: "rewrite crates/api/schema/types.tsv from a checkout of kubernetes/kubernetes",
        run: |arguments| match arguments {
            [checkout] => schema::run(checkout),
            _ => Err("the directory of a checkout is needed".into()),
        },
    },
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let row = arguments.first().and_then(|name| COMMANDS.iter().find(|row| row.name == name));
    let Some(row) = row else {
        eprintln!("usage: cargo xtask <command>");
        for row in COMMANDS {
            eprintln!("  {} {}\n      {}", row.name, row.arguments, row.what);
        }
        return ExitCode::from(2);
    };
    match (row.run)(&arguments[1..]) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("xtask: {message}");
            ExitCode::FAILURE
        }
    }
}
