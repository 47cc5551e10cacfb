//! A container's environment: service variables, `envFrom`, then `env` with references expanded.

use super::env_file::{self, EnvFileError};
use super::expand::expand;
use super::fields::{self, Addresses, FieldError, NodeLimits};
use k8s_openapi::api::core::v1::{Container, EnvVar, Pod, Service};
use std::collections::{BTreeMap, BTreeSet};

/// ConfigMaps and Secrets the environment refers to, fetched beforehand. Values are bytes as stored.
#[derive(Debug, Default)]
pub(crate) struct EnvSources {
    pub config_maps: BTreeMap<String, BTreeMap<String, Vec<u8>>>,
    pub secrets: BTreeMap<String, BTreeMap<String, Vec<u8>>>,
    pub files: EnvFiles,
}

/// Files of variables by their volume and path.
pub(crate) type EnvFiles = BTreeMap<(String, String), Vec<u8>>;

/// The files that a container's environment refers to: volume and path.
pub(crate) fn file_references(container: &Container) -> BTreeSet<(String, String)> {
    let from = container.env.iter().flatten().filter_map(|e| e.value_from.as_ref());
    from.filter_map(|from| from.file_key_ref.as_ref())
        .map(|r| (r.volume_name.clone(), r.path.clone()))
        .collect()
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum EnvError {
    #[error("{kind} \"{name}\" not found")]
    Missing { kind: &'static str, name: String },
    #[error("couldn't find key {key} in {kind} {namespace}/{name}")]
    MissingKey { kind: &'static str, namespace: String, name: String, key: String },
    #[error("the value of key {key} in {kind} {name} is not text")]
    NotText { kind: &'static str, name: String, key: String },
    #[error("couldn't parse env file {path:?} of volume {volume:?}: {problem}")]
    File { volume: String, path: String, problem: EnvFileError },
    #[error("environment variable key {key:?} not found in file {path:?} of volume {volume:?}")]
    NoFileKey { volume: String, path: String, key: String },
    #[error(transparent)]
    Field(#[from] FieldError),
}

/// Names of the ConfigMaps and Secrets a container's environment refers to.
pub(crate) fn references(container: &Container) -> (Vec<String>, Vec<String>) {
    let (mut maps, mut secrets) = (Vec::new(), Vec::new());
    for source in container.env_from.iter().flatten() {
        maps.extend(source.config_map_ref.as_ref().map(|r| r.name.clone()));
        secrets.extend(source.secret_ref.as_ref().map(|r| r.name.clone()));
    }
    for from in container.env.iter().flatten().filter_map(|e| e.value_from.as_ref()) {
        maps.extend(from.config_map_key_ref.as_ref().map(|r| r.name.clone()));
        secrets.extend(from.secret_key_ref.as_ref().map(|r| r.name.clone()));
    }
    (maps, secrets)
}

pub(crate) struct EnvInputs<'a> {
    pub pod: &'a Pod,
    pub container: &'a Container,
    pub services: &'a BTreeMap<String, String>,
    pub sources: &'a EnvSources,
    pub addresses: &'a Addresses,
    pub node: &'a NodeLimits,
}

/// The environment, in the order in which it was declared; a later variable of a name replaces an earlier.
pub(crate) fn environment(inputs: &EnvInputs<'_>) -> Result<Vec<(String, String)>, EnvError> {
    let mut out = Ordered::default();
    for source in inputs.container.env_from.iter().flatten() {
        let prefix = source.prefix.as_deref().unwrap_or_default();
        let (kind, name, optional, known) = match (&source.config_map_ref, &source.secret_ref) {
            (Some(r), _) => ("configmap", &r.name, r.optional, &inputs.sources.config_maps),
            (_, Some(r)) => ("secret", &r.name, r.optional, &inputs.sources.secrets),
            _ => continue,
        };
        match known.get(name) {
            Some(data) => {
                for (key, value) in data {
                    // An entry that cannot be a variable is left out, as upstream does.
                    if let Ok(text) = std::str::from_utf8(value)
                        && !key.contains('=')
                        && !text.contains('\0')
                    {
                        out.set(format!("{prefix}{key}"), text.to_string());
                    }
                }
            }
            None if optional == Some(true) => {}
            None => return Err(EnvError::Missing { kind, name: name.clone() }),
        }
    }
    for var in inputs.container.env.iter().flatten() {
        if let Some(value) = value_of(inputs, var, &out)? {
            out.set(var.name.clone(), value);
        }
    }
    // Declared variables win over the service ones, which come last.
    for (name, value) in inputs.services {
        if out.get(name).is_none() {
            out.set(name.clone(), value.clone());
        }
    }
    Ok(out.list)
}

fn value_of(inputs: &EnvInputs<'_>, var: &EnvVar, so_far: &Ordered) -> Result<Option<String>, EnvError> {
    let Some(from) = &var.value_from else {
        let text = var.value.as_deref().unwrap_or_default();
        let lookup = |name: &str| so_far.get(name).or_else(|| inputs.services.get(name).cloned());
        return Ok(Some(expand(text, lookup)));
    };
    if let Some(r) = &from.field_ref {
        return Ok(Some(fields::field(inputs.pod, &r.field_path, inputs.addresses)?));
    }
    if let Some(r) = &from.resource_field_ref {
        return Ok(Some(fields::resource(inputs.pod, Some(&inputs.container.name), r, inputs.node)?));
    }
    if let Some(r) = &from.file_key_ref {
        let (volume, path) = (r.volume_name.clone(), r.path.clone());
        let text = inputs.sources.files.get(&(volume.clone(), path.clone())).map_or(&[][..], Vec::as_slice);
        return match env_file::value(text, &r.key) {
            Ok(Some(value)) => Ok(Some(value)),
            Ok(None) if r.optional == Some(true) => Ok(None),
            Ok(None) => Err(EnvError::NoFileKey { volume, path, key: r.key.clone() }),
            Err(problem) => Err(EnvError::File { volume, path, problem }),
        };
    }
    let (kind, shown, name, key, optional, known) = if let Some(r) = &from.config_map_key_ref {
        ("configmap", "ConfigMap", &r.name, &r.key, r.optional, &inputs.sources.config_maps)
    } else if let Some(r) = &from.secret_key_ref {
        ("secret", "Secret", &r.name, &r.key, r.optional, &inputs.sources.secrets)
    } else {
        return Ok(Some(String::new()));
    };
    let Some(data) = known.get(name) else {
        if optional == Some(true) {
            return Ok(None);
        }
        return Err(EnvError::Missing { kind, name: name.clone() });
    };
    let Some(value) = data.get(key) else {
        if optional == Some(true) {
            return Ok(None);
        }
        let namespace = inputs.pod.metadata.namespace.clone().unwrap_or_default();
        return Err(EnvError::MissingKey { kind: shown, namespace, name: name.clone(), key: key.clone() });
    };
    match std::str::from_utf8(value) {
        Ok(text) if !text.contains('\0') => Ok(Some(text.to_string())),
        _ => Err(EnvError::NotText { kind: shown, name: name.clone(), key: key.clone() }),
    }
}

#[derive(Default)]
struct Ordered {
    list: Vec<(String, String)>,
}

impl Ordered {
    fn get(&self, name: &str) -> Option<String> {
        self.list.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone())
    }

    fn set(&mut self, name: String, value: String) {
        match self.list.iter_mut().find(|(n, _)| *n == name) {
            Some(slot) => slot.1 = value,
            None => self.list.push((name, value)),
        }
    }
}

/// Where pods reach the API server when no Service says so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ApiAddress {
    pub host: String,
    pub port: u16,
}

/// Variables for the services a pod sees: those of its namespace (unless it wants no links) and the API's.
pub(crate) fn service_variables(
    services: &[std::sync::Arc<Service>],
    namespace: &str,
    links: bool,
    api: Option<&ApiAddress>,
) -> BTreeMap<String, String> {
    let mut out = BTreeMap::new();
    let mut api_seen = false;
    for service in services {
        let name = service.metadata.name.as_deref().unwrap_or_default();
        let service_namespace = service.metadata.namespace.as_deref().unwrap_or_default();
        let is_api = name == "kubernetes" && service_namespace == "default";
        let linked = links && service_namespace == namespace;
        if !is_api && !linked {
            continue;
        }
        let Some(spec) = &service.spec else { continue };
        let Some(ip) = spec.cluster_ip.as_deref().filter(|ip| !ip.is_empty() && *ip != "None") else {
            continue;
        };
        let ports: Vec<Port<'_>> = spec
            .ports
            .iter()
            .flatten()
            .map(|p| Port {
                name: p.name.as_deref().unwrap_or_default(),
                port: p.port,
                protocol: p.protocol.as_deref().unwrap_or("TCP"),
            })
            .collect();
        // The namespace's own service of that name wins over the API's.
        if is_api && namespace != "default" && links && out.contains_key("KUBERNETES_SERVICE_HOST") {
            continue;
        }
        api_seen |= is_api;
        describe(&mut out, name, ip, &ports);
    }
    if let Some(api) = api.filter(|_| !api_seen) {
        let port = Port { name: "https", port: i32::from(api.port), protocol: "TCP" };
        describe(&mut out, "kubernetes", &api.host, &[port]);
    }
    out
}

struct Port<'a> {
    name: &'a str,
    port: i32,
    protocol: &'a str,
}

fn describe(out: &mut BTreeMap<String, String>, service: &str, ip: &str, ports: &[Port<'_>]) {
    let upper = |s: &str| s.replace('-', "_").to_uppercase();
    let prefix = upper(service);
    let host = if ip.contains(':') { format!("[{ip}]") } else { ip.to_string() };
    let Some(first) = ports.first() else { return };
    out.insert(format!("{prefix}_SERVICE_HOST"), ip.to_string());
    out.insert(format!("{prefix}_SERVICE_PORT"), first.port.to_string());
    for p in ports.iter().filter(|p| !p.name.is_empty()) {
        out.insert(format!("{prefix}_SERVICE_PORT_{}", upper(p.name)), p.port.to_string());
    }
    for (i, p) in ports.iter().enumerate() {
        let protocol = p.protocol.to_lowercase();
        let url = format!("{protocol}://{host}:{}", p.port);
        if i == 0 {
            out.insert(format!("{prefix}_PORT"), url.clone());
        }
        let base = format!("{prefix}_PORT_{}_{}", p.port, p.protocol.to_uppercase());
        out.insert(base.clone(), url);
        out.insert(format!("{base}_PROTO"), protocol);
        out.insert(format!("{base}_PORT"), p.port.to_string());
        out.insert(format!("{base}_ADDR"), ip.to_string());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::{Value, json};
    use std::sync::Arc;

    fn run(container: Value) -> Result<Vec<(String, String)>, EnvError> {
        let pod: Pod = ferrite_json::from_value(json!({
            "metadata": {"name": "p", "namespace": "n"}, "spec": {"containers": [container.clone()]}
        }))
        .unwrap();
        let container: Container = ferrite_json::from_value(container).unwrap();
        let data = |pairs: &[(&str, &str)]| {
            pairs.iter().map(|(k, v)| (k.to_string(), v.as_bytes().to_vec())).collect::<BTreeMap<_, _>>()
        };
        let sources = EnvSources {
            config_maps: BTreeMap::from([("cm".to_string(), data(&[("K", "v"), ("B", "w")]))]),
            secrets: BTreeMap::from([("s".to_string(), data(&[("PW", "x")]))]),
            files: BTreeMap::from([(("v".to_string(), "f".to_string()), b"A='1'".to_vec())]),
        };
        environment(&EnvInputs {
            pod: &pod,
            container: &container,
            services: &BTreeMap::from([("DB_SERVICE_HOST".to_string(), "10.0.0.9".to_string())]),
            sources: &sources,
            addresses: &Addresses::default(),
            node: &NodeLimits::default(),
        })
    }

    fn shown(result: Result<Vec<(String, String)>, EnvError>) -> String {
        match result {
            Ok(list) => list.iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>().join(" "),
            Err(e) => format!("error: {e}"),
        }
    }

    #[test]
    fn environments() {
        for (container, expected) in [
            (json!({"name": "c"}), "DB_SERVICE_HOST=10.0.0.9"),
            (
                json!({"name": "c", "env": [{"name": "A", "value": "1"}, {"name": "C", "value": "$(A)$(DB_SERVICE_HOST)$(X)"}]}),
                "A=1 C=110.0.0.9$(X) DB_SERVICE_HOST=10.0.0.9",
            ),
            (
                json!({"name": "c", "envFrom": [{"prefix": "P_", "configMapRef": {"name": "cm"}}, {"secretRef": {"name": "s"}}],
                       "env": [{"name": "P_K", "value": "mine"}]}),
                "P_B=w P_K=mine PW=x DB_SERVICE_HOST=10.0.0.9",
            ),
            (
                json!({"name": "c", "env": [{"name": "A", "valueFrom": {"configMapKeyRef": {"name": "cm", "key": "K"}}},
                                           {"name": "O", "valueFrom": {"secretKeyRef": {"name": "no", "key": "K", "optional": true}}}]}),
                "A=v DB_SERVICE_HOST=10.0.0.9",
            ),
            (
                json!({"name": "c", "env": [{"name": "A", "valueFrom": {"configMapKeyRef": {"name": "no", "key": "K"}}}]}),
                "error: configmap \"no\" not found",
            ),
            (
                json!({"name": "c", "env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "no"}}}]}),
                "error: couldn't find key no in Secret n/s",
            ),
            (
                json!({"name": "c", "env": [{"name": "A", "valueFrom": {"fileKeyRef": {"volumeName": "v", "path": "p", "key": "k"}}}]}),
                "error: environment variable key \"k\" not found in file \"p\" of volume \"v\"",
            ),
            (
                json!({"name": "c", "env": [
                    {"name": "B", "valueFrom": {"fileKeyRef": {"volumeName": "v", "path": "f", "key": "A"}}},
                    {"name": "C", "valueFrom": {"fileKeyRef":
                        {"volumeName": "v", "path": "f", "key": "none", "optional": true}}},
                ]}),
                "B=1 DB_SERVICE_HOST=10.0.0.9",
            ),
            (
                json!({"name": "c", "env": [{"name": "DB_SERVICE_HOST", "value": "own"}]}),
                "DB_SERVICE_HOST=own",
            ),
        ] {
            assert_eq!(shown(run(container.clone())), expected, "{container}");
        }
    }

    #[test]
    fn services_become_variables() {
        let service = |namespace: &str, name: &str, ip: &str| {
            Arc::new(
                ferrite_json::from_value::<Service>(json!({
                    "metadata": {"name": name, "namespace": namespace},
                    "spec": {"clusterIP": ip, "ports": [{"name": "web-ui", "port": 80}]},
                }))
                .unwrap(),
            )
        };
        let services =
            [service("n", "my-db", "10.0.0.5"), service("other", "x", "10.0.0.6"), service("n", "h", "None")];
        let api = ApiAddress { host: "10.96.0.1".into(), port: 443 };
        let all = service_variables(&services, "n", true, Some(&api));
        assert_eq!(all["MY_DB_SERVICE_HOST"], "10.0.0.5");
        assert_eq!(all["MY_DB_SERVICE_PORT_WEB_UI"], "80");
        assert_eq!(all["MY_DB_PORT_80_TCP"], "tcp://10.0.0.5:80");
        assert_eq!(all["KUBERNETES_SERVICE_PORT_HTTPS"], "443");
        assert!(!all.contains_key("X_SERVICE_HOST") && !all.contains_key("H_SERVICE_HOST"));
        let none = service_variables(&services, "n", false, Some(&api));
        assert!(!none.contains_key("MY_DB_SERVICE_HOST") && none.contains_key("KUBERNETES_SERVICE_HOST"));
    }
}
