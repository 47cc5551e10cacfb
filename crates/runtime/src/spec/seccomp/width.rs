//! Which arguments of system calls are ints.

/// Places of the arguments that the kernel takes as 32 bits, by call. Calls whose arguments profiles compare are here;
/// an argument that is not listed is compared whole.
const INTS: &[(&str, &[usize])] = &[
    ("accept4", &[0, 3]),
    ("access creat chmod memfd_create mkdir pipe2 umount2 delete_module fsopen", &[1]),
    ("arch_prctl clock_getres clock_gettime clock_nanosleep clock_settime epoll_create1", &[0]),
    ("inotify_init1 io_uring_setup keyctl modify_ldt personality prctl setrlimit getrlimit", &[0]),
    ("setgid setgroups setuid socketcall umask userfaultfd bind connect", &[0]),
    ("bpf finit_module mkdirat faccessat fchmodat fspick mount_setattr open_by_handle_at", &[0, 2]),
    ("open_tree quotactl recvmsg sched_setattr sendmsg shmget syslog unlinkat", &[0, 2]),
    ("madvise", &[2]),
    ("chown lchown mknod open", &[1, 2]),
    (
        "dup2 eventfd2 fanotify_init fchmod fcntl fcntl64 flock getpriority ioctl kill listen msgctl msgget",
        &[0, 1],
    ),
    (
        "pidfd_open prlimit64 rt_sigqueueinfo sched_setscheduler seccomp setns setregid setreuid shmctl",
        &[0, 1],
    ),
    ("timerfd_create tkill", &[0, 1]),
    ("dup3 epoll_ctl fchown fsmount getsockopt ioprio_set kcmp membarrier pidfd_getfd reboot", &[0, 1, 2]),
    ("rt_tgsigqueueinfo semctl semget setpriority setresgid setresuid socket socketpair tgkill", &[0, 1, 2]),
    ("execveat name_to_handle_at", &[0, 4]),
    ("faccessat2 fchmodat2 mknodat openat statx", &[0, 2, 3]),
    ("fchownat", &[0, 2, 3, 4]),
    ("fsconfig", &[0, 1, 4]),
    ("futex", &[1, 2, 5]),
    ("io_uring_enter", &[0, 1, 2, 3]),
    ("io_uring_register pidfd_send_signal", &[0, 1, 3]),
    ("linkat move_mount renameat2", &[0, 2, 4]),
    ("perf_event_open", &[1, 2, 3]),
    ("recvfrom sendto signalfd4", &[0, 3]),
    ("setsockopt", &[0, 1, 2, 4]),
];

/// Returns true if the kernel uses only the low half of the argument.
pub fn is_int(name: &str, index: usize) -> bool {
    INTS.iter()
        .any(|(names, places)| places.contains(&index) && names.split_whitespace().any(|known| known == name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ints_and_others() {
        for (name, ints) in [
            ("socket", &[0, 1, 2][..]),
            ("ioctl", &[0, 1]),
            ("clone", &[]),
            ("mmap", &[]),
            ("ptrace", &[]),
            ("prctl", &[0]),
            ("no_such_call", &[]),
        ] {
            let found: Vec<usize> = (0..6).filter(|index| is_int(name, *index)).collect();
            assert_eq!(found, ints, "{name}");
        }
        let mut names: Vec<&str> = INTS.iter().flat_map(|(names, _)| names.split_whitespace()).collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all, "each call is listed once");
    }
}
