//! Reports on the Node that the machine ran out of memory and the kernel ended a process for it.
//!
//! The kernel's log tells. Processes that exceeded the limit of their own container are that container's matter: its
//! state says `OOMKilled`.

use ferrite_client::{EventRecorder, EventType};
use k8s_openapi::api::core::v1::ObjectReference;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use tokio::io::unix::AsyncFd;

/// The kernel returns one message for each read, and none is larger.
const MAX_RECORD: usize = 8192;

/// A process that the kernel ended because the machine had no memory left.
#[derive(Debug, PartialEq, Eq)]
struct SystemOom {
    process: String,
    pid: i32,
}

impl SystemOom {
    fn message(&self) -> String {
        format!("System OOM encountered, victim process: {}, pid: {}", self.process, self.pid)
    }
}

/// Reads one record of `/dev/kmsg`. Records of processes, and kills within a control group's limit, are none.
fn parse(record: &str) -> Option<SystemOom> {
    let (head, text) = record.split_once(';')?;
    let priority: u32 = head.split(',').next()?.parse().ok()?;
    // The facility is above the three bits of the level. The kernel's own is zero, and a process cannot set that.
    if priority >> 3 != 0 {
        return None;
    }
    let rest = text.lines().next()?.strip_prefix("oom-kill:constraint=")?;
    let after = rest.split_once(",mems_allowed=")?.1;
    // A list of memory nodes, such as `0-1,3`.
    let after = after.trim_start_matches(|c: char| c.is_ascii_digit() || matches!(c, '-' | ','));
    let rest = after.strip_prefix("global_oom,")?;
    // From the end: the name of a process may have commas in it.
    let (rest, _uid) = rest.rsplit_once(",uid=")?;
    let (rest, pid) = rest.rsplit_once(",pid=")?;
    let (_, process) = rest.split_once(",task=")?;
    Some(SystemOom { process: process.to_owned(), pid: pid.parse().ok()? })
}

/// Follows the kernel's log from its end on.
pub(crate) struct OomWatcher {
    log: AsyncFd<File>,
    recorder: EventRecorder,
    node: ObjectReference,
}

impl OomWatcher {
    pub(crate) fn open(path: &Path, recorder: EventRecorder, node: ObjectReference) -> io::Result<Self> {
        let mut file =
            File::options().read(true).custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC).open(path)?;
        file.seek(SeekFrom::End(0))?;
        Self::following(file, recorder, node)
    }

    fn following(file: File, recorder: EventRecorder, node: ObjectReference) -> io::Result<Self> {
        // SAFETY: the file owns its descriptor and keeps it for as long as it is registered.
        let log = unsafe { AsyncFd::register(file)? };
        Ok(Self { log, recorder, node })
    }

    pub(crate) async fn run(self) {
        let mut record = vec![0; MAX_RECORD];
        loop {
            let Ok(mut ready) = self.log.readable().await else { return };
            match ready.try_io(|log| log.get_ref().read(&mut record)) {
                Err(_would_block) => {}
                Ok(Ok(0)) => return,
                Ok(Ok(length)) => {
                    if let Some(oom) = parse(&String::from_utf8_lossy(&record[..length])) {
                        let message = oom.message();
                        self.recorder.event(&self.node, EventType::Warning, "SystemOOM", message);
                    }
                }
                // Messages came faster than they were read, and the oldest are gone.
                Ok(Err(error)) if error.raw_os_error() == Some(libc::EPIPE) => {}
                Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(Err(error)) => {
                    tracing::warn!(%error, "cannot read the kernel's log any more");
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_machines_own_shortage_is_reported() {
        let global = "constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,\
                      task_memcg=/kubepods/pod1/c,task=stress,pid=4242,uid=0";
        let group = "constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,\
                     oom_memcg=/kubepods/pod1/c,task_memcg=/kubepods/pod1/c,task=stress,pid=4242,uid=0";
        let oom = |process: &str| Some(SystemOom { process: process.into(), pid: 4242 });
        for (record, expected) in [
            (format!("6,812,5099,-;oom-kill:{global}\n SUBSYSTEM=x\n"), oom("stress")),
            (format!("6,812,5099,-;oom-kill:{group}\n"), None),
            (format!("6,1,1,-;oom-kill:{}\n", global.replace("allowed=0", "allowed=0-1,3")), oom("stress")),
            // A process wrote this.
            (format!("14,812,5099,-;oom-kill:{global}\n"), None),
            (
                format!("6,1,1,-;oom-kill:{}\n", global.replace("task=stress", "task=a,pid=1,uid=0")),
                oom("a,pid=1,uid=0"),
            ),
            // A process of a group calls itself what the kernel says.
            (format!("6,1,1,-;oom-kill:{}\n", group.replace("task=stress", "task=,global_oom,")), None),
            (format!("6,1,1,-;oom-kill:{}\n", global.replace("4242", "many")), None),
            ("6,1,1,-;stress invoked oom-killer: gfp_mask=0xcc0".into(), None),
            ("garbage".into(), None),
            (String::new(), None),
        ] {
            assert_eq!(parse(&record), expected, "{record}");
        }
    }

    #[tokio::test]
    async fn an_event_says_which_process_ended() {
        use std::io::Write;
        let api = crate::testing::FakeApi::new();
        let scope = ferrite_client::Scope::new();
        let recorder = ferrite_client::Events::start(api.client(), &scope).recorder("kubelet", Some("node"));
        // Each write is one read, as the kernel's log has it.
        let flags = nix::fcntl::OFlag::O_DIRECT | nix::fcntl::OFlag::O_NONBLOCK;
        let (read, write) = nix::unistd::pipe2(flags).unwrap();
        let node = crate::node::reference("node");
        let watcher = OomWatcher::following(File::from(read), recorder, node).unwrap();
        scope.spawn(watcher.run());
        let mut write = File::from(write);
        write.write_all(b"6,1,1,-;something else\n").unwrap();
        let oom = "constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/,task=x,pid=7,uid=0";
        write.write_all(format!("6,2,2,-;oom-kill:{oom}\n").as_bytes()).unwrap();
        let told = api.until("an event comes", |api| {
            api.list("events").into_iter().find(|event| event["reason"] == "SystemOOM")
        });
        let told = told.await;
        assert_eq!(told["message"], "System OOM encountered, victim process: x, pid: 7");
        assert_eq!(told["involvedObject"]["kind"], "Node");
        assert_eq!(told["type"], "Warning");
        scope.shutdown().await;
    }
}
