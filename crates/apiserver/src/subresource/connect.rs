//! Admission of requests that become streams: exec, attach, port-forward and proxy.

use crate::admission::{Attributes, Operation};
use crate::call::Call;
use crate::options::WriteOptions;
use ferrite_api::Status;
use ferrite_json::{Map, Value};

/// The kind of the options of a subresource, with its flags, texts and lists; none if it is no stream.
struct Options {
    kind: &'static str,
    flags: &'static [&'static str],
    texts: &'static [&'static str],
    lists: &'static [&'static str],
}

const STREAMS: &[&str] = &["stdin", "stdout", "stderr", "tty"];

fn options_of(plural: &str, subresource: &str) -> Option<Options> {
    let options = |kind, flags, texts, lists| Some(Options { kind, flags, texts, lists });
    match (plural, subresource) {
        (_, "exec") => options("PodExecOptions", STREAMS, &["container"], &["command"]),
        (_, "attach") => options("PodAttachOptions", STREAMS, &["container"], &[]),
        (_, "portforward") => options("PodPortForwardOptions", &[], &[], &["ports"]),
        ("pods", "proxy") => options("PodProxyOptions", &[], &["path"], &[]),
        ("services", "proxy") => options("ServiceProxyOptions", &[], &["path"], &[]),
        (_, "proxy") => options("NodeProxyOptions", &[], &["path"], &[]),
        _ => None,
    }
}

impl Options {
    /// The options as an object.
    fn read(&self, call: &Call) -> Value {
        let mut object = Map::new();
        object.insert("kind", self.kind.into());
        object.insert("apiVersion", "v1".into());
        for flag in self.flags.iter().filter(|flag| call.query.flag(flag)) {
            object.insert(*flag, true.into());
        }
        for text in self.texts {
            let given =
                if *text == "path" { proxied_path(call) } else { call.query.get(text).map(str::to_owned) };
            if let Some(given) = given.filter(|given| !given.is_empty()) {
                object.insert(*text, given.into());
            }
        }
        for list in self.lists {
            let given = call.query.all(list);
            let given: Vec<Value> = match *list {
                "ports" => given
                    .flat_map(|ports| ports.split(','))
                    .filter_map(|p| p.parse::<i64>().ok())
                    .map(Value::from)
                    .collect(),
                _ => given.map(Value::from).collect(),
            };
            if !given.is_empty() {
                object.insert(*list, given.into());
            }
        }
        object.into()
    }

    /// Puts options that admission has changed in place of those of the request. Where a proxied request goes stays.
    fn write(&self, call: &mut Call, object: &Value) {
        for flag in self.flags {
            let set = object[*flag] == true;
            call.query.replace(flag, set.then(|| "true".to_owned()));
        }
        for text in self.texts.iter().filter(|text| **text != "path") {
            call.query.replace(text, object[*text].as_str().map(str::to_owned));
        }
        for list in self.lists {
            let items = object[*list].as_array().into_iter().flatten();
            let text = |item: &Value| item.as_str().map_or_else(|| item.to_string(), str::to_owned);
            call.query.replace(list, items.map(text));
        }
    }
}

/// The path that a proxied request asks for.
fn proxied_path(call: &Call) -> Option<String> {
    let path = call.parts.uri.path();
    path.split_once("/proxy/").map(|(_, rest)| rest.to_owned())
}

/// Asks webhooks and policies about a request that becomes a stream.
pub(super) async fn admit(call: &mut Call, subresource: &str) -> Result<(), Status> {
    let Some(known) = options_of(&call.resource.plural, subresource) else { return Ok(()) };
    let mut object = known.read(call);
    let options = WriteOptions { warnings: call.admission.clone(), ..WriteOptions::default() };
    let registry = &call.server.registry;
    let attributes = Attributes {
        operation: Operation::Connect,
        resource: &call.resource,
        subresource: Some(subresource),
        namespace: call.namespace(),
        name: call.name(),
        unnamed: false,
        user: &call.user,
        old: None,
        options: &options,
        rbac: &registry.rbac,
    };
    let view = registry.view();
    if registry.admission.connect(&view, &attributes, &mut object).await? {
        known.write(call, &object);
    }
    Ok(())
}
