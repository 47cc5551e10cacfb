//! `ferrite timeline`: the life of an object, from the request that made it to the process that runs.

use crate::apiserver::BoxError;
use crate::explain_schedule::client_of;
use ferrite_component::steps::{Step, Steps};
use http::Request;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{Api, DynamicObject};
use kube::core::{ApiResource, GroupVersionKind};
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

/// Owners of owners are followed this far.
const LONGEST_CHAIN: usize = 8;

/// The kinds that can be named: names on the command line, group, version, kind, and if they are namespaced.
const KINDS: &[(&[&str], &str, &str, &str, bool)] = &[
    (&["pod", "pods", "po"], "", "v1", "Pod", true),
    (&["service", "services", "svc"], "", "v1", "Service", true),
    (&["persistentvolumeclaim", "persistentvolumeclaims", "pvc"], "", "v1", "PersistentVolumeClaim", true),
    (&["persistentvolume", "persistentvolumes", "pv"], "", "v1", "PersistentVolume", false),
    (&["node", "nodes", "no"], "", "v1", "Node", false),
    (&["namespace", "namespaces", "ns"], "", "v1", "Namespace", false),
    (&["deployment", "deployments", "deploy"], "apps", "v1", "Deployment", true),
    (&["replicaset", "replicasets", "rs"], "apps", "v1", "ReplicaSet", true),
    (&["statefulset", "statefulsets", "sts"], "apps", "v1", "StatefulSet", true),
    (&["daemonset", "daemonsets", "ds"], "apps", "v1", "DaemonSet", true),
    (&["job", "jobs"], "batch", "v1", "Job", true),
    (&["cronjob", "cronjobs", "cj"], "batch", "v1", "CronJob", true),
];

/// Flags of timeline.
#[derive(Debug, clap::Args)]
pub struct Timeline {
    /// The object, as `pod/NAME`, `deployment/NAME` …; a name alone is a pod's.
    #[arg(value_name = "OBJECT")]
    object: String,
    /// Namespace of the object.
    #[arg(short = 'n', long, default_value = "default", value_name = "NAMESPACE")]
    namespace: String,
    /// Print the steps as JSON.
    #[arg(long)]
    json: bool,
    /// Kubeconfig file; the usual one without it.
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
}

#[derive(Debug, thiserror::Error)]
enum TimelineError {
    #[error("{given:?} is no kind with a timeline: there are {}", known())]
    Kind { given: String },
    #[error(
        "the server has no steps to show: is it a Ferrite API server, and may you get /debug/steps? ({source})"
    )]
    Server { source: kube::Error },
}

fn known() -> String {
    KINDS.iter().map(|(names, ..)| names[0]).collect::<Vec<_>>().join(", ")
}

/// An object of the chain, with what the table calls it.
struct Link {
    uid: String,
    label: String,
}

fn kind_of(given: &str) -> Result<(GroupVersionKind, bool), TimelineError> {
    let lower = given.to_lowercase();
    let found = KINDS.iter().find(|(names, ..)| names.contains(&lower.as_str()));
    let (_, group, version, kind, is_namespaced) =
        found.ok_or_else(|| TimelineError::Kind { given: given.to_owned() })?;
    Ok((GroupVersionKind::gvk(group, version, kind), *is_namespaced))
}

impl Timeline {
    pub async fn run(self) -> Result<ExitCode, BoxError> {
        let (kind, name) = self.object.split_once('/').unwrap_or(("pod", &self.object));
        let (gvk, is_namespaced) = kind_of(kind)?;
        let client = client_of(self.kubeconfig.as_deref()).await?;
        let namespace = is_namespaced.then_some(self.namespace.as_str());
        let object = api(&client, &gvk, namespace).get(name).await?;
        let node = object.data.pointer("/spec/nodeName").and_then(|node| node.as_str()).map(str::to_owned);
        let mut chain = vec![link(&gvk, name, &object)];
        let mut owner = controller_of(&object);
        while let Some(reference) = owner.filter(|_| chain.len() < LONGEST_CHAIN) {
            let (group, version) = match reference.api_version.split_once('/') {
                Some((group, version)) => (group, version),
                None => ("", reference.api_version.as_str()),
            };
            let gvk = GroupVersionKind::gvk(group, version, &reference.kind);
            // Steps of an owner that is gone are not found by its name, but its UID is still known.
            chain.push(Link { uid: reference.uid.clone(), label: label(&gvk, &reference.name) });
            let found = api(&client, &gvk, namespace).get_opt(&reference.name).await;
            owner = found.ok().flatten().and_then(|object| controller_of(&object));
        }
        let query = chain.iter().map(|link| format!("uid={}", link.uid)).collect::<Vec<_>>().join("&");
        let of_server = steps(&client, &format!("/debug/steps?{query}")).await;
        let mut all = of_server.map_err(|source| TimelineError::Server { source })?;
        if let Some(node) = node {
            // A node on another machine, or with another kubelet, need not answer.
            match steps(&client, &format!("/api/v1/nodes/{node}/proxy/debug/steps?{query}")).await {
                Ok(of_node) => all.extend(of_node),
                Err(error) => eprintln!("the steps on node {node} are missing: {error}"),
            }
        }
        let all = in_order(all);
        if self.json {
            println!("{}", ferrite_json::to_string(&Steps { steps: all })?);
        } else {
            print!("{}", render(&chain, &all));
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn api(client: &kube::Client, gvk: &GroupVersionKind, namespace: Option<&str>) -> Api<DynamicObject> {
    let resource = ApiResource::from_gvk(gvk);
    match namespace {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &resource),
        None => Api::all_with(client.clone(), &resource),
    }
}

async fn steps(client: &kube::Client, path: &str) -> Result<Vec<Step>, kube::Error> {
    let request = Request::get(path).body(Vec::new()).map_err(kube::Error::HttpError)?;
    Ok(client.request::<Steps>(request).await?.steps)
}

fn label(gvk: &GroupVersionKind, name: &str) -> String {
    format!("{}/{name}", gvk.kind.to_lowercase())
}

fn link(gvk: &GroupVersionKind, name: &str, object: &DynamicObject) -> Link {
    Link { uid: object.metadata.uid.clone().unwrap_or_default(), label: label(gvk, name) }
}

fn controller_of(object: &DynamicObject) -> Option<OwnerReference> {
    let owners = object.metadata.owner_references.iter().flatten();
    owners.into_iter().find(|owner| owner.controller == Some(true)).cloned()
}

/// By time. A server and a node of one process tell the same steps.
fn in_order(mut steps: Vec<Step>) -> Vec<Step> {
    steps.sort_by(|a, b| {
        (a.began, a.took, &a.component, &a.name).cmp(&(b.began, b.took, &b.component, &b.name))
    });
    steps.dedup();
    steps
}

fn render(chain: &[Link], steps: &[Step]) -> String {
    let Some(first) = steps.first() else {
        return "no step is remembered: the object may be too old, or the server was restarted since\n"
            .to_owned();
    };
    let label_of =
        |uid: &str| chain.iter().find(|link| link.uid == uid).map_or("", |link| link.label.as_str());
    let width = |texts: &mut dyn Iterator<Item = usize>| texts.max().unwrap_or(0);
    let component = width(&mut steps.iter().map(|step| step.component.len()).chain([9]));
    let name = width(&mut steps.iter().map(|step| step.name.len()).chain([4]));
    let object = width(&mut chain.iter().map(|link| link.label.len()).chain([6]));
    let mut out = String::new();
    let _ = writeln!(
        out,
        "{:>12} {:>12}  {:<component$}  {:<name$}  {:<object$}  DETAIL",
        "AT", "TOOK", "COMPONENT", "STEP", "OBJECT"
    );
    for step in steps {
        let line = format!(
            "{:>12} {:>12}  {:<component$}  {:<name$}  {:<object$}  {}",
            milliseconds(step.began - first.began),
            milliseconds(step.took),
            step.component,
            step.name,
            label_of(&step.uid),
            step.detail,
        );
        let _ = writeln!(out, "{}", line.trim_end());
    }
    out
}

fn milliseconds(micros: u64) -> String {
    format!("{}.{:03} ms", micros / 1000, micros % 1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(uid: &str, began: u64, took: u64, component: &str, name: &str, detail: &str) -> Step {
        let text = |text: &str| text.to_owned();
        let (uid, component, name, detail) = (text(uid), text(component), text(name), text(detail));
        Step { uid, began, took, component, name, detail }
    }

    #[test]
    fn steps_of_the_chain_stand_in_order_and_once() {
        let chain = [
            Link { uid: "p".into(), label: "pod/web-1".into() },
            Link { uid: "r".into(), label: "replicaset/web".into() },
        ];
        let create = step("p", 1_000_200, 800, "apiserver", "create", "pods web-1");
        let steps = in_order(vec![
            step("p", 1_004_000, 12_345, "kubelet", "sandbox", ""),
            create.clone(),
            step("r", 1_000_000, 2100, "replicaset-controller", "reconcile", ""),
            create,
        ]);
        let expected = "          AT         TOOK  COMPONENT              STEP       OBJECT          DETAIL
    0.000 ms     2.100 ms  replicaset-controller  reconcile  replicaset/web
    0.200 ms     0.800 ms  apiserver              create     pod/web-1       pods web-1
    4.000 ms    12.345 ms  kubelet                sandbox    pod/web-1
";
        assert_eq!(render(&chain, &steps), expected);
    }

    #[test]
    fn kinds_go_by_their_usual_names() {
        for (given, kind) in [("po", "Pod"), ("Deployment", "Deployment"), ("cj", "CronJob")] {
            assert_eq!(kind_of(given).unwrap().0.kind, kind);
        }
        assert!(kind_of("secret").unwrap_err().to_string().contains("pod, service"));
    }
}
