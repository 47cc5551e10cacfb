//! The kubelet's settings: defaults, then the configuration file, then its drop-ins, then flags.

use super::table::SETTINGS;
use ferrite_component::{FeatureGates, GateError, GoDuration, nearest};
use ferrite_json::{Value, json};
use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

const API_VERSION: &str = "kubelet.config.k8s.io/v1beta1";
const KIND: &str = "KubeletConfiguration";
/// A larger file is no configuration.
const MAX_BYTES: u64 = 1 << 20;
/// Files of a drop-in directory.
const MAX_FILES: usize = 1000;

/// The form of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    Bool,
    /// Zero stands for the default.
    Int,
    /// Zero is a value.
    OptionalInt,
    /// The empty text stands for the default.
    Text,
    /// The empty text is a value.
    OptionalText,
    Duration,
    /// A duration that may be negative.
    SignedDuration,
    Texts,
    /// A map of texts; as a flag `a=b,c=d`.
    Map,
    /// A map of texts; as a flag `a<b,c<d`.
    Thresholds,
    /// A map of lists of texts; as a flag `a:b,c:d`.
    Lists,
    /// A map of booleans; as a flag `a=true,b=false`.
    Gates,
    /// A list of taints; as a flag `a=b:NoSchedule,c:NoExecute`.
    Taints,
    /// A list of reservations of NUMA nodes; as a flag `0:memory=1Gi,hugepages-2Mi=2Gi;1:memory=1Gi`.
    ReservedMemory,
    /// More than zero, and not more than one.
    Fraction,
    /// A form that is not looked into; as a flag a text.
    Any,
}

/// The treatment of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Acted,
    /// Any valid value is taken, and nothing depends on it; the reason.
    NoEffect(&'static str),
    /// Any value but the default is refused; the reason.
    Refused(&'static str),
}

/// One field, with its dots in it.
#[derive(Debug)]
pub struct Setting {
    pub field: &'static str,
    /// Empty when there is none.
    pub flag: &'static str,
    pub form: Form,
    /// As JSON.
    pub default: &'static str,
    pub verdict: Verdict,
}

/// Settings that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{} is larger than 1 MiB", path.display())]
    TooLarge { path: PathBuf },
    #[error("{}: {problem}", path.display())]
    Form { path: PathBuf, problem: String },
    #[error("{}: strict decoding error: unknown field {field:?}{hint}", path.display())]
    Unknown { path: PathBuf, field: String, hint: String },
    #[error("{field}: {problem}")]
    Value { field: &'static str, problem: String },
    #[error("{field} cannot be {value}: {reason}; leave it out")]
    Refused { field: &'static str, value: String, reason: &'static str },
    #[error(transparent)]
    Gate(#[from] GateError),
}

/// The settings of one kubelet.
#[derive(Debug, Clone)]
pub struct Settings {
    value: Value,
}

fn setting(field: &str) -> &'static Setting {
    SETTINGS.iter().find(|s| s.field == field).unwrap_or_else(|| panic!("no setting {field}"))
}

fn pointer(field: &str) -> String {
    format!("/{}", field.replace('.', "/"))
}

impl Settings {
    /// Reads the file and the drop-ins of a directory, and lays flags (by field) over them.
    pub fn read(
        file: Option<&Path>,
        drop_ins: Option<&Path>,
        flags: &[(&'static Setting, String)],
    ) -> Result<Self, SettingsError> {
        let mut value = match file {
            Some(path) => read_file(path, true)?,
            None => json!({}),
        };
        for path in drop_ins.map(drop_in_files).transpose()?.unwrap_or_default() {
            merge(&mut value, read_file(&path, false)?);
        }
        for (setting, text) in flags {
            let given = flag_value(setting, text)?;
            match setting.form {
                // As upstream: gates that the file sets and the flag does not name stay.
                Form::Gates => merge(&mut value[setting.field], given),
                _ => put(&mut value, setting.field, given),
            }
        }
        let settings = Self { value };
        settings.check()?;
        Ok(settings)
    }

    fn check(&self) -> Result<(), SettingsError> {
        for setting in SETTINGS {
            let Some(value) = self.value.pointer(&pointer(setting.field)) else { continue };
            let problem = |problem: String| SettingsError::Value { field: setting.field, problem };
            check_form(setting.form, value).map_err(problem)?;
            if let Verdict::Refused(reason) = setting.verdict
                && !is_default(setting, value)
            {
                let value = value.to_string().chars().take(100).collect();
                return Err(SettingsError::Refused { field: setting.field, value, reason });
            }
        }
        Ok(())
    }

    /// True if somebody gave the field a value.
    pub fn is_set(&self, field: &str) -> bool {
        self.value.pointer(&pointer(field)).is_some_and(|value| !value.is_null())
    }

    /// The value in use.
    fn get(&self, field: &str) -> Value {
        let setting = setting(field);
        match self.value.pointer(&pointer(field)) {
            Some(value) if !stands_for_default(setting.form, value) => value.clone(),
            _ => ferrite_json::from_str(setting.default).unwrap_or_default(),
        }
    }

    /// The value of a field that has a form of its own.
    pub fn value(&self, field: &str) -> Value {
        self.get(field)
    }

    pub fn bool(&self, field: &str) -> bool {
        self.get(field).as_bool().unwrap_or(false)
    }

    pub fn int(&self, field: &str) -> i64 {
        self.get(field).as_i64().unwrap_or(0)
    }

    pub fn text(&self, field: &str) -> String {
        self.get(field).as_str().unwrap_or_default().to_owned()
    }

    /// The text, unless it is empty.
    pub fn path(&self, field: &str) -> Option<PathBuf> {
        Some(self.text(field)).filter(|text| !text.is_empty()).map(PathBuf::from)
    }

    pub fn duration(&self, field: &str) -> Duration {
        self.text(field).parse::<GoDuration>().map(|d| d.0).unwrap_or_default()
    }

    pub fn texts(&self, field: &str) -> Vec<String> {
        let list = self.get(field);
        list.as_array().into_iter().flatten().filter_map(|v| v.as_str()).map(str::to_owned).collect()
    }

    pub fn map(&self, field: &str) -> BTreeMap<String, String> {
        let map = self.get(field);
        let text = |v: &Value| v.as_str().map_or_else(|| v.to_string(), str::to_owned);
        map.as_object().into_iter().flatten().map(|(k, v)| (k.to_string(), text(v))).collect()
    }

    /// Names with each of their values.
    pub fn lists(&self, field: &str) -> Vec<(String, String)> {
        let map = self.get(field);
        let mut pairs = Vec::new();
        for (name, values) in map.as_object().into_iter().flatten() {
            let values = values.as_array().into_iter().flatten().filter_map(|v| v.as_str());
            pairs.extend(values.map(|value| (name.to_string(), value.to_owned())));
        }
        pairs
    }

    pub fn gates(&self) -> Result<FeatureGates, SettingsError> {
        let all: Vec<String> = self.map("featureGates").iter().map(|(k, v)| format!("{k}={v}")).collect();
        Ok(FeatureGates::parse(&all.join(","))?)
    }
}

/// Reads a file strictly. A drop-in may leave out its kind.
fn read_file(path: &Path, whole: bool) -> Result<Value, SettingsError> {
    let failed = |source| SettingsError::Read { path: path.to_owned(), source };
    let file = std::fs::File::open(path).map_err(failed)?;
    let mut text = String::new();
    file.take(MAX_BYTES + 1).read_to_string(&mut text).map_err(failed)?;
    if text.len() as u64 > MAX_BYTES {
        return Err(SettingsError::TooLarge { path: path.to_owned() });
    }
    let form = |problem: String| SettingsError::Form { path: path.to_owned(), problem };
    let mut value: Value = serde_saphyr::from_str(&text).map_err(|e| form(e.to_string()))?;
    let Some(members) = value.as_object_mut() else { return Err(form("it is no object".into())) };
    let mut take = |name: &str| match members.remove(name) {
        Some(Value::String(text)) => text.to_string(),
        _ => String::new(),
    };
    let (version, kind) = (take("apiVersion"), take("kind"));
    let unsaid = !whole && version.is_empty() && kind.is_empty();
    if !unsaid && (version != API_VERSION || kind != KIND) {
        return Err(form(format!("it is no {KIND} of {API_VERSION}")));
    }
    match unknown(&value, "") {
        None => Ok(value),
        Some(field) => {
            let hint = nearest(&field, SETTINGS.iter().map(|s| s.field));
            let hint = hint.map(|known| format!(": did you mean {known:?}?")).unwrap_or_default();
            Err(SettingsError::Unknown { path: path.to_owned(), field, hint })
        }
    }
}

/// The first field that nobody knows.
fn unknown(value: &Value, above: &str) -> Option<String> {
    for (name, inner) in value.as_object().into_iter().flatten() {
        let field = format!("{above}{name}");
        if SETTINGS.iter().any(|s| s.field == field) {
            continue;
        }
        let below = format!("{field}.");
        if !SETTINGS.iter().any(|s| s.field.starts_with(&below)) {
            return Some(field);
        }
        if let Some(found) = unknown(inner, &below) {
            return Some(found);
        }
    }
    None
}

/// As upstream: files that end in `.conf`, in the order of their names, also of directories below.
fn drop_in_files(directory: &Path) -> Result<Vec<PathBuf>, SettingsError> {
    let mut found = Vec::new();
    let mut open = vec![directory.to_owned()];
    while let Some(directory) = open.pop() {
        let failed = |source| SettingsError::Read { path: directory.clone(), source };
        for entry in std::fs::read_dir(&directory).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let path = entry.path();
            match entry.file_type().map_err(failed)?.is_dir() {
                true => open.push(path),
                false if path.extension().is_some_and(|end| end == "conf") => found.push(path),
                false => {}
            }
            if found.len() + open.len() > MAX_FILES {
                let problem = format!("it has more than {MAX_FILES} files");
                return Err(SettingsError::Form { path: directory, problem });
            }
        }
    }
    found.sort();
    Ok(found)
}

/// JSON merge patch.
fn merge(target: &mut Value, patch: Value) {
    let Value::Object(patch) = patch else {
        *target = patch;
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    for (key, value) in patch {
        match value.is_null() {
            true => {
                if let Some(members) = target.as_object_mut() {
                    members.remove(&key);
                }
            }
            false => merge(&mut target[key.as_str()], value),
        }
    }
}

fn put(target: &mut Value, field: &str, value: Value) {
    match field.split_once('.') {
        Some((outer, inner)) => {
            if !target[outer].is_object() {
                target[outer] = json!({});
            }
            put(&mut target[outer], inner, value);
        }
        None => target[field] = value,
    }
}

/// The value that a flag gives a field.
fn flag_value(setting: &'static Setting, text: &str) -> Result<Value, SettingsError> {
    let bad = |what: &str| SettingsError::Value {
        field: setting.field,
        problem: format!("--{}: {text:?} is not {what}", setting.flag),
    };
    let parts = || text.split(',').map(str::trim).filter(|part| !part.is_empty());
    let pairs = |between: char, what: &str| {
        let pair =
            |part: &str| part.split_once(between).map(|(k, v)| (k.trim().to_owned(), v.trim().to_owned()));
        parts().map(|part| pair(part).ok_or_else(|| bad(what))).collect::<Result<Vec<_>, SettingsError>>()
    };
    let map = |pairs: Vec<(String, String)>| {
        let mut map = json!({});
        for (key, value) in pairs {
            map[key.as_str()] = json!(value);
        }
        map
    };
    Ok(match setting.form {
        Form::Bool => match text {
            "true" | "1" | "t" | "T" | "TRUE" | "True" => json!(true),
            "false" | "0" | "f" | "F" | "FALSE" | "False" => json!(false),
            _ => return Err(bad("true or false")),
        },
        Form::Int | Form::OptionalInt => json!(text.parse::<i64>().map_err(|_| bad("a number"))?),
        Form::Text | Form::OptionalText | Form::Duration | Form::SignedDuration => json!(text),
        Form::Texts => json!(parts().map(str::to_owned).collect::<Vec<_>>()),
        Form::Map => map(pairs('=', "like a=b,c=d")?),
        Form::Thresholds => map(pairs('<', "like memory.available<100Mi")?),
        Form::Lists => {
            let mut map = json!({});
            for (key, value) in pairs(':', "like name:value")? {
                match map[key.as_str()].as_array_mut() {
                    Some(values) => values.push(json!(value)),
                    None => map[key.as_str()] = json!([value]),
                }
            }
            map
        }
        Form::Gates => {
            let mut map = json!({});
            for (key, value) in pairs('=', "like A=true,B=false")? {
                map[key.as_str()] = json!(value.parse::<bool>().map_err(|_| bad("like A=true,B=false"))?);
            }
            map
        }
        Form::Taints => {
            super::registration::flag_taints(text).ok_or_else(|| bad("like a=b:NoSchedule,c:NoExecute"))?
        }
        Form::ReservedMemory => super::memory::flag_reservations(text)
            .ok_or_else(|| bad("like 0:memory=1Gi,hugepages-2Mi=2Gi"))?,
        Form::Fraction => json!(text.parse::<f64>().map_err(|_| bad("a number"))?),
        Form::Any => json!(text),
    })
}

fn check_form(form: Form, value: &Value) -> Result<(), String> {
    let texts = |value: &Value| value.as_array().is_some_and(|all| all.iter().all(Value::is_string));
    let all = |value: &Value, fine: &dyn Fn(&Value) -> bool| {
        value.as_object().is_some_and(|map| map.iter().all(|(_, v)| fine(v)))
    };
    let (fine, wanted) = match form {
        Form::Bool => (value.is_boolean(), "true or false"),
        Form::Int | Form::OptionalInt => (value.as_i64().is_some(), "a whole number"),
        Form::Text | Form::OptionalText => (value.is_string(), "a text"),
        Form::Duration => {
            let parsed = value.as_str().map(|text| text.parse::<GoDuration>().is_ok());
            (parsed.unwrap_or(false), "a duration like 1h30m, 15s or 100ms")
        }
        Form::SignedDuration => {
            let text = value.as_str().map(|text| text.strip_prefix('-').unwrap_or(text));
            let parsed = text.map(|text| text.parse::<GoDuration>().is_ok());
            (parsed.unwrap_or(false), "a duration like 1h30m, 15s or -1s")
        }
        Form::Texts => (texts(value), "a list of texts"),
        Form::Map | Form::Thresholds => (all(value, &Value::is_string), "a map of texts"),
        Form::Lists => (all(value, &texts), "a map of lists of texts"),
        Form::Gates => (all(value, &Value::is_boolean), "a map of true and false"),
        Form::Taints => (value.is_array(), "a list of taints"),
        Form::ReservedMemory => (value.is_array(), "a list of reservations"),
        Form::Fraction => {
            (value.as_f64().is_some_and(|factor| factor > 0.0 && factor <= 1.0), "more than 0 and at most 1")
        }
        Form::Any => (true, ""),
    };
    match fine || value.is_null() {
        true => Ok(()),
        false => {
            let shown: String = value.to_string().chars().take(100).collect();
            Err(format!("{shown} is not {wanted}"))
        }
    }
}

/// Go's zero value of the field means that nothing was said.
fn stands_for_default(form: Form, value: &Value) -> bool {
    let empty = value.as_array().is_some_and(|a| a.is_empty())
        || value.as_object().is_some_and(|o| o.iter().all(|(_, v)| is_zero(v)));
    match form {
        _ if value.is_null() => true,
        Form::Int => value.as_i64() == Some(0),
        Form::Text => value.as_str() == Some(""),
        Form::Duration | Form::SignedDuration => {
            value.as_str().and_then(|t| t.parse::<GoDuration>().ok()).is_some_and(|d| d.0.is_zero())
        }
        Form::Texts | Form::Fraction => false,
        Form::Taints | Form::ReservedMemory => empty,
        Form::Map | Form::Thresholds | Form::Lists | Form::Gates | Form::Any => empty || is_zero(value),
        Form::Bool | Form::OptionalInt | Form::OptionalText => false,
    }
}

fn is_zero(value: &Value) -> bool {
    value.is_null()
        || value.as_i64() == Some(0)
        || matches!(value.as_str(), Some("" | "0" | "0s"))
        || value.as_array().is_some_and(|a| a.is_empty())
        || value.as_object().is_some_and(|o| o.iter().all(|(_, v)| is_zero(v)))
}

fn is_default(setting: &Setting, value: &Value) -> bool {
    let default: Value = ferrite_json::from_str(setting.default).unwrap_or_default();
    let duration = |value: &Value| value.as_str().and_then(|t| t.parse::<GoDuration>().ok());
    *value == default
        || stands_for_default(setting.form, value)
        || (setting.form == Form::Duration
            && duration(value).is_some()
            && duration(value) == duration(&default))
}

#[cfg(test)]
pub(super) mod testing {
    use super::Settings;

    /// A configuration with these lines.
    pub(in crate::kubelet) fn settings(text: &str) -> Settings {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.yaml");
        let head = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";
        std::fs::write(&path, format!("{head}{text}")).unwrap();
        Settings::read(Some(&path), None, &[]).unwrap()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn read(text: &str, drop_ins: &[(&str, &str)], flags: &[(&str, &str)]) -> Result<Settings, String> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.yaml");
        std::fs::write(&file, format!("apiVersion: {API_VERSION}\nkind: {KIND}\n{text}")).unwrap();
        let inner = dir.path().join("conf.d/more");
        std::fs::create_dir_all(&inner).unwrap();
        for (name, text) in drop_ins {
            std::fs::write(dir.path().join("conf.d").join(name), text).unwrap();
        }
        let by_flag = |flag: &str| SETTINGS.iter().find(|s| s.flag == flag).unwrap();
        let flags: Vec<_> = flags.iter().map(|(flag, text)| (by_flag(flag), (*text).to_owned())).collect();
        let path = dir.path().join("conf.d");
        Settings::read(Some(&file), Some(&path), &flags)
            .map_err(|e| e.to_string().replace(&format!("{}/", dir.path().display()), ""))
    }

    #[test]
    fn defaults_then_the_file_then_drop_ins_then_flags() {
        let settings = read(
            "maxPods: 10\nclusterDomain: a\nauthentication: {anonymous: {enabled: true}}\nsystemReserved: {cpu: 1}\n"
                .replace("cpu: 1", "cpu: '1'")
                .as_str(),
            &[
                ("20-b.conf", "maxPods: 30\n"),
                ("10-a.conf", "maxPods: 20\nclusterDomain: b\nsystemReserved: {memory: 1Gi}\n"),
                ("readme.txt", "{{{"),
                ("more/30.conf", "clusterDNS: [10.96.0.10]\n"),
            ],
            &[("cluster-domain", "c"), ("healthz-port", "0")],
        )
        .unwrap();
        assert_eq!(settings.int("maxPods"), 30);
        assert_eq!(settings.text("clusterDomain"), "c");
        assert_eq!(settings.texts("clusterDNS"), ["10.96.0.10"]);
        assert!(settings.bool("authentication.anonymous.enabled"));
        assert!(settings.bool("authentication.webhook.enabled"), "a default");
        assert_eq!(settings.duration("authentication.webhook.cacheTTL").as_secs(), 120);
        assert_eq!(settings.int("healthzPort"), 0, "zero is a value here");
        assert_eq!(settings.map("systemReserved").len(), 2, "maps are merged");
    }

    #[test]
    fn gates_of_the_file_stay_where_the_flag_names_others() {
        let file = "featureGates: {ClusterTrustBundle: true, PodCertificateRequest: true}\n";
        let settings = read(file, &[], &[("feature-gates", "PodCertificateRequest=false")]).unwrap();
        let gates = settings.gates().unwrap();
        assert!(gates.enabled("ClusterTrustBundle") && !gates.enabled("PodCertificateRequest"));
        assert!(
            read("", &[], &[("feature-gates", "ClusterTrustBundle=true")])
                .unwrap()
                .gates()
                .unwrap()
                .enabled("ClusterTrustBundle")
        );
    }

    /// The file that kubeadm writes.
    #[test]
    fn zero_values_stand_for_defaults() {
        let kubeadm = "cpuManagerReconcilePeriod: 0s\nevictionPressureTransitionPeriod: 0s\nfileCheckFrequency: 0s\n\
            imageMaximumGCAge: 0s\nlogging:\n  flushFrequency: 0\n  options:\n    json:\n      infoBufferSize: \"0\"\n  verbosity: 0\n\
            memorySwap: {}\nnodeStatusReportFrequency: 0s\ncontainerRuntimeEndpoint: \"\"\nstaticPodPath: /etc/kubernetes/manifests\n\
            resolvConf: /run/systemd/resolve/resolv.conf\nrotateCertificates: true\nshutdownGracePeriod: 0s\nmaxPods: 0\n";
        let settings = read(kubeadm, &[], &[]).unwrap();
        assert_eq!(settings.duration("fileCheckFrequency").as_secs(), 20);
        assert_eq!(settings.int("maxPods"), 110);
        assert_eq!(settings.text("containerRuntimeEndpoint"), "unix:///run/containerd/containerd.sock");
    }

    #[test]
    fn mistakes_are_named() {
        for (text, problem) in [
            ("maxPosd: 1\n", "strict decoding error: unknown field \"maxPosd\": did you mean \"maxPods\"?"),
            ("authentication: {x: 1}\n", "unknown field \"authentication.x\""),
            ("maxPods: many\n", "maxPods: \"many\" is not a whole number"),
            ("fileCheckFrequency: soon\n", "is not a duration"),
            ("tracing: {endpoint: a}\n", "there is no exporter of traces; leave it out"),
            (
                "cgroupsPerQOS: false\n",
                "cgroupsPerQOS cannot be false: pods have control groups by their class",
            ),
            ("memoryThrottlingFactor: 1.5\n", "is not more than 0 and at most 1"),
            ("maxPods: [\n", "config.yaml: "),
        ] {
            let said = read(text, &[], &[]).unwrap_err();
            assert!(said.contains(problem), "{text}: {said}");
        }
        let said = read("", &[("a.conf", "kind: Pod\napiVersion: v1\n")], &[]).unwrap_err();
        assert_eq!(said, "conf.d/a.conf: it is no KubeletConfiguration of kubelet.config.k8s.io/v1beta1");
        let said = read("", &[], &[("max-pods", "x")]).unwrap_err();
        assert_eq!(said, "maxPods: --max-pods: \"x\" is not a number");
    }

    #[test]
    fn flags_have_the_forms_of_upstream() {
        let settings = read(
            "",
            &[],
            &[
                ("eviction-hard", "memory.available<200Mi"),
                ("kube-reserved", "cpu=100m,memory=1Gi"),
                ("manifest-url-header", "X-A:1,X-A:2"),
                ("cluster-dns", "10.96.0.10"),
                ("enforce-node-allocatable", "pods"),
            ],
        )
        .unwrap();
        assert_eq!(settings.map("evictionHard")["memory.available"], "200Mi");
        assert_eq!(settings.map("kubeReserved")["cpu"], "100m");
        assert_eq!(settings.lists("staticPodURLHeader").len(), 2);
    }

    /// The fields of upstream's KubeletConfiguration v1beta1 in v1.36, but for `apiVersion` and `kind`.
    const FIELDS: &str = "address allowedUnsafeSysctls authentication authorization cgroupDriver cgroupRoot cgroupsPerQOS \
        clusterDNS clusterDomain configMapAndSecretChangeDetectionStrategy containerLogMaxFiles containerLogMaxSize \
        containerLogMaxWorkers containerLogMonitorInterval containerRuntimeEndpoint contentType cpuCFSQuota \
        cpuCFSQuotaPeriod cpuManagerPolicy cpuManagerPolicyOptions cpuManagerReconcilePeriod crashLoopBackOff \
        enableContentionProfiling enableControllerAttachDetach enableDebugFlagsHandler enableDebuggingHandlers \
        enableProfilingHandler enableServer enableSystemLogHandler enableSystemLogQuery enforceNodeAllocatable eventBurst \
        eventRecordQPS evictionHard evictionMaxPodGracePeriod evictionMinimumReclaim evictionPressureTransitionPeriod \
        evictionSoft evictionSoftGracePeriod failCgroupV1 failSwapOn featureGates fileCheckFrequency hairpinMode \
        healthzBindAddress healthzPort httpCheckFrequency imageGCHighThresholdPercent imageGCLowThresholdPercent \
        imageMaximumGCAge imageMinimumGCAge imagePullCredentialsVerificationPolicy imageServiceEndpoint iptablesDropBit \
        iptablesMasqueradeBit kernelMemcgNotification kubeAPIBurst kubeAPIQPS kubeReserved kubeReservedCgroup \
        kubeletCgroups localStorageCapacityIsolation logging makeIPTablesUtilChains maxOpenFiles maxParallelImagePulls \
        maxPods memoryManagerPolicy memoryReservationPolicy memorySwap memoryThrottlingFactor mergeDefaultEvictionSettings \
        nodeLeaseDurationSeconds nodeStatusMaxImages nodeStatusReportFrequency nodeStatusUpdateFrequency oomScoreAdj \
        podCIDR podLogsDir podPidsLimit podsPerCore port preloadedImagesVerificationAllowlist protectKernelDefaults \
        providerID qosReserved readOnlyPort registerNode registerWithTaints registryBurst registryPullQPS reservedMemory \
        reservedSystemCPUs resolvConf rotateCertificates runOnce runtimeRequestTimeout seccompDefault serializeImagePulls \
        serverTLSBootstrap showHiddenMetricsForVersion shutdownGracePeriod shutdownGracePeriodByPodPriority \
        shutdownGracePeriodCriticalPods singleProcessOOMKill staticPodPath staticPodURL staticPodURLHeader \
        streamingConnectionIdleTimeout syncFrequency systemCgroups systemReserved systemReservedCgroup tlsCertFile \
        tlsCipherSuites tlsCurvePreferences tlsMinVersion tlsPrivateKeyFile topologyManagerPolicy \
        topologyManagerPolicyOptions topologyManagerScope tracing userNamespaces volumePluginDir volumeStatsAggPeriod";

    #[test]
    fn every_field_of_upstream_has_a_verdict() {
        let known: BTreeSet<&str> = SETTINGS.iter().filter_map(|s| s.field.split('.').next()).collect();
        assert_eq!(known, FIELDS.split_whitespace().collect());
    }

    #[test]
    fn the_table_is_whole() {
        for setting in SETTINGS {
            let default: Value = ferrite_json::from_str(setting.default).unwrap();
            check_form(setting.form, &default).unwrap_or_else(|e| panic!("{}: {e}", setting.field));
            let same = SETTINGS.iter().filter(|s| s.field == setting.field).count();
            assert_eq!(same, 1, "{}", setting.field);
        }
    }
}
