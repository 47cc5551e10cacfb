//! `cargo xtask bench`: numbers of the release build.

pub fn run(_arguments: &[String]) -> Result<(), String> {
    crate::test::cargo(&["bench", "--package", "ferrite", "--bench", "cluster"])?;
    crate::test::cargo(&["bench", "--package", "ferrite-apiserver", "--bench", "server"])
}
