//! The parameters of operations: query options, and names in paths.

use ferrite_json::{Map, Value, json};

/// A parameter as both versions of OpenAPI describe it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Parameter {
    pub name: &'static str,
    /// A part of the path, and so required; else a query option.
    pub in_path: bool,
    pub type_: &'static str,
    text: &'static str,
    /// The name under which the v2 document keeps the parameter, for operations to refer to. As upstream's; empty where
    /// each operation says it anew.
    shared: &'static str,
}

impl Parameter {
    fn schema(&self) -> [(&'static str, Value); 2] {
        [("type", self.type_.into()), ("uniqueItems", true.into())]
    }

    fn base(&self) -> Map {
        let place = if self.in_path { "path" } else { "query" };
        let mut made: Map = [("name", self.name), ("in", place), ("description", self.text)]
            .into_iter()
            .map(|(key, text)| (key.to_owned(), Value::from(text)))
            .collect();
        if self.in_path {
            made.insert("required", true.into());
        }
        made
    }

    pub fn v3(&self) -> Value {
        let mut made = self.base();
        made.insert(
            "schema",
            self.schema().into_iter().map(|(k, v)| (k.to_owned(), v)).collect::<Map>().into(),
        );
        made.into()
    }

    pub fn v2(&self) -> Value {
        if !self.shared.is_empty() {
            return json!({"$ref": format!("#/parameters/{}", self.shared)});
        }
        self.whole_v2()
    }

    fn whole_v2(&self) -> Value {
        let mut made = self.base();
        made.extend(self.schema().into_iter().map(|(k, v)| (k.to_owned(), v)));
        made.into()
    }
}

/// The section of the v2 document with the parameters that operations refer to.
pub(super) fn shared_v2() -> Map {
    let rows = [QUERY, LOG, ATTACH, EXEC, PORT_FORWARD, POD_PROXY, SERVICE_PROXY, NODE_PROXY, PATH];
    let parameters = rows.into_iter().flatten().filter(|parameter| !parameter.shared.is_empty());
    let mut section: Map =
        parameters.map(|parameter| (parameter.shared.to_owned(), parameter.whole_v2())).collect();
    for (name, body) in [(OPTIONS_BODY, "DeleteOptions"), (PATCH_BODY, "Patch")] {
        let reference = format!("#/definitions/io.k8s.apimachinery.pkg.apis.meta.v1.{body}");
        let mut made = json!({"name": "body", "in": "body", "schema": {"$ref": reference}});
        if name == PATCH_BODY {
            made["required"] = true.into();
        }
        section.insert(name, made);
    }
    section
}

/// Bodies that the v2 document keeps among its parameters.
pub(super) const OPTIONS_BODY: &str = "body-2Y1dVQaQ";
pub(super) const PATCH_BODY: &str = "body-78PwaGsr";

const fn query(
    name: &'static str,
    type_: &'static str,
    text: &'static str,
    shared: &'static str,
) -> Parameter {
    Parameter { name, in_path: false, type_, text, shared }
}

const fn in_path(name: &'static str, text: &'static str, shared: &'static str) -> Parameter {
    Parameter { name, in_path: true, type_: "string", text, shared }
}

pub(super) static PATH: &[Parameter] = &[
    in_path("name", "Name of the object.", ""),
    in_path("namespace", "Namespace of the object.", "namespace-vgWSWtn3"),
    in_path("path", "What to ask the far side for.", "path-z6Ciiujn"),
];

/// Options of reads and writes.
pub(super) static QUERY: &[Parameter] = &[
    query(
        "allowWatchBookmarks",
        "boolean",
        "Whether a watch gets BOOKMARK events, which carry a resource version and nothing else.",
        "allowWatchBookmarks-HC2hJt-J",
    ),
    query(
        "continue",
        "string",
        "The token of the list before, to go on where it ended.",
        "continue-QfD61s0i",
    ),
    query("dryRun", "string", "All: everything is done but the change itself is not stored.", ""),
    query(
        "fieldManager",
        "string",
        "Who is recorded as the manager of the fields that this request sets. At most 128 printable characters.",
        "fieldManager-Qy4HdaTW",
    ),
    query(
        "fieldManager",
        "string",
        "Who is recorded as the manager of the fields that this patch sets. Needed for an apply patch.",
        "fieldManager-7c6nTn1T",
    ),
    query(
        "fieldSelector",
        "string",
        "Only objects whose fields have these values.",
        "fieldSelector-xIcQKXFG",
    ),
    query(
        "fieldValidation",
        "string",
        "How fields that are unknown or stand twice are treated: Ignore, Warn (the default) or Strict.",
        "",
    ),
    query("force", "boolean", "Whether an apply patch takes fields that others manage.", "force-tOGGb0Yi"),
    query(
        "gracePeriodSeconds",
        "integer",
        "How long the object has before it is deleted; zero deletes it at once.",
        "gracePeriodSeconds--K5HaBOS",
    ),
    query(
        "ignoreStoreReadErrorWithClusterBreakingPotential",
        "boolean",
        "Whether an object that cannot be read may be deleted. Not supported here.",
        "ignoreStoreReadErrorWithClusterBreakingPotential-QbNkfIqj",
    ),
    query("labelSelector", "string", "Only objects with these labels.", "labelSelector-5Zw57w4C"),
    query(
        "limit",
        "integer",
        "The most objects that a list returns; its continue token leads to the rest.",
        "limit-1NfNmdNH",
    ),
    query(
        "orphanDependents",
        "boolean",
        "Whether objects that the deleted one owns stay. Use propagationPolicy instead.",
        "orphanDependents-uRB25kX5",
    ),
    query("pretty", "string", "Whether the answer is indented.", "pretty-tJGM1-ng"),
    query(
        "propagationPolicy",
        "string",
        "What becomes of objects that the deleted one owns: Orphan, Background or Foreground.",
        "propagationPolicy-6jk3prlO",
    ),
    query(
        "resourceVersion",
        "string",
        "The version of the data that the answer may be of; resourceVersionMatch says in which way.",
        "resourceVersion-5WAnf1kx",
    ),
    query(
        "resourceVersionMatch",
        "string",
        "How resourceVersion limits a list: Exact or NotOlderThan.",
        "resourceVersionMatch-t8XhRHeC",
    ),
    query(
        "sendInitialEvents",
        "boolean",
        "Whether a watch begins with the objects that exist, as ADDED events.",
        "sendInitialEvents-rLXlEK_k",
    ),
    query(
        "shardSelector",
        "string",
        "Only objects of one shard, as an expression. Not supported here.",
        "shardSelector-Kgyki_3_",
    ),
    query("timeoutSeconds", "integer", "When the list or watch ends.", "timeoutSeconds-yvYezaOC"),
    query(
        "watch",
        "boolean",
        "Whether changes are sent as they happen, instead of a list.",
        "watch-XNNPZGbK",
    ),
];

pub(super) static LOG: &[Parameter] = &[
    query(
        "container",
        "string",
        "The container whose log is read. May be left out if there is only one.",
        "container-1GeXxFDC",
    ),
    query("follow", "boolean", "Whether new lines are sent as they are written.", "follow-9OIXh_2R"),
    query(
        "insecureSkipTLSVerifyBackend",
        "boolean",
        "Whether the kubelet's certificate goes unchecked.",
        "insecureSkipTLSVerifyBackend-gM00jVbe",
    ),
    query("limitBytes", "integer", "The most bytes that are sent.", "limitBytes-zwd1RXuc"),
    query("previous", "boolean", "Whether the log of the container's last run is read.", "previous-1jxDPu3y"),
    query("sinceSeconds", "integer", "Only lines that are at most so old.", "sinceSeconds-vE2NLdnP"),
    query("stream", "string", "Only lines of one stream: All, Stdout or Stderr.", "stream-l-48cgXv"),
    query("tailLines", "integer", "Only so many lines from the end.", "tailLines-9xQLWHMV"),
    query("timestamps", "boolean", "Whether each line begins with its time.", "timestamps-c17fW1w_"),
];

pub(super) static ATTACH: &[Parameter] = &[
    query(
        "container",
        "string",
        "The container to attach to. May be left out if there is only one.",
        "container-_Q-EJ3nR",
    ),
    query("stderr", "boolean", "Whether standard error is attached.", "stderr-26jJhFUR"),
    query("stdin", "boolean", "Whether standard input is attached.", "stdin-sEFnN3IS"),
    query("stdout", "boolean", "Whether standard output is attached.", "stdout-005YMKE6"),
    query("tty", "boolean", "Whether the container's terminal is attached.", "tty-g7MlET_l"),
];

pub(super) static EXEC: &[Parameter] = &[
    query(
        "command",
        "string",
        "The program and its arguments, one parameter each. No shell is involved.",
        "command-Py3eQybp",
    ),
    query(
        "container",
        "string",
        "The container to run the program in. May be left out if there is only one.",
        "container-i5dOmRiM",
    ),
    query("stderr", "boolean", "Whether the program's standard error is sent.", "stderr-W_1TNlWc"),
    query("stdin", "boolean", "Whether the program gets standard input.", "stdin-PSzNhyUC"),
    query("stdout", "boolean", "Whether the program's standard output is sent.", "stdout--EZLRwV1"),
    query("tty", "boolean", "Whether the program gets a terminal.", "tty-s0flW37O"),
];

pub(super) static PORT_FORWARD: &[Parameter] =
    &[query("ports", "integer", "Ports of the pod. Needed with WebSockets.", "ports-91KROJmm")];

pub(super) static POD_PROXY: &[Parameter] =
    &[query("path", "string", "What to ask the pod for.", "path-oPbzgLUj")];
pub(super) static SERVICE_PROXY: &[Parameter] =
    &[query("path", "string", "What to ask the service for.", "path-QCf0eosM")];
pub(super) static NODE_PROXY: &[Parameter] =
    &[query("path", "string", "What to ask the node for.", "path-rFDtV0x9")];

/// Options of lists and watches.
pub(super) const LIST: &[&str] = &[
    "allowWatchBookmarks",
    "continue",
    "fieldSelector",
    "labelSelector",
    "limit",
    "resourceVersion",
    "resourceVersionMatch",
    "sendInitialEvents",
    "shardSelector",
    "timeoutSeconds",
    "watch",
];
pub(super) const WRITE: &[&str] = &["dryRun", "fieldManager", "fieldValidation"];
pub(super) const DELETE: &[&str] = &[
    "dryRun",
    "gracePeriodSeconds",
    "ignoreStoreReadErrorWithClusterBreakingPotential",
    "orphanDependents",
    "propagationPolicy",
];
/// A collection is deleted as it is listed, but not as it is watched.
pub(super) const DELETE_COLLECTION: &[&str] = &[
    "continue",
    "dryRun",
    "fieldSelector",
    "gracePeriodSeconds",
    "ignoreStoreReadErrorWithClusterBreakingPotential",
    "labelSelector",
    "limit",
    "orphanDependents",
    "propagationPolicy",
    "resourceVersion",
    "resourceVersionMatch",
    "sendInitialEvents",
    "shardSelector",
    "timeoutSeconds",
];

/// The named options.
pub(super) fn named(names: &[&str]) -> Vec<&'static Parameter> {
    names.iter().filter_map(|name| QUERY.iter().find(|parameter| parameter.name == *name)).collect()
}

/// Options of a patch. It needs a manager in cases where other writes do not.
pub(super) fn of_patch() -> Vec<&'static Parameter> {
    let manager = QUERY.iter().rfind(|parameter| parameter.name == "fieldManager");
    named(&["dryRun"]).into_iter().chain(manager).chain(named(&["fieldValidation", "force"])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_named_option_exists_and_shared_ones_are_listed_once() {
        for names in [LIST, WRITE, DELETE, DELETE_COLLECTION] {
            assert_eq!(named(names).len(), names.len());
        }
        assert_eq!(of_patch().len(), 4);
        assert_eq!(shared_v2().len(), 47);
    }
}
