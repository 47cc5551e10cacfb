use super::*;
use ferrite_cri::v1::{KeyValue, Mount as CriMount};

fn input<'a>(config: &'a ContainerConfig, image: &'a ImageConfigView, identity: &'a Identity) -> Input<'a> {
    Input {
        config,
        image,
        identity,
        hostname: "web-0",
        cgroup: "/ferrite/pod1/c1".into(),
        rootfs: "/state/rootfs".into(),
        shm: "/run/shm".into(),
        resolv_conf: Some("/run/resolv.conf".into()),
        hostname_file: None,
        hosts_file: Some("/run/hosts".into()),
        network_namespace: Some("/run/netns".into()),
        own_pid: true,
        cgroup_v2: false,
        devices: vec![],
        user_namespace: None,
        apparmor: None,
    }
}

#[test]
fn commands() {
    let image =
        ImageConfigView { entrypoint: vec!["/e".into()], cmd: vec!["c".into()], ..Default::default() };
    let case = |command: &[&str], args: &[&str], image: &ImageConfigView| {
        let owned = |v: &[&str]| v.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>();
        let config = ContainerConfig { command: owned(command), args: owned(args), ..Default::default() };
        super::command(&config, image).map(|all| all.join(" "))
    };
    assert_eq!(case(&[], &[], &image), Ok("/e c".into()));
    assert_eq!(case(&[], &["x"], &image), Ok("/e x".into()));
    assert_eq!(case(&["/k"], &[], &image), Ok("/k".into()));
    assert_eq!(case(&["/k"], &["x"], &image), Ok("/k x".into()));
    assert_eq!(case(&[], &[], &ImageConfigView::default()), Err(SpecError::NoCommand));
}

#[test]
fn environment_is_image_then_container() {
    let image = ImageConfigView { env: vec!["PATH=/img".into(), "A=1".into()], ..Default::default() };
    let config = ContainerConfig {
        envs: vec![KeyValue { key: "A".into(), value: b"2".to_vec() }],
        tty: true,
        ..Default::default()
    };
    let identity = Identity { home: "/root".into(), ..Default::default() };
    assert_eq!(
        environment(&input(&config, &image, &identity)),
        ["PATH=/img", "HOSTNAME=web-0", "TERM=xterm", "HOME=/root", "A=2"]
    );
}

#[test]
fn own_mounts_replace_standard_ones_and_parents_come_first() {
    let mount = |path: &str| CriMount {
        container_path: path.into(),
        host_path: "/h".into(),
        readonly: true,
        ..Default::default()
    };
    let config = ContainerConfig {
        mounts: vec![mount("/data/deep/er"), mount("/data"), mount("/dev/shm/")],
        command: vec!["x".into()],
        ..Default::default()
    };
    let (image, identity) = (ImageConfigView::default(), Identity::default());
    let list = mounts::mounts(&input(&config, &image, &identity), false).unwrap();
    let shown: Vec<_> = list.iter().map(|m| m.destination().display().to_string()).collect();
    assert_eq!(
        shown,
        [
            "/proc",
            "/dev",
            "/dev/pts",
            "/dev/mqueue",
            "/sys",
            "/sys/fs/cgroup",
            "/etc/resolv.conf",
            "/etc/hosts",
            "/data",
            "/dev/shm",
            "/data/deep/er"
        ]
    );
    assert_eq!(list[8].options().as_ref().unwrap(), &["rbind", "rprivate", "ro"]);
    let config = ContainerConfig { mounts: vec![mount("data")], ..Default::default() };
    let error = mounts::mounts(&input(&config, &image, &identity), false).unwrap_err();
    assert_eq!(error, SpecError::MountPath("data".into()));
}

#[test]
fn nobody_asked_for_swap() {
    let resources = LinuxContainerResources { memory_limit_in_bytes: 1 << 20, ..Default::default() };
    let memory = resources_of(&resources, &[], false).memory().unwrap();
    assert_eq!((memory.limit(), memory.swap()), (Some(1 << 20), Some(1 << 20)));
}
