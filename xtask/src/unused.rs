//! Dependencies that a crate declares and never names.

use serde_json::Value;
use std::fs;
use std::path::Path;

/// Code that a build script makes uses these.
const OF_GENERATED_CODE: &[&str] = &["prost", "tonic-prost"];

/// Checks every package of the workspace, by cargo's report on them.
pub fn check(metadata: &Value) -> Result<(), String> {
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let mut problems = Vec::new();
    for package in packages.filter(|package| package["source"].is_null()) {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let manifest = text(&package["manifest_path"]);
        let directory = Path::new(&manifest).parent().ok_or("a manifest is in no directory")?;
        let mut source = String::new();
        for part in ["src", "tests", "benches", "examples", "build.rs"] {
            collect(&directory.join(part), &mut source)?;
        }
        let generates = directory.join("build.rs").exists();
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let name = text(&dependency["name"]);
            let is_generated = generates && OF_GENERATED_CODE.contains(&name.as_str());
            if name != text(&package["name"]) && !is_generated && !names(&source, &name.replace('-', "_")) {
                problems.push(format!("{} does not use {name}", text(&package["name"])));
            }
        }
    }
    match problems.is_empty() {
        true => Ok(()),
        false => Err(format!("unused dependencies:\n{}", problems.join("\n"))),
    }
}

/// Returns true if a text has the identifier as a word of its own.
fn names(text: &str, identifier: &str) -> bool {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(identifier)
        .any(|(at, _)| !text[..at].ends_with(is_word) && !text[at + identifier.len()..].starts_with(is_word))
}

fn collect(path: &Path, out: &mut String) -> Result<(), String> {
    let failed = |e| format!("cannot read {}: {e}", path.display());
    if path.is_dir() {
        for entry in fs::read_dir(path).map_err(failed)? {
            collect(&entry.map_err(failed)?.path(), out)?;
        }
    } else if path.extension().is_some_and(|extension| extension == "rs") && path.is_file() {
        out.push_str(&fs::read_to_string(path).map_err(failed)?);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words() {
        for (text, found) in [
            ("use serde::Serialize;", true),
            ("#[serde(default)]", true),
            ("use serde_json::Value;", false),
            ("let my_serde = 1;", false),
            ("", false),
        ] {
            assert_eq!(names(text, "serde"), found, "{text}");
        }
    }
}
