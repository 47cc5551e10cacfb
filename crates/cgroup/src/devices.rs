//! Device access on version 2: the rules become a small program attached to the group.
//!
//! Version 1 has files for this; version 2 asks a BPF program for every open and mknod. The program
//! compares the request with each allowed rule and answers 1 (yes) or, at its end, 0.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;

const BPF_PROG_LOAD: libc::c_int = 5;
const BPF_PROG_ATTACH: libc::c_int = 8;
const BPF_PROG_TYPE_CGROUP_DEVICE: u32 = 15;
const BPF_CGROUP_DEVICE: u32 = 6;

/// The kind of a device node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    All,
    Block,
    Character,
}

/// Allows or denies the use of devices. A later rule overrides the ones before it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceRule {
    pub allow: bool,
    pub kind: DeviceKind,
    /// `None` for every number.
    pub major: Option<u32>,
    pub minor: Option<u32>,
    /// Letters of `rwm`: read, write, make.
    pub access: String,
}

/// One instruction as the kernel takes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Instruction {
    code: u8,
    registers: u8,
    offset: i16,
    immediate: i32,
}

const fn instruction(code: u8, dst: u8, src: u8, offset: i16, immediate: i32) -> Instruction {
    Instruction { code, registers: src << 4 | dst, offset, immediate }
}

// The few operations needed: load a word, move, and, compare-and-skip, return.
const LOAD: u8 = 0x61;
const MOVE: u8 = 0xb7;
const COPY: u8 = 0xbf;
const AND: u8 = 0x57;
const SHIFT_RIGHT: u8 = 0x77;
const SKIP_UNLESS: u8 = 0x55;
const SKIP_UNLESS_EQUAL: u8 = 0x5d;
const EXIT: u8 = 0x95;

const BLOCK: i32 = 1;
const CHARACTER: i32 = 2;

fn access_bits(access: &str) -> i32 {
    access.chars().fold(0, |bits, letter| {
        bits | match letter {
            'm' => 1,
            'r' => 2,
            'w' => 4,
            _ => 0,
        }
    })
}

/// The program for a list of rules of the form "deny all, then allow these". `None` when everything is
/// allowed.
pub fn program(rules: &[DeviceRule]) -> Option<Vec<Instruction>> {
    if rules.iter().any(|rule| rule.allow && rule.kind == DeviceKind::All) {
        return None;
    }
    // r2 type, r3 access, r4 major, r5 minor; the context is in r1.
    let mut out = vec![
        instruction(LOAD, 2, 1, 0, 0),
        instruction(AND, 2, 0, 0, 0xffff),
        instruction(LOAD, 3, 1, 0, 0),
        instruction(SHIFT_RIGHT, 3, 0, 0, 16),
        instruction(LOAD, 4, 1, 4, 0),
        instruction(LOAD, 5, 1, 8, 0),
    ];
    for rule in rules.iter().filter(|rule| rule.allow) {
        let kind = match rule.kind {
            DeviceKind::Block => BLOCK,
            DeviceKind::Character => CHARACTER,
            DeviceKind::All => continue,
        };
        let access = access_bits(&rule.access);
        // A number beyond 31 bits compares as negative: it matches no device.
        let number = |value: Option<u32>| value.map(u32::cast_signed);
        // Tests of one rule; each skips to the next rule when it fails.
        let mut tests = vec![
            instruction(SKIP_UNLESS, 2, 0, 0, kind),
            instruction(COPY, 6, 3, 0, 0),
            instruction(AND, 6, 0, 0, access),
            // All of the requested access must be allowed.
            instruction(SKIP_UNLESS_EQUAL, 6, 3, 0, 0),
        ];
        if let Some(major) = number(rule.major) {
            tests.push(instruction(SKIP_UNLESS, 4, 0, 0, major));
        }
        if let Some(minor) = number(rule.minor) {
            tests.push(instruction(SKIP_UNLESS, 5, 0, 0, minor));
        }
        let length = tests.len();
        for (index, test) in tests.iter_mut().enumerate() {
            if matches!(test.code, SKIP_UNLESS | SKIP_UNLESS_EQUAL) {
                // Over the rest of the tests and the two instructions that say yes.
                test.offset = (length - index - 1 + 2) as i16;
            }
        }
        out.extend(tests);
        out.extend([instruction(MOVE, 0, 0, 0, 1), instruction(EXIT, 0, 0, 0, 0)]);
    }
    out.extend([instruction(MOVE, 0, 0, 0, 0), instruction(EXIT, 0, 0, 0, 0)]);
    Some(out)
}

/// Loads the program and attaches it to the group; it lives as long as the group.
pub fn attach(group: &Path, program: &[Instruction]) -> io::Result<()> {
    let directory = std::fs::File::open(group)?;
    let licence = c"Apache";
    #[repr(C)]
    #[derive(Default)]
    struct Load {
        kind: u32,
        count: u32,
        instructions: u64,
        licence: u64,
        log: [u32; 2],
        log_buffer: u64,
        version: u32,
        flags: u32,
        rest: [u64; 10],
    }
    let load = Load {
        kind: BPF_PROG_TYPE_CGROUP_DEVICE,
        count: program.len() as u32,
        instructions: program.as_ptr() as u64,
        licence: licence.as_ptr() as u64,
        ..Default::default()
    };
    // SAFETY: the structure has the kernel's layout, is zero where unused, and its pointers live for the call.
    let fd = unsafe { libc::syscall(libc::SYS_bpf, BPF_PROG_LOAD, &raw const load, size_of::<Load>()) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just returned this descriptor.
    let loaded = unsafe { OwnedFd::from_raw_fd(fd as RawFd) };
    #[repr(C)]
    struct Attach {
        target: u32,
        program: u32,
        kind: u32,
        flags: u32,
    }
    // Groups below may add programs of their own; all must agree.
    const ALLOW_MULTIPLE: u32 = 2;
    let attach = Attach {
        target: directory.as_raw_fd() as u32,
        program: loaded.as_raw_fd() as u32,
        kind: BPF_CGROUP_DEVICE,
        flags: ALLOW_MULTIPLE,
    };
    // SAFETY: as above; both descriptors are open.
    let done =
        unsafe { libc::syscall(libc::SYS_bpf, BPF_PROG_ATTACH, &raw const attach, size_of::<Attach>()) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::CommandExt;

    fn rule(
        allow: bool,
        kind: DeviceKind,
        major: Option<u32>,
        minor: Option<u32>,
        access: &str,
    ) -> DeviceRule {
        DeviceRule { allow, kind, major, minor, access: access.to_owned() }
    }

    /// The result of a program, by the kernel's rules for its instructions.
    fn answer(program: &[Instruction], kind: i32, access: i32, major: i32, minor: i32) -> i64 {
        let context = [access << 16 | kind, major, minor];
        let mut registers = [0i64; 11];
        let mut at = 0;
        loop {
            let Instruction { code, registers: which, offset, immediate } = program[at];
            let (to, from) = (usize::from(which & 15), usize::from(which >> 4));
            at += 1;
            let mut skip = |condition: bool| {
                if condition {
                    at = at.checked_add_signed(offset.into()).unwrap();
                }
            };
            match code {
                LOAD => registers[to] = i64::from(context[offset as usize / 4]),
                MOVE => registers[to] = immediate.into(),
                COPY => registers[to] = registers[from],
                AND => registers[to] &= i64::from(immediate),
                SHIFT_RIGHT => registers[to] >>= immediate,
                SKIP_UNLESS => skip(registers[to] != i64::from(immediate)),
                SKIP_UNLESS_EQUAL => skip(registers[to] != registers[from]),
                EXIT => return registers[0],
                other => panic!("instruction {other:#x}"),
            }
        }
    }

    #[test]
    fn answers() {
        let (read, write, make) = (2, 4, 1);
        let rules = [
            rule(false, DeviceKind::All, None, None, "rwm"),
            rule(true, DeviceKind::Character, None, None, "m"),
            rule(true, DeviceKind::Character, Some(1), Some(3), "rwm"),
            rule(true, DeviceKind::Character, Some(1), Some(5), "r"),
            rule(true, DeviceKind::Character, Some(136), None, "rw"),
            rule(true, DeviceKind::Block, Some(8), None, "r"),
        ];
        let program = program(&rules).unwrap();
        for (kind, access, major, minor, want) in [
            (CHARACTER, read | write, 1, 3, 1),
            (CHARACTER, read, 1, 5, 1),
            (CHARACTER, write, 1, 5, 0),
            (CHARACTER, read | write, 1, 5, 0),
            (CHARACTER, make, 9, 9, 1),
            (CHARACTER, make | read, 9, 9, 0),
            (CHARACTER, read | write, 136, 77, 1),
            (CHARACTER, read, 137, 77, 0),
            (BLOCK, read, 8, 1, 1),
            (BLOCK, write, 8, 1, 0),
            (BLOCK, make, 8, 1, 0),
            (BLOCK, read, 1, 3, 0),
        ] {
            assert_eq!(answer(&program, kind, access, major, minor), want, "{kind} {access} {major}:{minor}");
        }
        let nothing = super::program(&rules[..1]).unwrap();
        assert_eq!(answer(&nothing, CHARACTER, read, 1, 3), 0);
    }

    #[test]
    fn everything_allowed_needs_no_program() {
        assert_eq!(program(&[rule(true, DeviceKind::All, None, None, "rwm")]), None);
    }

    /// On the real kernel, in a group of the unified hierarchy, wherever that is mounted.
    #[test]
    fn the_kernel_takes_it_and_obeys() {
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
        let mount =
            mounts.lines().find(|l| l.split(' ').nth(2) == Some("cgroup2")).and_then(|l| l.split(' ').nth(1));
        let mount = mount.expect("a cgroup2 hierarchy is mounted");
        let group = Path::new(mount).join(format!("ferrite-test-devices-{}", std::process::id()));
        std::fs::create_dir(&group).unwrap();
        struct Remove(std::path::PathBuf);
        impl Drop for Remove {
            fn drop(&mut self) {
                let _ = std::fs::remove_dir(&self.0);
            }
        }
        let _remove = Remove(group.clone());
        let rules = [
            rule(false, DeviceKind::All, None, None, "rwm"),
            rule(true, DeviceKind::Character, Some(1), Some(3), "rwm"),
            rule(true, DeviceKind::Character, Some(1), Some(5), "r"),
        ];
        attach(&group, &program(&rules).unwrap()).unwrap();
        let run = |script: &str| {
            let procs = group.join("cgroup.procs");
            let mut command = std::process::Command::new("/bin/sh");
            command.args(["-c", script]).stderr(std::process::Stdio::null());
            // SAFETY: only opens and writes a file between fork and exec.
            unsafe { command.pre_exec(move || std::fs::write(&procs, "0")) };
            command.status().unwrap().success()
        };
        assert!(run("echo x > /dev/null"));
        assert!(run(": < /dev/zero"));
        assert!(!run("echo x > /dev/zero"), "only reading is allowed");
        assert!(!run(": < /dev/full"), "not in the list");
    }
}
