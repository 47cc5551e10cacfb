//! The table knows every field that the typed crate knows: a field missing here would be dropped silently.

use ferrite_api::schema::{self, Slot, Wire};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The sources of k8s-openapi as cargo finds them; `None` if cargo does not know them.
fn sources() -> Option<PathBuf> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--offline", "--manifest-path"])
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml"))
        .output()
        .ok()?;
    let metadata: ferrite_json::Value = ferrite_json::from_slice(&output.stdout).ok()?;
    let package = metadata["packages"].as_array()?.iter().find(|p| p["name"] == "k8s-openapi")?;
    let root = Path::new(package["manifest_path"].as_str()?).parent()?.join("src/v1_36");
    root.is_dir().then_some(root)
}

fn rust_files(directory: &Path, out: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).expect("a directory of sources") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            rust_files(&path, out);
        } else if path.extension().is_some_and(|e| e == "rs") {
            out.push(path);
        }
    }
}

/// `api/core/v1/pod.rs` is of package `core.v1`.
fn package(root: &Path, file: &Path) -> String {
    let relative = file.strip_prefix(root).expect("a file below the root");
    let parts: Vec<&str> = relative.parent().into_iter().flatten().filter_map(|p| p.to_str()).collect();
    let skipped = ["api", "apimachinery", "apiextensions_apiserver", "kube_aggregator", "pkg", "apis"];
    let named = parts.iter().position(|p| !skipped.contains(p)).unwrap_or(parts.len());
    parts[named..].join(".")
}

#[test]
fn every_field_of_the_typed_crate_is_in_the_table() {
    let root = sources().expect("cargo keeps the sources of k8s-openapi where its manifest says");
    let mut files = Vec::new();
    rust_files(&root, &mut files);
    let (mut checked, mut missing) = (0, Vec::new());
    for file in files {
        let text = std::fs::read_to_string(&file).expect("a source file");
        let Some(name) = text
            .lines()
            .find_map(|l| l.strip_prefix("impl<'de> crate::serde::Deserialize<'de> for "))
            .and_then(|rest| rest.split([' ', '<']).next())
        else {
            continue;
        };
        let fields: Vec<&str> = text
            .lines()
            .filter_map(|l| l.trim().strip_prefix('"')?.split_once("\" => Field::Key_"))
            .map(|(name, _)| name)
            .collect();
        // Lists are generic there, and special scalars have no fields.
        if fields.is_empty() || name == "List" {
            continue;
        }
        let full = format!("{}.{name}", package(&root, &file));
        // The version endpoint's answer is plain JSON without a kind, and a bookmark is part of that crate's client.
        if full == "version.Info" || full == "meta.v1.BookmarkObject" {
            continue;
        }
        let Some(type_) = schema::named(&full) else {
            missing.push(full);
            continue;
        };
        for field in fields {
            checked += 1;
            if type_.field(field).is_none() {
                missing.push(format!("{full}.{field}"));
            }
        }
    }
    assert!(missing.is_empty(), "not in the table: {missing:#?}");
    assert!(checked > 2500, "only {checked} fields were found in the sources");
}

#[test]
fn every_field_has_one_place_on_the_wire() {
    fn collect(wire: &[Wire], out: &mut Vec<usize>) {
        assert!(wire.is_sorted_by(|a, b| a.tag < b.tag), "tags ascend and are unique");
        for Wire { slot, .. } in wire {
            match slot {
                Slot::Field(index) => out.push(usize::from(*index)),
                Slot::Inline(inner) => collect(inner, out),
            }
        }
    }
    for type_ in schema::types() {
        let mut placed = Vec::new();
        collect(type_.wire, &mut placed);
        let unique: BTreeSet<usize> = placed.iter().copied().collect();
        assert_eq!(unique.len(), placed.len(), "{}", type_.name);
        for (index, field) in type_.fields.iter().enumerate() {
            let type_meta = matches!(field.name, "apiVersion" | "kind");
            assert!(unique.contains(&index) || type_meta, "{}.{}", type_.name, field.name);
        }
    }
}

#[test]
fn every_kind_with_items_is_a_list() {
    for ((group, version, kind), type_) in schema::kinds() {
        assert_eq!(schema::kind(group, version, kind), Some(type_));
        assert_eq!(schema::named(type_.name), Some(type_));
        if type_.field("items").is_some() {
            assert!(kind.ends_with("List"), "{kind}");
        }
    }
}
