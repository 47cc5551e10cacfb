//! System call filters: our default profile, profiles from files, and their compilation.

use std::collections::{BTreeMap, BTreeSet};

use oci_spec::runtime::{
    Arch, LinuxSeccomp, LinuxSeccompAction as Action, LinuxSeccompArg, LinuxSeccompArgBuilder,
    LinuxSeccompOperator as Operator, LinuxSyscall,
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    sock_filter,
};
use serde_json::json;

mod width;
mod x86;

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

/// The same calls as 32-bit programs have them.
const ALLOWED_32: &str = "
chown32 clock_adjtime64 clock_getres_time64 clock_gettime64 clock_nanosleep_time64 fadvise64_64 fchown32 fcntl64
fstat64 fstatat64 fstatfs64 ftruncate64 futex_time64 getegid32 geteuid32 getgid32 getgroups32 getresgid32
getresuid32 getuid32 io_pgetevents_time64 ipc lchown32 _llseek lstat64 mmap2 mq_timedreceive_time64
mq_timedsend_time64 _newselect ppoll_time64 pselect6_time64 recvmmsg_time64 rt_sigtimedwait_time64
sched_rr_get_interval_time64 semtimedop_time64 sendfile64 setfsgid32 setfsuid32 setgid32 setgroups32 setregid32
setresgid32 setresuid32 setreuid32 setuid32 sigprocmask sigreturn stat64 statfs64 timer_gettime64
timer_settime64 timerfd_gettime64 timerfd_settime64 truncate64 ugetrlimit utimensat_time64 waitpid";

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
/// The address families a socket may have, as a mask and its value: all but AF_ALG (38), whose ciphers'
/// parsers are not meant for untrusted input, and AF_VSOCK (40), which knows no network namespaces. Masks
/// of 32 bits leave out the bits that the kernel does not read, whatever compiles the rule.
const FAMILIES: &[(u64, u64)] = &[
    (0xffff_ffe0, 0),
    (0xffff_fffc, 32),
    (0xffff_fffe, 36),
    (0xffff_ffff, 39),
    (0xffff_ffff, 41),
    (0xffff_fffe, 42),
    (0xffff_fffc, 44),
    (0xffff_fff0, 48),
];

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
    let names: Vec<&str> = ALLOWED.split_whitespace().chain(ALLOWED_32.split_whitespace()).collect();
    let mut rules = vec![rule(&names, Action::ScmpActAllow, None, None)];
    // The family is behind a pointer the filter cannot see; "not there" makes libraries use socket. It comes before the
    // rules for socket, for which libseccomp would add one that lets it through.
    rules.push(rule(&["socketcall"], Action::ScmpActErrno, Some(libc::ENOSYS as u32), None));
    for (mask, value) in FAMILIES {
        let family = argument(0, Operator::ScmpCmpMaskedEq, *mask, Some(*value));
        rules.push(rule(&["socket"], Action::ScmpActAllow, None, Some(vec![family])));
    }
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
    if cfg!(target_arch = "x86_64") {
        profile.set_architectures(Some(vec![Arch::ScmpArchX86_64, Arch::ScmpArchX86, Arch::ScmpArchX32]));
    }
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
///
/// Calls of 32-bit programs go by the same names and other numbers; they are filtered if the profile lists
/// their architecture, and the program is killed if it does not.
pub fn compile(profile: &LinuxSeccomp) -> Result<Vec<Vec<u8>>, SpecError> {
    let architectures = profile.architectures().as_deref().unwrap_or_default();
    let x86 = cfg!(target_arch = "x86_64") && architectures.contains(&Arch::ScmpArchX86);
    let default = action(profile.default_action(), profile.default_errno_ret())?;
    let mut groups: BTreeMap<String, (SeccompAction, Vec<Entry<'_>>)> = BTreeMap::new();
    let mut permitted = Vec::new();
    for syscall in profile.syscalls().iter().flatten() {
        let outcome = action(syscall.action(), syscall.errno_ret())?;
        for name in syscall.names() {
            let entry = Entry { name, args: syscall.args().as_deref().unwrap_or_default() };
            permitted.push(entry);
            if outcome != SeccompAction::Allow && outcome != default {
                let group =
                    groups.entry(format!("{outcome:?}")).or_insert_with(|| (outcome.clone(), Vec::new()));
                group.1.push(entry);
            }
        }
    }
    let mut programs = Vec::new();
    if default != SeccompAction::Allow {
        programs.push(program(&default, &SeccompAction::Allow, &permitted, x86)?);
    }
    for (outcome, entries) in groups.into_values() {
        programs.push(program(&SeccompAction::Allow, &outcome, &entries, x86)?);
    }
    Ok(programs)
}

/// A call and the conditions on its arguments.
#[derive(Clone, Copy)]
struct Entry<'a> {
    name: &'a str,
    args: &'a [LinuxSeccompArg],
}

fn action(action: Action, errno: Option<u32>) -> Result<SeccompAction, SpecError> {
    Ok(match action {
        Action::ScmpActAllow => SeccompAction::Allow,
        Action::ScmpActErrno => SeccompAction::Errno(errno.unwrap_or(libc::EPERM as u32)),
        Action::ScmpActKill | Action::ScmpActKillThread => SeccompAction::KillThread,
        Action::ScmpActKillProcess => SeccompAction::KillProcess,
        Action::ScmpActTrap => SeccompAction::Trap,
        Action::ScmpActTrace => SeccompAction::Trace(errno.unwrap_or(0)),
        Action::ScmpActLog => SeccompAction::Log,
        other => return Err(SpecError::Seccomp(format!("action {other} is not supported"))),
    })
}

/// The kernel ignores the upper half of an argument that is an int: so must a comparison, or any bit there would lead
/// around it.
fn conditions(name: &str, args: &[LinuxSeccompArg]) -> Result<Vec<SeccompCondition>, SpecError> {
    let condition = |argument: &LinuxSeccompArg| {
        let (op, value) = match argument.op() {
            Operator::ScmpCmpNe => (SeccompCmpOp::Ne, argument.value()),
            Operator::ScmpCmpLt => (SeccompCmpOp::Lt, argument.value()),
            Operator::ScmpCmpLe => (SeccompCmpOp::Le, argument.value()),
            Operator::ScmpCmpEq => (SeccompCmpOp::Eq, argument.value()),
            Operator::ScmpCmpGe => (SeccompCmpOp::Ge, argument.value()),
            Operator::ScmpCmpGt => (SeccompCmpOp::Gt, argument.value()),
            Operator::ScmpCmpMaskedEq => {
                (SeccompCmpOp::MaskedEq(argument.value()), argument.value_two().unwrap_or(0))
            }
        };
        let index = u8::try_from(argument.index()).unwrap_or(u8::MAX);
        let (length, op, value) = if width::is_int(name, argument.index()) {
            let low = |value: u64| value & u64::from(u32::MAX);
            let op = match op {
                SeccompCmpOp::MaskedEq(mask) => SeccompCmpOp::MaskedEq(low(mask)),
                other => other,
            };
            (SeccompCmpArgLen::Dword, op, low(value))
        } else {
            (SeccompCmpArgLen::Qword, op, value)
        };
        SeccompCondition::new(index, length, op, value).map_err(failed)
    };
    args.iter().map(condition).collect()
}

fn failed(error: impl std::fmt::Display) -> SpecError {
    SpecError::Seccomp(error.to_string())
}

/// The number a call has on this machine, as the compiler knows it.
fn native_number(name: &str) -> Option<i64> {
    let arch = std::env::consts::ARCH.try_into().ok()?;
    let single = json!({ "f": { "mismatch_action": "allow", "match_action": "log", "filter": [{ "syscall": name }] } });
    let programs = seccompiler::compile_from_json(single.to_string().as_bytes(), arch).ok()?;
    // Its only comparison after that of the architecture is with the call's number.
    let compared = |i: &&sock_filter| i.code == BPF_JMP_JEQ;
    programs.get("f")?.iter().filter(compared).nth(1).map(|instruction| i64::from(instruction.k))
}

/// A program for calls by their numbers.
fn filter(
    (mismatch, matched): (&SeccompAction, &SeccompAction),
    entries: &[Entry<'_>],
    number: impl Fn(&str) -> Option<i64>,
) -> Result<BpfProgram, SpecError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    let mut always = BTreeSet::new();
    for entry in entries {
        let Some(number) = number(entry.name) else { continue };
        let known = rules.entry(number).or_default();
        match entry.args {
            [] => drop(always.insert(number)),
            args => known.push(SeccompRule::new(conditions(entry.name, args)?).map_err(failed)?),
        }
    }
    for number in always {
        rules.insert(number, Vec::new());
    }
    let arch = std::env::consts::ARCH.try_into().map_err(failed)?;
    let filter = SeccompFilter::new(rules, mismatch.clone(), matched.clone(), arch).map_err(failed)?;
    filter.try_into().map_err(failed)
}

/// Where the kernel says which call it is, and whose.
const DATA_NUMBER: u32 = 0;
const DATA_ARCHITECTURE: u32 = 4;
const AUDIT_ARCH_I386: u32 = 0x4000_0003;
/// The bit of x32's calls. They are on hardly any machine, and nowhere with a filter of ours.
const X32_BIT: u32 = 0x4000_0000;
const BPF_LOAD: u16 = 0x20;
const BPF_JMP_JEQ: u16 = 0x15;
const BPF_JMP_JGE: u16 = 0x35;
const BPF_JMP: u16 = 0x05;
const BPF_RETURN: u16 = 0x06;
/// The compiler's programs begin with a check of the architecture.
const LOOK_AT_ARCHITECTURE: usize = 3;

fn program(
    mismatch: &SeccompAction,
    matched: &SeccompAction,
    entries: &[Entry<'_>],
    x86: bool,
) -> Result<Vec<u8>, SpecError> {
    let outcomes = (mismatch, matched);
    let native = filter(outcomes, entries, native_number)?;
    let of = |code, jt, jf, k| sock_filter { code, jt, jf, k };
    let mut whole = Vec::new();
    if cfg!(target_arch = "x86_64") {
        whole.extend([
            of(BPF_LOAD, 0, 0, DATA_NUMBER),
            of(BPF_JMP_JGE, 0, 1, X32_BIT),
            of(BPF_RETURN, 0, 0, libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32),
        ]);
    }
    if x86 {
        let native_length = u32::try_from(native.len()).map_err(failed)?;
        whole.extend([
            of(BPF_LOAD, 0, 0, DATA_ARCHITECTURE),
            of(BPF_JMP_JEQ, 0, 1, AUDIT_ARCH_I386),
            of(BPF_JMP, 0, 0, native_length),
        ]);
    }
    whole.extend(native);
    if x86 {
        whole.extend(filter(outcomes, entries, x86::number)?.into_iter().skip(LOOK_AT_ARCHITECTURE));
    }
    let mut bytes = Vec::with_capacity(whole.len() * 8);
    for instruction in whole {
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
        assert_eq!(programs.len(), 2, "one allow list, one for calls that are not there");
        for program in &programs {
            assert!(program.len() / 8 < 4096, "the kernel takes no more than 4096 instructions");
        }
        assert_eq!(compile(&default_profile(&(0..41).collect())).unwrap().len(), 2);
    }

    #[test]
    fn profiles_from_files() {
        let profile = br#"{"defaultAction":"SCMP_ACT_ALLOW","architectures":["SCMP_ARCH_X86_64"],
            "syscalls":[{"names":["mkdir","no_such_call"],"action":"SCMP_ACT_ERRNO","errnoRet":1}]}"#;
        assert_eq!(compile(&parse_profile(profile).unwrap()).unwrap().len(), 1);
        assert!(matches!(parse_profile(b"{}"), Err(SpecError::Seccomp(_))));
    }

    /// The result of a program, by the kernel's rules for the instructions that the compiler uses.
    fn answer(program: &[u8], architecture: u32, number: u32, args: [u64; 6]) -> u32 {
        let mut data = Vec::new();
        data.extend(number.to_le_bytes());
        data.extend(architecture.to_le_bytes());
        data.extend(0u64.to_le_bytes());
        data.extend(args.iter().flat_map(|argument| argument.to_le_bytes()));
        let code: Vec<[u8; 8]> = program.chunks_exact(8).map(|c| c.try_into().unwrap()).collect();
        let (mut at, mut accumulator) = (0, 0u32);
        loop {
            let [c0, c1, jt, jf, k @ ..] = code[at];
            let k = u32::from_le_bytes(k);
            at += 1;
            let jump = |yes: bool| usize::from(if yes { jt } else { jf });
            match u16::from_le_bytes([c0, c1]) {
                BPF_LOAD => {
                    let place = k as usize;
                    accumulator = u32::from_le_bytes(data[place..place + 4].try_into().unwrap());
                }
                0x54 => accumulator &= k,
                BPF_JMP => at += k as usize,
                BPF_JMP_JEQ => at += jump(accumulator == k),
                BPF_JMP_JGE => at += jump(accumulator >= k),
                0x25 => at += jump(accumulator > k),
                BPF_RETURN => return k,
                other => panic!("instruction {other:#x}"),
            }
        }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn every_architecture_is_filtered() {
        const X86_64: u32 = 0xc000_003e;
        const ARM: u32 = 0x4000_0028;
        const ALLOW: u32 = 0x7fff_0000;
        const REFUSED: u32 = 0x0005_0001;
        const MISSING: u32 = 0x0005_0026;
        const KILL: u32 = 0x8000_0000;
        let none = [0; 6];
        let confined = compile(&default_profile(&BTreeSet::new())).unwrap();
        let first = |argument: u64| [argument, 0, 0, 0, 0, 0];
        let vsock = first(40);
        let high = 1 << 32;
        let new_user = [0x1000_0000, 0, 0, 0, 0, 0];
        for (what, architecture, number, args, want) in [
            ("getpid", X86_64, 39, none, ALLOW),
            ("getpid of 32 bits", AUDIT_ARCH_I386, 20, none, ALLOW),
            ("mmap2 of 32 bits", AUDIT_ARCH_I386, 192, none, ALLOW),
            ("add_key", X86_64, 248, none, REFUSED),
            ("add_key of 32 bits", AUDIT_ARCH_I386, 286, none, REFUSED),
            ("what only 64 bits have there", AUDIT_ARCH_I386, 149, none, REFUSED),
            ("socket", X86_64, 41, none, ALLOW),
            ("socket to machines", X86_64, 41, vsock, REFUSED),
            ("socket to machines of 32 bits", AUDIT_ARCH_I386, 359, vsock, REFUSED),
            ("socket to machines with a bit the kernel ignores", X86_64, 41, first(40 | high), REFUSED),
            ("socket to ciphers", X86_64, 41, first(38), REFUSED),
            ("socket to ciphers with bits the kernel ignores", X86_64, 41, first(38 | 0xffff << 32), REFUSED),
            ("socket of the family between", X86_64, 41, first(39), ALLOW),
            ("socket of the network", X86_64, 41, first(2 | high), ALLOW),
            ("personality", X86_64, 135, first(0xffff_ffff), ALLOW),
            ("personality -1 as libraries pass it", X86_64, 135, first(u64::MAX), ALLOW),
            ("personality without random addresses", X86_64, 135, first(0x004_0000), REFUSED),
            ("the same with a bit the kernel ignores", X86_64, 135, first(0x004_0000 | high), REFUSED),
            ("io_uring_setup", X86_64, 425, none, REFUSED),
            ("keyctl", X86_64, 250, none, REFUSED),
            ("bpf", X86_64, 321, none, REFUSED),
            ("perf_event_open", X86_64, 298, none, REFUSED),
            ("userfaultfd", X86_64, 323, none, REFUSED),
            ("unshare", X86_64, 272, none, REFUSED),
            ("mount", X86_64, 165, none, REFUSED),
            ("fsopen", X86_64, 430, none, REFUSED),
            ("move_mount", X86_64, 429, none, REFUSED),
            ("open_tree", X86_64, 428, none, REFUSED),
            ("kexec_load", X86_64, 246, none, REFUSED),
            ("open_by_handle_at", X86_64, 304, none, REFUSED),
            ("clone with a namespace", X86_64, 56, new_user, REFUSED),
            (
                "clone with a namespace and a bit the kernel ignores",
                X86_64,
                56,
                first(0x1000_0000 | high),
                REFUSED,
            ),
            ("clone", X86_64, 56, none, ALLOW),
            ("clone with a namespace of 32 bits", AUDIT_ARCH_I386, 120, new_user, REFUSED),
            ("getpid of x32", X86_64, 39 | X32_BIT, none, MISSING),
            ("anything of another architecture", ARM, 20, none, KILL),
        ] {
            assert_eq!(answer(&confined[0], architecture, number, args), want, "{what}");
        }
        for architecture in [X86_64, AUDIT_ARCH_I386] {
            assert_eq!(answer(&confined[1], architecture, 435, none), MISSING, "clone3");
            assert_eq!(answer(&confined[1], architecture, 1, none), ALLOW);
            assert_eq!(answer(&confined[1], AUDIT_ARCH_I386, 102, first(1)), MISSING, "a socket");
        }
        let deny_tiocsti =
            br#"{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["ioctl"],"action":"SCMP_ACT_ERRNO",
            "args":[{"index":1,"value":21522,"op":"SCMP_CMP_EQ"}]}]}"#;
        let deny_tiocsti = compile(&parse_profile(deny_tiocsti).unwrap()).unwrap();
        for bits in [0, high, 0xffff_ffff << 32] {
            assert_eq!(
                answer(&deny_tiocsti[0], X86_64, 16, [0, 0x5412 | bits, 0, 0, 0, 0]),
                REFUSED,
                "{bits:#x}"
            );
        }
        for family in 0..64 {
            let want = if matches!(family, 38 | 40) { REFUSED } else { ALLOW };
            for bits in [0, high, 0xffff_ffff << 32] {
                assert_eq!(
                    answer(&confined[0], X86_64, 41, first(family | bits)),
                    want,
                    "{family} {bits:#x}"
                );
            }
        }
        // A profile that lists forbidden calls: no other interface may lead around it.
        let profile = |architectures: &str| {
            let text = format!(
                r#"{{"defaultAction":"SCMP_ACT_ALLOW",{architectures}"syscalls":[{{"names":["mkdir"],"action":"SCMP_ACT_ERRNO"}}]}}"#
            );
            compile(&parse_profile(text.as_bytes()).unwrap()).unwrap().remove(0)
        };
        let listed = profile(r#""architectures":["SCMP_ARCH_X86_64","SCMP_ARCH_X86"],"#);
        let unlisted = profile("");
        for (program, architecture, number, want) in [
            (&listed, X86_64, 83, REFUSED),
            (&listed, AUDIT_ARCH_I386, 39, REFUSED),
            (&listed, AUDIT_ARCH_I386, 83, ALLOW),
            (&listed, X86_64, 83 | X32_BIT, MISSING),
            (&unlisted, X86_64, 83, REFUSED),
            (&unlisted, X86_64, 83 | X32_BIT, MISSING),
            (&unlisted, AUDIT_ARCH_I386, 39, KILL),
        ] {
            assert_eq!(answer(program, architecture, number, none), want, "{architecture:#x} {number}");
        }
    }
}
