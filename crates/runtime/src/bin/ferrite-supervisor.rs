//! The supervisor alone, as `ferrite` runs when it is started under this name. Used by tests.

fn main() -> std::process::ExitCode {
    ferrite_runtime::supervisor::main(std::env::args_os())
}
