//! System call filters: our default profile, profiles from files, and their compilation.

use std::collections::{BTreeMap, BTreeSet};

use oci_spec::runtime::{
    LinuxSeccomp, LinuxSeccompAction as Action, LinuxSeccompArg, LinuxSeccompArgBuilder,
    LinuxSeccompOperator as Operator, LinuxSyscall,
};
use serde_json::{Value, json};

use super::SpecError;

/// Calls any program may make.
const ALLOWED: &str = "
accept accept4 access adjtimex alarm bind brk cachestat capget capset chdir chmod chown clock_adjtime
clock_getres clock_gettime clock_nanosleep close close_range connect copy_file_range creat dup dup2 dup3
epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait epoll_wait_old eventfd
eventfd2 execve execveat exit exit_group faccessat faccessat2 fadvise64 fallocate fanotify_mark fchdir fchmod
fchmodat fchmodat2 fchown fchownat fcntl fdatasync fgetxattr flistxattr flock fork fremovexattr fsetxattr fstat
fstatfs fsync ftruncate futex futex_requeue futex_wait futex_waitv futex_wake futimesat getcpu getcwd getdents
getdents64 getegid geteuid getgid getgroups getitimer getpeername getpgid getpgrp getpid getppid getpriority
getrandom getresgid getresuid getrlimit get_robust_list getrusage getsid getsockname getsockopt get_thread_area
gettid gettimeofday getuid getxattr getxattrat inotify_add_watch inotify_init inotify_init1 inotify_rm_watch
io_cancel ioctl io_destroy io_getevents io_pgetevents ioprio_get ioprio_set io_setup io_submit kill
landlock_add_rule landlock_create_ruleset landlock_restrict_self lchown lgetxattr link linkat listen listmount
listxattr listxattrat llistxattr lremovexattr lseek lsetxattr lstat madvise map_shadow_stack membarrier
memfd_create memfd_secret mincore mkdir mkdirat mknod mknodat mlock mlock2 mlockall mmap mprotect mq_getsetattr
mq_notify mq_open mq_timedreceive mq_timedsend mq_unlink mremap mseal msgctl msgget msgrcv msgsnd msync munlock
munlockall munmap name_to_handle_at nanosleep newfstatat open openat openat2 pause pidfd_open
pidfd_send_signal pipe pipe2 pkey_alloc pkey_free pkey_mprotect poll ppoll prctl pread64 preadv preadv2 prlimit64
process_mrelease pselect6 pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv recvfrom recvmmsg
recvmsg remap_file_pages removexattr removexattrat rename renameat renameat2 restart_syscall rmdir rseq
rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait
rt_tgsigqueueinfo sched_getaffinity sched_getattr sched_getparam sched_get_priority_max sched_get_priority_min
sched_getscheduler sched_rr_get_interval sched_setaffinity sched_setattr sched_setparam sched_setscheduler
sched_yield seccomp select semctl semget semop semtimedop sendfile sendmmsg sendmsg sendto setfsgid setfsuid
setgid setgroups setitimer setpgid setpriority setregid setresgid setresuid setreuid setrlimit set_robust_list
setsid setsockopt set_thread_area set_tid_address setuid setxattr setxattrat shmat shmctl shmdt shmget shutdown
sigaltstack signalfd signalfd4 socketpair splice stat statfs statmount statx symlink symlinkat sync sync_file_range
syncfs sysinfo tee tgkill time timer_create timer_delete timer_getoverrun timer_gettime timer_settime
timerfd_create timerfd_gettime timerfd_settime times tkill truncate umask uname unlink unlinkat utime utimensat
utimes vfork vmsplice wait4 waitid write writev arch_prctl modify_ldt uretprobe process_vm_readv
process_vm_writev ptrace";

/// Calls that make sense only with a capability, by its number.
const WITH_CAPABILITY: &[(u32, &str)] = &[
    (2, "open_by_handle_at"),
    (
        21,
        "bpf clone clone3 fanotify_init fsconfig fsmount fsopen fspick lookup_dcookie mount mount_setattr \
         move_mount open_tree perf_event_open quotactl quotactl_fd setdomainname sethostname setns syslog umount \
         umount2 unshare",
    ),
    (22, "reboot"),
    (18, "chroot"),
    (16, "delete_module init_module finit_module"),
    (20, "acct"),
    (19, "kcmp pidfd_getfd process_madvise"),
    (17, "iopl ioperm"),
    (25, "settimeofday stime clock_settime clock_settime64"),
    (26, "vhangup"),
    (23, "get_mempolicy mbind set_mempolicy set_mempolicy_home_node"),
    (34, "syslog"),
    (39, "bpf"),
    (38, "perf_event_open"),
];

const SYS_ADMIN: u32 = 21;
/// Every flag of clone that makes a namespace.
const NAMESPACE_FLAGS: u64 = 0x7e02_0000;
/// The address family of virtual machine sockets, which know no network namespaces.
const AF_VSOCK: u64 = 40;

fn rule(
    names: &[&str],
    action: Action,
    errno: Option<u32>,
    args: Option<Vec<LinuxSeccompArg>>,
) -> LinuxSyscall {
    let mut rule = LinuxSyscall::default();
    rule.set_names(names.iter().map(|name| (*name).to_owned()).collect())
        .set_action(action)
        .set_errno_ret(errno)
        .set_args(args);
    rule
}

fn argument(index: usize, op: Operator, value: u64, value_two: Option<u64>) -> LinuxSeccompArg {
    let mut builder = LinuxSeccompArgBuilder::default().index(index).op(op).value(value);
    if let Some(second) = value_two {
        builder = builder.value_two(second);
    }
    // Every field has a default: building cannot fail.
    builder.build().unwrap_or_default()
}

/// The profile `RuntimeDefault` means, for a container with these capabilities (by number).
pub fn default_profile(capabilities: &BTreeSet<u32>) -> LinuxSeccomp {
    let names: Vec<&str> = ALLOWED.split_whitespace().collect();
    let mut rules = vec![rule(&names, Action::ScmpActAllow, None, None)];
    rules.push(rule(
        &["socket"],
        Action::ScmpActAllow,
        None,
        Some(vec![argument(0, Operator::ScmpCmpNe, AF_VSOCK, None)]),
    ));
    for personality in [0, 0x0008, 0x2_0000, 0x2_0008, 0xffff_ffff] {
        let same = argument(0, Operator::ScmpCmpEq, personality, None);
        rules.push(rule(&["personality"], Action::ScmpActAllow, None, Some(vec![same])));
    }
    for (capability, names) in WITH_CAPABILITY {
        if capabilities.contains(capability) {
            let names: Vec<&str> = names.split_whitespace().collect();
            rules.push(rule(&names, Action::ScmpActAllow, None, None));
        }
    }
    if !capabilities.contains(&SYS_ADMIN) {
        let plain = argument(0, Operator::ScmpCmpMaskedEq, NAMESPACE_FLAGS, Some(0));
        rules.push(rule(&["clone"], Action::ScmpActAllow, None, Some(vec![plain])));
        // Its flags are behind a pointer the filter cannot see; "not there" makes libraries use clone.
        rules.push(rule(&["clone3"], Action::ScmpActErrno, Some(libc::ENOSYS as u32), None));
    }
    let mut profile = LinuxSeccomp::default();
    profile
        .set_default_action(Action::ScmpActErrno)
        .set_default_errno_ret(Some(libc::EPERM as u32))
        .set_syscalls(Some(rules));
    profile
}

/// Reads a profile in OCI's JSON form.
pub fn parse_profile(bytes: &[u8]) -> Result<LinuxSeccomp, SpecError> {
    serde_json::from_slice(bytes).map_err(|error| SpecError::Seccomp(error.to_string()))
}

/// Compiles a profile into programs for this machine, to be installed in order.
///
/// A program knows two outcomes, so every action besides "allow" and the default gets a program of its
/// own; the kernel takes the strictest of their answers. Names this kernel interface does not know are
/// passed over, as upstream does.
pub fn compile(profile: &LinuxSeccomp) -> Result<Vec<Vec<u8>>, SpecError> {
    let default = action(profile.default_action(), profile.default_errno_ret())?;
    let allow = json!("allow");
    let mut groups: BTreeMap<String, (Value, Vec<Value>)> = BTreeMap::new();
    let mut permitted = Vec::new();
    for syscall in profile.syscalls().iter().flatten() {
        let outcome = action(syscall.action(), syscall.errno_ret())?;
        for name in syscall.names().iter().filter(|name| is_known(name)) {
            let entry = filter(name, syscall.args().as_deref().unwrap_or_default());
            permitted.push(entry.clone());
            if outcome != allow && outcome != default {
                let group =
                    groups.entry(outcome.to_string()).or_insert_with(|| (outcome.clone(), Vec::new()));
                group.1.push(entry);
            }
        }
    }
    let mut programs = Vec::new();
    if default != allow {
        programs.push(program(&default, &allow, permitted)?);
    }
    for (outcome, filters) in groups.into_values() {
        programs.push(program(&allow, &outcome, filters)?);
    }
    Ok(programs)
}

fn action(action: Action, errno: Option<u32>) -> Result<Value, SpecError> {
    Ok(match action {
        Action::ScmpActAllow => json!("allow"),
        Action::ScmpActErrno => json!({ "errno": errno.unwrap_or(libc::EPERM as u32) }),
        Action::ScmpActKill | Action::ScmpActKillThread => json!("kill_thread"),
        Action::ScmpActKillProcess => json!("kill_process"),
        Action::ScmpActTrap => json!("trap"),
        Action::ScmpActTrace => json!({ "trace": errno.unwrap_or(0) }),
        Action::ScmpActLog => json!("log"),
        other => return Err(SpecError::Seccomp(format!("action {other} is not supported"))),
    })
}

fn filter(name: &str, args: &[LinuxSeccompArg]) -> Value {
    let conditions: Vec<Value> = args
        .iter()
        .map(|argument| {
            let (op, value) = match argument.op() {
                Operator::ScmpCmpNe => (json!("ne"), argument.value()),
                Operator::ScmpCmpLt => (json!("lt"), argument.value()),
                Operator::ScmpCmpLe => (json!("le"), argument.value()),
                Operator::ScmpCmpEq => (json!("eq"), argument.value()),
                Operator::ScmpCmpGe => (json!("ge"), argument.value()),
                Operator::ScmpCmpGt => (json!("gt"), argument.value()),
                Operator::ScmpCmpMaskedEq => {
                    (json!({ "masked_eq": argument.value() }), argument.value_two().unwrap_or(0))
                }
            };
            json!({ "index": argument.index(), "type": "qword", "op": op, "val": value })
        })
        .collect();
    if conditions.is_empty() {
        json!({ "syscall": name })
    } else {
        json!({ "syscall": name, "args": conditions })
    }
}

fn compile_json(document: &Value) -> Result<seccompiler::BpfMap, String> {
    let arch = std::env::consts::ARCH.try_into().map_err(|error| format!("{error}"))?;
    seccompiler::compile_from_json(document.to_string().as_bytes(), arch).map_err(|error| error.to_string())
}

fn is_known(name: &str) -> bool {
    let single = json!({ "f": { "mismatch_action": "allow", "match_action": "log", "filter": [{ "syscall": name }] } });
    compile_json(&single).is_ok()
}

fn program(mismatch: &Value, matched: &Value, filters: Vec<Value>) -> Result<Vec<u8>, SpecError> {
    let document =
        json!({ "f": { "mismatch_action": mismatch, "match_action": matched, "filter": filters } });
    let programs = compile_json(&document).map_err(SpecError::Seccomp)?;
    let program = programs.get("f").ok_or_else(|| SpecError::Seccomp("no program came out".into()))?;
    let mut bytes = Vec::with_capacity(program.len() * 8);
    for instruction in program {
        bytes.extend(instruction.code.to_le_bytes());
        bytes.extend([instruction.jt, instruction.jf]);
        bytes.extend(instruction.k.to_le_bytes());
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_profile_compiles() {
        let programs = compile(&default_profile(&BTreeSet::new())).unwrap();
        assert_eq!(programs.len(), 2, "one allow list, one for clone3");
        for program in &programs {
            assert!(program.len() / 8 < 4096, "the kernel takes no more than 4096 instructions");
        }
        assert_eq!(compile(&default_profile(&(0..41).collect())).unwrap().len(), 1);
    }

    #[test]
    fn profiles_from_files() {
        let profile = br#"{"defaultAction":"SCMP_ACT_ALLOW","architectures":["SCMP_ARCH_X86_64"],
            "syscalls":[{"names":["mkdir","no_such_call"],"action":"SCMP_ACT_ERRNO","errnoRet":1}]}"#;
        assert_eq!(compile(&parse_profile(profile).unwrap()).unwrap().len(), 1);
        assert!(matches!(parse_profile(b"{}"), Err(SpecError::Seccomp(_))));
    }
}
