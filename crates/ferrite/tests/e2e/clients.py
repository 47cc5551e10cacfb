"""The Python client against a cluster: every step is asserted, and the name of each passed step is printed."""

import json
import sys
import time

from kubernetes import client, config, dynamic, watch
from kubernetes.client.exceptions import ApiException
from kubernetes.stream import portforward, stream

NAMESPACE = "default"
IMAGE = "ferrite.local/tools"
STEPS = []


def step(function):
    STEPS.append(function)
    return function


def refused(status, reason, function, *arguments, **named):
    """The Status object of a call that must be refused."""
    try:
        function(*arguments, **named)
    except ApiException as error:
        body = json.loads(error.body)
        assert error.status == status, (error.status, body)
        assert (body["kind"], body["status"], body["code"]) == ("Status", "Failure", status), body
        assert body["reason"] == reason, body
        return body
    raise AssertionError(f"{function.__name__} was not refused")


def config_map(name, **data):
    return client.V1ConfigMap(metadata=client.V1ObjectMeta(name=name, labels={"made-by": "python"}), data=data)


def pod_template(*arguments):
    container = client.V1Container(name="c", image=IMAGE, args=list(arguments))
    return client.V1PodTemplateSpec(
        metadata=client.V1ObjectMeta(labels={"app": "python"}),
        spec=client.V1PodSpec(containers=[container], termination_grace_period_seconds=0),
    )


def await_pod(core, name, accept):
    selector = f"metadata.name={name}"
    for event in watch.Watch().stream(core.list_namespaced_pod, NAMESPACE, field_selector=selector, timeout_seconds=50):
        if accept(event["object"]):
            return event["object"]
    raise AssertionError(f"pod {name} did not come to be as expected")


def is_ready(pod):
    return any(c.type == "Ready" and c.status == "True" for c in pod.status.conditions or [])


@step
def version_and_discovery():
    assert client.VersionApi().get_code().git_version.startswith("v1.36.")
    assert "v1" in client.CoreApi().get_api_versions().versions
    groups = {group.name: group for group in client.ApisApi().get_api_versions().groups}
    assert groups["apps"].preferred_version.group_version == "apps/v1"
    resources = {resource.name for resource in client.AppsV1Api().get_api_resources().resources}
    assert {"deployments", "deployments/scale", "deployments/status"} <= resources


@step
def config_maps():
    core = client.CoreV1Api()
    made = core.create_namespaced_config_map(NAMESPACE, config_map("a", colour="blue"))
    assert made.metadata.uid and made.metadata.creation_timestamp.tzinfo
    listed = core.list_namespaced_config_map(NAMESPACE, label_selector="made-by=python")
    assert [item.metadata.name for item in listed.items] == ["a"]
    patched = core.patch_namespaced_config_map("a", NAMESPACE, {"data": {"colour": "red", "size": "1"}})
    assert patched.data == {"colour": "red", "size": "1"}
    # A list is sent as a JSON patch.
    operations = [{"op": "remove", "path": "/data/size"}]
    assert core.patch_namespaced_config_map("a", NAMESPACE, operations).data == {"colour": "red"}
    patched.data = {"colour": "green"}
    body = refused(409, "Conflict", core.replace_namespaced_config_map, "a", NAMESPACE, patched)
    assert "the object has been modified" in body["message"], body
    patched.metadata.resource_version = None
    assert core.replace_namespaced_config_map("a", NAMESPACE, patched).data == {"colour": "green"}
    for number in range(5):
        core.create_namespaced_config_map(NAMESPACE, config_map(f"page-{number}"))
    names, token = [], None
    while token != "":
        page = core.list_namespaced_config_map(NAMESPACE, label_selector="made-by=python", limit=2, _continue=token)
        assert len(page.items) <= 2
        names += [item.metadata.name for item in page.items]
        token = page.metadata._continue or ""
    assert names == ["a"] + [f"page-{number}" for number in range(5)], names
    status = core.delete_namespaced_config_map("a", NAMESPACE)
    assert (status.status, status.details.name) == ("Success", "a"), status
    core.delete_collection_namespaced_config_map(NAMESPACE, label_selector="made-by=python")
    assert not core.list_namespaced_config_map(NAMESPACE, label_selector="made-by=python").items


@step
def errors():
    core, apps = client.CoreV1Api(), client.AppsV1Api()
    body = refused(404, "NotFound", core.read_namespaced_config_map, "none", NAMESPACE)
    assert body["message"] == 'configmaps "none" not found', body
    assert body["details"] == {"name": "none", "kind": "configmaps"}, body
    core.create_namespaced_config_map(NAMESPACE, config_map("twice"))
    body = refused(409, "AlreadyExists", core.create_namespaced_config_map, NAMESPACE, config_map("twice"))
    assert body["message"] == 'configmaps "twice" already exists', body
    core.delete_namespaced_config_map("twice", NAMESPACE)
    spec = client.V1DeploymentSpec(
        selector=client.V1LabelSelector(match_labels={"app": "other"}), template=pod_template("sleep")
    )
    wrong = client.V1Deployment(metadata=client.V1ObjectMeta(name="wrong"), spec=spec)
    body = refused(422, "Invalid", apps.create_namespaced_deployment, NAMESPACE, wrong)
    assert body["details"]["causes"][0]["field"] == "spec.template.metadata.labels", body
    assert "`selector` does not match template `labels`" in body["message"], body
    refused(404, "NotFound", core.create_namespaced_config_map, "no-such-namespace", config_map("a"))
    refused(400, "BadRequest", core.create_namespaced_config_map, NAMESPACE, {"kind": "Secret", "apiVersion": "v1"})


@step
def dry_run():
    core = client.CoreV1Api()
    made = core.create_namespaced_config_map(NAMESPACE, config_map("unmade", a="b"), dry_run="All")
    assert made.metadata.uid and made.data == {"a": "b"}
    refused(404, "NotFound", core.read_namespaced_config_map, "unmade", NAMESPACE)
    core.create_namespaced_config_map(NAMESPACE, config_map("kept", a="b"))
    assert core.patch_namespaced_config_map("kept", NAMESPACE, {"data": {"a": "c"}}, dry_run="All").data == {"a": "c"}
    core.delete_namespaced_config_map("kept", NAMESPACE, dry_run="All")
    assert core.read_namespaced_config_map("kept", NAMESPACE).data == {"a": "b"}
    core.delete_namespaced_config_map("kept", NAMESPACE)


@step
def watching():
    core = client.CoreV1Api()
    start = core.list_namespaced_config_map(NAMESPACE).metadata.resource_version
    core.create_namespaced_config_map(NAMESPACE, config_map("seen", a="1"))
    core.patch_namespaced_config_map("seen", NAMESPACE, {"data": {"a": "2"}})
    core.delete_namespaced_config_map("seen", NAMESPACE)
    seen, watcher = [], watch.Watch()
    for event in watcher.stream(core.list_namespaced_config_map, NAMESPACE, resource_version=start, timeout_seconds=20):
        assert isinstance(event["object"], client.V1ConfigMap)
        seen.append((event["type"], event["object"].data))
        if event["type"] == "DELETED":
            watcher.stop()
    assert seen == [("ADDED", {"a": "1"}), ("MODIFIED", {"a": "2"}), ("DELETED", {"a": "2"})], seen
    # Nothing happens any more: the server ends the watch, and the client ends with it.
    now = core.list_namespaced_config_map(NAMESPACE).metadata.resource_version
    quiet = watch.Watch().stream(
        core.list_namespaced_config_map, NAMESPACE, resource_version=now, timeout_seconds=1
    )
    assert list(quiet) == []
    tables = watch.Watch().stream(
        core.list_namespaced_config_map, NAMESPACE, label_selector="made-by=nobody", timeout_seconds=1
    )
    assert list(tables) == []


@step
def dynamic_client():
    cluster = dynamic.DynamicClient(client.ApiClient())
    secrets = cluster.resources.get(api_version="v1", kind="Secret")
    body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "d"}, "stringData": {"key": "value"}}
    assert secrets.create(body=body, namespace=NAMESPACE).data.key == "dmFsdWU="
    assert secrets.get(name="d", namespace=NAMESPACE).type == "Opaque"
    merge = {"metadata": {"annotations": {"note": "yes"}}}
    content_type = "application/merge-patch+json"
    patched = secrets.patch(body=merge, name="d", namespace=NAMESPACE, content_type=content_type)
    assert patched.metadata.annotations.note == "yes"
    # This client sends an apply only as text.
    apply = json.dumps({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "d", "labels": {"a": "b"}}})
    applied = secrets.server_side_apply(body=apply, name="d", namespace=NAMESPACE, field_manager="python")
    assert applied.metadata.labels.a == "b"
    managers = {(entry.manager, entry.operation) for entry in applied.metadata.managedFields}
    assert ("python", "Apply") in managers, managers
    secrets.delete(name="d", namespace=NAMESPACE)
    try:
        secrets.get(name="d", namespace=NAMESPACE)
    except dynamic.exceptions.NotFoundError as error:
        assert "not found" in error.summary()
    else:
        raise AssertionError("the secret is still there")
    deployments = cluster.resources.search(kind="Deployment")
    assert {resource.group_version for resource in deployments} >= {"apps/v1"}


@step
def workloads():
    apps, batch, core = client.AppsV1Api(), client.BatchV1Api(), client.CoreV1Api()
    selector = client.V1LabelSelector(match_labels={"app": "python"})
    spec = client.V1DeploymentSpec(replicas=1, selector=selector, template=pod_template("sleep"))
    deployment = client.V1Deployment(metadata=client.V1ObjectMeta(name="d"), spec=spec)
    made = apps.create_namespaced_deployment(NAMESPACE, deployment)
    assert made.spec.strategy.rolling_update.max_surge == "25%"
    assert apps.read_namespaced_deployment_scale("d", NAMESPACE).spec.replicas == 1
    scaled = apps.patch_namespaced_deployment_scale("d", NAMESPACE, {"spec": {"replicas": 2}})
    assert scaled.spec.replicas == 2
    watcher = watch.Watch()
    available = None
    for event in watcher.stream(apps.list_namespaced_deployment, NAMESPACE, timeout_seconds=50):
        available = event["object"].status.available_replicas
        if available == 2:
            watcher.stop()
    assert available == 2
    image = {"spec": {"template": {"spec": {"containers": [{"name": "c", "env": [{"name": "A", "value": "b"}]}]}}}}
    container = apps.patch_namespaced_deployment("d", NAMESPACE, image).spec.template.spec.containers[0]
    assert (container.image, container.env[0].value) == (IMAGE, "b"), "a strategic patch merges by name"
    apps.delete_namespaced_deployment("d", NAMESPACE, propagation_policy="Foreground")

    template = pod_template("echo", "done")
    template.spec.restart_policy = "Never"
    job = client.V1Job(metadata=client.V1ObjectMeta(name="j"), spec=client.V1JobSpec(template=template, suspend=True))
    made = batch.create_namespaced_job(NAMESPACE, job)
    assert made.spec.selector.match_labels["batch.kubernetes.io/controller-uid"] == made.metadata.uid
    made.status.active = 3
    assert batch.read_namespaced_job_status("j", NAMESPACE).spec.backoff_limit == 6
    batch.delete_namespaced_job("j", NAMESPACE, propagation_policy="Background")
    cron = client.V1CronJob(
        metadata=client.V1ObjectMeta(name="c"),
        spec=client.V1CronJobSpec(
            schedule="*/5 * * * *", job_template=client.V1JobTemplateSpec(spec=client.V1JobSpec(template=template))
        ),
    )
    assert batch.create_namespaced_cron_job(NAMESPACE, cron).spec.concurrency_policy == "Allow"
    batch.delete_namespaced_cron_job("c", NAMESPACE)
    token = core.create_namespaced_service_account_token(
        "default", NAMESPACE, client.AuthenticationV1TokenRequest(spec=client.V1TokenRequestSpec(audiences=[]))
    )
    assert token.status.token.count(".") == 2


@step
def pods():
    core = client.CoreV1Api()
    template = pod_template("http", "--text=hello")
    core.create_namespaced_pod(
        NAMESPACE, client.V1Pod(metadata=client.V1ObjectMeta(name="p"), spec=template.spec)
    )
    await_pod(core, "p", is_ready)
    # A pod without a probe is ready before its program has said anything: follow the log until it has.
    lines = watch.Watch().stream(core.read_namespaced_pod_log, "p", NAMESPACE)
    assert next(lines) == "serving on port 8080"
    assert core.read_namespaced_pod_log("p", NAMESPACE) == "serving on port 8080\n"
    core = client.CoreV1Api(client.ApiClient())
    exec_ = core.connect_get_namespaced_pod_exec
    printed = stream(
        exec_, "p", NAMESPACE, command=["/ferrite", "tools", "echo", "from", "python"],
        stdin=False, stdout=True, stderr=True, tty=False,
    )
    assert printed == "from python\n", printed
    session = stream(
        exec_, "p", NAMESPACE, command=["/ferrite", "tools", "cat"],
        stdin=True, stdout=True, stderr=True, tty=False, _preload_content=False,
    )
    session.write_stdin("through and back\n")
    assert session.readline_stdout(timeout=20) == "through and back"
    session.close()
    session = stream(
        exec_, "p", NAMESPACE, command=["/ferrite", "tools", "exit", "7"],
        stdin=False, stdout=True, stderr=True, tty=False, _preload_content=False,
    )
    session.run_forever(timeout=20)
    assert session.returncode == 7, session.returncode
    forwarded = portforward(core.connect_get_namespaced_pod_portforward, "p", NAMESPACE, ports="8080,9")
    socket = forwarded.socket(8080)
    socket.settimeout(20)
    socket.sendall(b"GET / HTTP/1.0\r\nHost: p\r\n\r\n")
    answer = b""
    while b"hello p" not in answer:
        piece = socket.recv(1024)
        assert piece, answer
        answer += piece
    assert answer.startswith(b"HTTP/1."), answer
    # The client's own thread takes errors as they come, and tells nobody.
    for _ in range(200):
        if forwarded.error(9):
            break
        time.sleep(0.1)
    assert forwarded.error(8080) is None and "localhost:9" in forwarded.error(9), forwarded.error(9)
    core = client.CoreV1Api()
    core.delete_namespaced_pod("p", NAMESPACE)
    refused(404, "NotFound", core.read_namespaced_pod_log, "none", NAMESPACE)
    events = core.list_namespaced_event(NAMESPACE, field_selector="involvedObject.name=p,reason=Started")
    assert events.items[0].source.component == "kubelet", events


def main():
    config.load_kube_config()
    wanted = sys.argv[1:]
    for function in STEPS:
        if not wanted or function.__name__ in wanted:
            function()
            print(function.__name__, flush=True)


main()
