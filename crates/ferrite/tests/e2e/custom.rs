//! Custom resources as a person meets them: a definition, its objects in two versions, and a restart in between.

use crate::server::*;
use crate::world::*;

const DEFINITION: &str = r#"
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: crontabs.stable.example.com}
spec:
  group: stable.example.com
  scope: Namespaced
  names: {plural: crontabs, singular: crontab, kind: CronTab, shortNames: [ct]}
  versions:
  - name: v1
    served: true
    storage: true
    schema:
      openAPIV3Schema:
        type: object
        description: A tab of cron.
        properties:
          spec:
            type: object
            properties:
              cronSpec: {type: string, description: When it runs.}
              replicas: {type: integer, default: 1}
            x-kubernetes-validations:
            - {rule: self.replicas < 10, message: too many}
    additionalPrinterColumns:
    - {name: Spec, type: string, jsonPath: .spec.cronSpec}
  - name: v1beta1
    served: true
    storage: false
    schema:
      openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}
"#;

const OBJECT: &str = r#"
apiVersion: stable.example.com/v1
kind: CronTab
metadata: {name: mine, namespace: default}
spec: {cronSpec: "5 * * * *"}
"#;

fn manifest(world: &World, name: &str, text: &str) -> String {
    world.write(name, text).to_str().unwrap().to_owned()
}

#[test]
fn a_definition_is_served_explained_kept_and_removed() {
    let world = World::prepare(&[]);
    let server = Server::start(&world, &[]);
    kubectl(&world, &["apply", "-f", &manifest(&world, "crd.yaml", DEFINITION)]);
    let established = "--for=condition=Established";
    let name = "crd/crontabs.stable.example.com";
    kubectl(&world, &["wait", established, name, "--timeout=60s"]);
    let object = manifest(&world, "object.yaml", OBJECT);
    kubectl(&world, &["apply", "-f", &object]);
    assert!(kubectl(&world, &["get", "ct"]).contains("5 * * * *"));
    let in_beta = [
        "get",
        "crontabs.v1beta1.stable.example.com",
        "mine",
        "-o",
        "jsonpath={.apiVersion} {.spec.replicas}",
    ];
    assert_eq!(kubectl(&world, &in_beta), "stable.example.com/v1beta1 1");
    let explained = kubectl(&world, &["explain", "crontab.spec", "--api-version=stable.example.com/v1"]);
    assert!(explained.contains("When it runs."), "{explained}");

    // Killed in the middle of its life, the definition is whole again at once.
    server.stop();
    let server = Server::start(&world, &[]);
    assert_eq!(kubectl(&world, &in_beta), "stable.example.com/v1beta1 1");
    kubectl(&world, &["patch", "ct", "mine", "--type=merge", "-p", r#"{"spec":{"replicas":3}}"#]);
    assert_eq!(kubectl(&world, &in_beta), "stable.example.com/v1beta1 3");
    kubectl(&world, &["apply", "--server-side", "--force-conflicts", "-f", &object]);
    kubectl(&world, &["delete", "ct", "mine"]);
    kubectl(&world, &["apply", "-f", &object]);
    kubectl(&world, &["delete", "crd", "crontabs.stable.example.com"]);
    assert!(!kubectl(&world, &["api-resources", "--cached=false"]).contains("crontabs"));
    server.stop();
}
