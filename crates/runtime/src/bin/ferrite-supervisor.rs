//! The supervisor alone: what `ferrite` becomes when it is started under this name. Used by tests.

fn main() -> std::process::ExitCode {
    ferrite_runtime::supervisor::main(std::env::args_os())
}
