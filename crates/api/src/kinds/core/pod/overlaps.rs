//! Files of one volume that lie in each other's way.

use super::warnings::WARNINGS_MAX;
use crate::kinds::common::access::{list, object, text};
use ferrite_json::Value;
use std::collections::BTreeMap;

/// A file of a volume, and where it comes from if the volume has several sources.
#[derive(Debug, Clone, PartialEq, Eq)]
struct File {
    path: String,
    source: String,
}

impl File {
    fn shown(&self) -> String {
        match self.source.as_str() {
            "" => format!("{:?}", self.path),
            source => format!("{:?} ({source})", self.path),
        }
    }
}

/// The warnings about volumes whose files overlap.
pub(super) fn warnings(volumes: &[Value]) -> Vec<String> {
    let mut warnings = Vec::new();
    for volume in volumes {
        let name = text(volume, "name");
        for (kind, shown) in [
            ("configMap", format!("ConfigMap {:?}", text(&volume["configMap"], "name"))),
            ("secret", format!("Secret {:?}", text(&volume["secret"], "secretName"))),
            ("downwardAPI", "DownwardAPI".to_owned()),
        ] {
            warnings.extend(told(name, &shown, &items(&volume[kind], "")));
        }
        let mut files = Vec::new();
        for source in list(&volume["projected"], "sources") {
            if source.as_object().is_none_or(ferrite_json::Map::is_empty) {
                warnings.push(format!("volume {name:?} (Projected) has no sources provided"));
            }
            files.extend(projected(source));
        }
        warnings.extend(told(name, "Projected", &files));
    }
    warnings
}

fn told(volume: &str, kind: &str, files: &[File]) -> Vec<String> {
    let mut told = Vec::new();
    let mut earlier = Earlier::default();
    for (index, file) in files.iter().enumerate() {
        for other in earlier.overlapping(&file.path) {
            if told.len() >= WARNINGS_MAX {
                return told;
            }
            told.push(format!(
                "volume {volume:?} ({kind}): overlapping paths: {} with {}",
                file.shown(),
                files[other].shown()
            ));
        }
        earlier.add(&file.path, index);
    }
    told
}

/// The places of files by their paths.
#[derive(Default)]
struct Earlier<'a>(BTreeMap<&'a str, Vec<usize>>);

impl<'a> Earlier<'a> {
    fn add(&mut self, path: &'a str, index: usize) {
        if is_compared(path) {
            self.0.entry(path).or_default().push(index);
        }
    }

    /// The files that are the same, a directory above the path, or below it, in their order.
    fn overlapping(&self, path: &str) -> Vec<usize> {
        if !is_compared(path) {
            return Vec::new();
        }
        let above = path.match_indices('/').map(|(at, _)| &path[..at]).filter(|above| !above.is_empty());
        let above = above.chain([path]).filter_map(|path| self.0.get(path));
        // In the order of texts, `0` follows the slash.
        let (first, end) = (format!("{path}/"), format!("{path}0"));
        let below = self.0.range(first.as_str()..end.as_str()).map(|(_, places)| places);
        let mut all: Vec<usize> = above.chain(below).flatten().copied().take(WARNINGS_MAX).collect();
        all.sort_unstable();
        all
    }
}

/// A longer path is none of any file system.
fn is_compared(path: &str) -> bool {
    !path.is_empty() && path.len() <= 4096
}

fn file(path: &str, source: impl Into<String>) -> File {
    File { path: path.trim_end_matches('/').to_owned(), source: source.into() }
}

fn items(source: &Value, shown: &str) -> Vec<File> {
    list(source, "items").iter().map(|item| file(text(item, "path"), shown)).collect()
}

fn projected(source: &Value) -> Vec<File> {
    for (kind, shown) in [("configMap", "ConfigMap"), ("secret", "Secret")] {
        if let Some(from) = object(source, kind).filter(|from| !list(from, "items").is_empty()) {
            return items(from, &format!("{shown} {:?}", text(from, "name")));
        }
    }
    if let Some(from) = object(source, "downwardAPI").filter(|from| !list(from, "items").is_empty()) {
        return items(from, "DownwardAPI");
    }
    if let Some(token) = object(source, "serviceAccountToken") {
        return vec![file(text(token, "path"), "ServiceAccountToken")];
    }
    if let Some(bundle) = object(source, "clusterTrustBundle") {
        let name = bundle["name"].as_str().unwrap_or_else(|| text(bundle, "signerName"));
        return vec![file(text(bundle, "path"), format!("ClusterTrustBundle {name:?}"))];
    }
    let certificate = &source["podCertificate"];
    [
        ("certificateChainPath", "PodCertificate chain"),
        ("keyPath", "PodCertificate key"),
        ("credentialBundlePath", "PodCertificate credential bundle"),
    ]
    .into_iter()
    .filter(|(key, _)| !text(certificate, key).is_empty())
    .map(|(key, shown)| file(text(certificate, key), shown))
    .collect()
}

#[cfg(test)]
mod tests {
    use super::warnings;
    use ferrite_json::json;

    #[test]
    fn files_in_each_others_way() {
        for (volume, expected) in [
            (
                json!({"name": "v", "configMap": {"name": "c", "items": [{"path": "a"}, {"path": "b"}]}}),
                vec![],
            ),
            (
                json!({"name": "v", "configMap": {"name": "c", "items": [{"path": "a/b"}, {"path": "a/"}]}}),
                vec![r#"volume "v" (ConfigMap "c"): overlapping paths: "a" with "a/b""#],
            ),
            (
                json!({"name": "v", "secret": {"secretName": "s", "items": [{"path": "ab"}, {"path": "a"}]}}),
                vec![],
            ),
            (
                json!({"name": "v", "projected": {"sources": [
                    {}, {"serviceAccountToken": {"path": "t"}}, {"downwardAPI": {"items": [{"path": "t"}]}}]}}),
                vec![
                    r#"volume "v" (Projected) has no sources provided"#,
                    r#"volume "v" (Projected): overlapping paths: "t" (DownwardAPI) with "t" (ServiceAccountToken)"#,
                ],
            ),
        ] {
            assert_eq!(warnings(&[volume]), expected);
        }
    }
}
