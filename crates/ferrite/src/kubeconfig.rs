//! The user's kubeconfig: our context is added to it and taken out again, everything else stays as it is.

use ferrite_json::{Map, Value, json};
use std::hash::BuildHasher;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error)]
pub enum KubeconfigError {
    #[error("cannot use the kubeconfig {}", .path.display())]
    Io {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("the kubeconfig {} is not valid YAML ({message}); correct it or set KUBECONFIG to another file", .path.display())]
    Invalid { path: PathBuf, message: String },
}

/// The administrator's access to a cluster.
pub struct Access<'a> {
    pub server: &'a str,
    pub ca: &'a str,
    pub certificate: &'a str,
    pub key: &'a str,
}

/// The file kubectl would write to: the first of `$KUBECONFIG`, else `~/.kube/config`.
pub fn user_file() -> Option<PathBuf> {
    if let Some(list) = std::env::var_os("KUBECONFIG")
        && let Some(first) = std::env::split_paths(&list).find(|p| !p.as_os_str().is_empty())
    {
        return Some(first);
    }
    std::env::home_dir().map(|home| home.join(".kube/config"))
}

/// A kubeconfig with one cluster, user and context, all called `name`.
pub fn standalone(name: &str, access: &Access<'_>) -> Value {
    let mut config = json!({"apiVersion": "v1", "kind": "Config", "preferences": {}});
    add(&mut config, name, access);
    config
}

/// Puts our entries in place of older ones of the same name and makes the context current.
fn add(config: &mut Value, name: &str, access: &Access<'_>) {
    let encode = |pem: &str| {
        use base64::Engine;
        base64::engine::general_purpose::STANDARD.encode(pem)
    };
    put(
        config,
        "clusters",
        name,
        "cluster",
        json!({
            "server": access.server,
            "certificate-authority-data": encode(access.ca),
        }),
    );
    put(
        config,
        "users",
        name,
        "user",
        json!({
            "client-certificate-data": encode(access.certificate),
            "client-key-data": encode(access.key),
        }),
    );
    put(config, "contexts", name, "context", json!({"cluster": name, "user": name}));
    config["current-context"] = name.into();
}

fn put(config: &mut Value, list: &str, name: &str, key: &str, value: Value) {
    let entry = json!({"name": name, key: value});
    match config.get_mut(list).and_then(Value::as_array_mut) {
        None => config[list] = json!([entry]),
        Some(entries) => {
            entries.retain(|e| e["name"] != name);
            entries.push(entry);
        }
    }
}

/// Adds a context to the file. Returns the context that was current before.
pub fn install(path: &Path, name: &str, access: &Access<'_>) -> Result<Option<String>, KubeconfigError> {
    let mut config = read(path)?.unwrap_or_else(|| json!({"apiVersion": "v1", "kind": "Config"}));
    let before =
        config["current-context"].as_str().filter(|c| *c != name && !c.is_empty()).map(str::to_owned);
    add(&mut config, name, access);
    write(path, &config)?;
    Ok(before)
}

/// Takes our entries out. `before` becomes current again when ours still is.
pub fn remove(path: &Path, name: &str, before: Option<&str>) -> Result<(), KubeconfigError> {
    let Some(mut config) = read(path)? else { return Ok(()) };
    for list in ["clusters", "users", "contexts"] {
        if let Some(entries) = config.get_mut(list).and_then(Value::as_array_mut) {
            entries.retain(|e| e["name"] != name);
        }
    }
    if config["current-context"] == name {
        config["current-context"] = before.unwrap_or_default().into();
    }
    let empty = ["clusters", "users", "contexts"]
        .iter()
        .all(|list| config[*list].as_array().is_none_or(Vec::is_empty));
    if empty {
        return std::fs::remove_file(path)
            .map_err(|source| KubeconfigError::Io { path: path.to_owned(), source });
    }
    write(path, &config)
}

fn read(path: &Path) -> Result<Option<Value>, KubeconfigError> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) if text.trim().is_empty() => return Ok(None),
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(KubeconfigError::Io { path: path.to_owned(), source }),
    };
    let invalid = |message: String| KubeconfigError::Invalid { path: path.to_owned(), message };
    let value: Value = serde_saphyr::from_str(&text).map_err(|e| invalid(e.to_string()))?;
    match value {
        Value::Null => Ok(None),
        Value::Object(_) => Ok(Some(value)),
        _ => Err(invalid("it is not a mapping".into())),
    }
}

/// Replaces the file as a whole, with the mode that private keys need.
pub fn write(path: &Path, config: &Value) -> Result<(), KubeconfigError> {
    let io = |source| KubeconfigError::Io { path: path.to_owned(), source };
    // A link to a file kept elsewhere stays a link.
    let target = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    if let Some(parent) = target.parent() {
        std::fs::create_dir_all(parent).map_err(io)?;
    }
    let ordered = order(config);
    let text = serde_saphyr::to_string(&ordered)
        .map_err(|e| KubeconfigError::Invalid { path: path.to_owned(), message: e.to_string() })?;
    // Others may write to the directory: a name nobody can guess, and never a file that is there already.
    let temporary =
        target.with_extension(format!("ferrite-{:016x}", std::hash::RandomState::new().hash_one(0u8)));
    let result = (|| {
        let mut file =
            std::fs::OpenOptions::new().create_new(true).write(true).mode(0o600).open(&temporary)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        std::fs::rename(&temporary, &target)
    })();
    result.map_err(|e| {
        let _ = std::fs::remove_file(&temporary);
        io(e)
    })
}

/// The same content; maps are sorted by name, as kubectl writes them.
fn order(config: &Value) -> Map {
    config.as_object().cloned().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ACCESS: Access<'_> =
        Access { server: "https://127.0.0.1:6443", ca: "CA", certificate: "CRT", key: "KEY" };

    fn load(path: &Path) -> Value {
        read(path).unwrap().unwrap()
    }

    #[test]
    fn what_was_there_stays_and_comes_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config");
        let text = "apiVersion: v1\nkind: Config\ncurrent-context: work\nclusters:\n- name: work\n  cluster: {server: https://work}\ncontexts:\n- name: work\n  context: {cluster: work, user: me}\nusers:\n- name: me\n  user: {token: secret}\n";
        std::fs::write(&path, text).unwrap();
        let original = load(&path);
        let before = install(&path, "ferrite", &ACCESS).unwrap();
        assert_eq!(before.as_deref(), Some("work"));
        let installed = load(&path);
        assert_eq!(installed["current-context"], "ferrite");
        assert_eq!(installed["users"][0], original["users"][0]);
        assert_eq!(installed["clusters"].as_array().unwrap().len(), 2);
        install(&path, "ferrite", &ACCESS).unwrap();
        assert_eq!(load(&path), installed, "installing twice changes nothing");
        remove(&path, "ferrite", before.as_deref()).unwrap();
        assert_eq!(load(&path), original);
    }

    #[test]
    fn a_file_that_is_ours_alone_goes_with_us() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sub/config");
        assert_eq!(install(&path, "ferrite", &ACCESS).unwrap(), None);
        let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&path).unwrap().permissions());
        assert_eq!(mode & 0o777, 0o600);
        remove(&path, "ferrite", None).unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn a_broken_file_is_not_touched() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config");
        std::fs::write(&path, "a: [unclosed").unwrap();
        assert!(install(&path, "ferrite", &ACCESS).is_err());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "a: [unclosed");
    }
}
