//! Settings of registries and their mirrors, from the files administrators have: `registries.yaml` (one
//! file for all) and `certs.d/<registry>/hosts.toml` (containerd's).

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::{Auth, ImageError, RegistryConfig};

/// Name under which mirrors for every registry are kept.
const ANY: &str = "*";

/// Connection settings for one host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostSettings {
    pub plain_http: bool,
    /// Accept any TLS certificate.
    pub skip_verify: bool,
    /// Certificates in PEM form to trust besides the machine's own.
    pub ca_certificates: Vec<Vec<u8>>,
    /// Credentials for this host when the pod has none. Never sent to another host.
    pub auth: Option<Auth>,
}

/// Where an image may be fetched from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Endpoint {
    pub host: String,
    pub settings: HostSettings,
    /// A stand-in for the registry of the image's name.
    pub mirror: bool,
}

/// Reads a file a setting names.
type Read<'a> = &'a dyn Fn(&Path) -> io::Result<Vec<u8>>;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Yaml {
    #[serde(default)]
    mirrors: BTreeMap<String, YamlMirror>,
    #[serde(default)]
    configs: BTreeMap<String, YamlHost>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct YamlMirror {
    #[serde(default)]
    endpoint: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct YamlHost {
    auth: Option<YamlAuth>,
    tls: Option<YamlTls>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct YamlAuth {
    #[serde(default)]
    username: String,
    #[serde(default)]
    password: String,
    #[serde(default)]
    token: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct YamlTls {
    ca_file: Option<PathBuf>,
    #[serde(default)]
    insecure_skip_verify: bool,
}

#[derive(Deserialize)]
struct Toml {
    server: Option<String>,
    #[serde(default)]
    host: toml::Table,
}

#[derive(Deserialize)]
struct TomlHost {
    /// Absent: everything.
    capabilities: Option<Vec<String>>,
    ca: Option<OneOrMany>,
    #[serde(default)]
    skip_verify: bool,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(PathBuf),
    Many(Vec<PathBuf>),
}

/// `https://host[:port]` with nothing behind it, as host and whether TLS is left out.
fn parse_endpoint(text: &str) -> Result<(String, bool), String> {
    let (plain, rest) = match text.split_once("://") {
        Some(("https", rest)) => (false, rest),
        Some(("http", rest)) => (true, rest),
        Some((scheme, _)) => return Err(format!("{text:?}: scheme {scheme} is not http or https")),
        None => (false, text),
    };
    let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
    let valid = !host.is_empty() && host.chars().all(|c| c.is_ascii_alphanumeric() || ".-:[]_".contains(c));
    if !valid {
        return Err(format!("{text:?} has no usable host"));
    }
    if !matches!(path.trim_end_matches('/'), "" | "v2") {
        return Err(format!("{text:?}: a path behind the host is not supported"));
    }
    Ok((host.to_owned(), plain))
}

impl RegistryConfig {
    /// Takes in the settings of this machine: `registries.yaml` and the directories of `certs.d`, whichever
    /// of them are there.
    pub fn load(&mut self, registries: &Path, certs_d: &Path) -> Result<(), ImageError> {
        let wrong = |path: &Path, why: String| ImageError::invalid(path.display().to_string(), why);
        let read = |path: &Path| std::fs::read(path);
        match std::fs::read_to_string(registries) {
            Ok(text) => self.add_yaml(&text, &read).map_err(|why| wrong(registries, why))?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(ImageError::io("read", registries)(error)),
        }
        for entry in std::fs::read_dir(certs_d).into_iter().flatten().flatten() {
            let (path, name) = (entry.path().join("hosts.toml"), entry.file_name());
            let Ok(text) = std::fs::read_to_string(&path) else { continue };
            let registry = name.to_string_lossy();
            self.add_hosts(&registry, &text, &entry.path(), &read).map_err(|why| wrong(&path, why))?;
        }
        Ok(())
    }

    fn add_yaml(&mut self, text: &str, read: Read<'_>) -> Result<(), String> {
        let yaml: Yaml = serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
        for (host, config) in yaml.configs {
            let settings = self.hosts.entry(host.clone()).or_default();
            if let Some(auth) = config.auth {
                settings.auth = Some(match auth.token.is_empty() {
                    true => Auth::Basic { username: auth.username, password: auth.password },
                    false => Auth::Bearer(auth.token),
                });
            }
            if let Some(tls) = config.tls {
                settings.skip_verify = tls.insecure_skip_verify;
                if let Some(file) = tls.ca_file {
                    let pem = read(&file).map_err(|error| format!("{}: {error}", file.display()))?;
                    settings.ca_certificates.push(pem);
                }
            }
        }
        for (registry, mirror) in yaml.mirrors {
            for endpoint in mirror.endpoint {
                let (host, plain) = parse_endpoint(&endpoint)?;
                self.hosts.entry(host.clone()).or_default().plain_http |= plain;
                self.mirrors.entry(registry.clone()).or_default().push(host);
            }
        }
        Ok(())
    }

    fn add_hosts(&mut self, registry: &str, text: &str, base: &Path, read: Read<'_>) -> Result<(), String> {
        let registry = if registry == "_default" { ANY } else { registry };
        let file: Toml = toml::from_str(text).map_err(|error| error.to_string())?;
        if let Some(server) = file.server {
            let (host, plain) = parse_endpoint(&server)?;
            self.hosts.entry(host).or_default().plain_http |= plain;
        }
        for (endpoint, value) in file.host {
            let (host, plain) = parse_endpoint(&endpoint)?;
            let given: TomlHost = value.try_into().map_err(|error| format!("{endpoint}: {error}"))?;
            let pulls =
                given.capabilities.is_none_or(|all| all.iter().any(|capability| capability == "pull"));
            let settings = self.hosts.entry(host.clone()).or_default();
            settings.plain_http |= plain;
            settings.skip_verify |= given.skip_verify;
            let files = match given.ca {
                None => Vec::new(),
                Some(OneOrMany::One(file)) => vec![file],
                Some(OneOrMany::Many(files)) => files,
            };
            for file in files {
                let path = base.join(file);
                let pem = read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
                settings.ca_certificates.push(pem);
            }
            if pulls && host != registry {
                self.mirrors.entry(registry.to_owned()).or_default().push(host);
            }
        }
        Ok(())
    }

    /// Where to look for an image of `registry`, in order; the registry itself comes last.
    pub(super) fn endpoints(&self, registry: &str) -> Vec<Endpoint> {
        let mirrors = self.mirrors.get(registry).or_else(|| self.mirrors.get(ANY));
        let endpoint = |host: &str, mirror: bool| {
            let mut settings = self.hosts.get(host).cloned().unwrap_or_default();
            settings.plain_http |= self.plain_http.iter().any(|plain| plain == host);
            settings.ca_certificates.extend(self.ca_certificates.iter().cloned());
            Endpoint { host: host.to_owned(), settings, mirror }
        };
        let mut all: Vec<_> = mirrors.into_iter().flatten().map(|host| endpoint(host, true)).collect();
        all.push(endpoint(registry, false));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn show(config: &RegistryConfig, registry: &str) -> String {
        let one = |endpoint: Endpoint| {
            let settings = endpoint.settings;
            let scheme = if settings.plain_http { "http" } else { "https" };
            let mut text = format!("{scheme}://{}", endpoint.host);
            for (set, mark) in [
                (settings.skip_verify, "!"),
                (!settings.ca_certificates.is_empty(), "+ca"),
                (settings.auth.is_some(), "+auth"),
            ] {
                if set {
                    text.push_str(mark);
                }
            }
            text
        };
        config.endpoints(registry).into_iter().map(one).collect::<Vec<_>>().join(" ")
    }

    fn pem(_: &Path) -> io::Result<Vec<u8>> {
        Ok(b"pem".to_vec())
    }

    #[test]
    fn registries_yaml() {
        let mut config = RegistryConfig::default();
        let text = r#"
mirrors:
  docker.io:
    endpoint: ["https://mirror.example:5000", "http://10.0.0.1/v2"]
  "*":
    endpoint: ["https://all.example"]
configs:
  "mirror.example:5000":
    auth: { username: u, password: p }
    tls: { ca_file: /etc/ca.pem }
  "own.example":
    tls: { insecure_skip_verify: true }
"#;
        config.add_yaml(text, &pem).unwrap();
        assert_eq!(
            show(&config, "docker.io"),
            "https://mirror.example:5000+ca+auth http://10.0.0.1 https://docker.io"
        );
        assert_eq!(show(&config, "own.example"), "https://all.example https://own.example!");
    }

    #[test]
    fn hosts_toml() {
        let mut config = RegistryConfig::default();
        let text = r#"
server = "https://registry.example"
[host."http://mirror:5000"]
  capabilities = ["pull", "resolve"]
[host."https://push-only"]
  capabilities = ["push"]
[host."https://other"]
  ca = ["a.pem", "b.pem"]
  skip_verify = true
"#;
        config.add_hosts("registry.example", text, Path::new("/certs"), &pem).unwrap();
        assert_eq!(
            show(&config, "registry.example"),
            "http://mirror:5000 https://other!+ca https://registry.example"
        );
        assert_eq!(show(&config, "elsewhere"), "https://elsewhere");
        let mut any = RegistryConfig::default();
        any.add_hosts("_default", "[host.\"https://m\"]", Path::new("/"), &pem).unwrap();
        assert_eq!(show(&any, "x"), "https://m https://x");
    }

    #[test]
    fn settings_that_make_no_sense() {
        for text in [
            "mirrors: { a: { endpoint: [\"ftp://x\"] } }",
            "mirrors: { a: { endpoint: [\"https://\"] } }",
            "mirrors: { a: { endpoint: [\"https://x/some/path\"] } }",
            "mirrors: 3",
            "mirors: {}",
        ] {
            assert!(RegistryConfig::default().add_yaml(text, &pem).is_err(), "{text}");
        }
        for text in ["host = 1", "[host.\"https://x\"]\nca = 3", "["] {
            assert!(RegistryConfig::default().add_hosts("r", text, Path::new("/"), &pem).is_err(), "{text}");
        }
    }
}
