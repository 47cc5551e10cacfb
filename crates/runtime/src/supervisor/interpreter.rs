//! Which other program a program asks the kernel to start it with.

/// Number of bytes of a file to read: linkers write headers and the interpreter's name first.
pub const HEAD: usize = 4096;

const PT_INTERP: u32 = 3;

/// The interpreter of a script or the dynamic loader of a program, from the first bytes of its file.
pub fn interpreter(head: &[u8]) -> Option<String> {
    let name = match head.strip_prefix(b"#!") {
        Some(line) => {
            line.split(|byte| *byte == b'\n').next()?.trim_ascii().split(|byte| *byte == b' ').next()?
        }
        None => loader(head)?,
    };
    (!name.is_empty()).then(|| String::from_utf8_lossy(name).into_owned())
}

/// The dynamic loader named by an ELF file of this machine's byte order.
fn loader(head: &[u8]) -> Option<&[u8]> {
    let wide = match head.strip_prefix(b"\x7fELF")?.first()? {
        1 => false,
        2 => true,
        _ => return None,
    };
    let number = |at: usize, wide: bool| {
        let length = if wide { 8 } else { 4 };
        let mut bytes = [0; 8];
        bytes[..length].copy_from_slice(head.get(at..at.checked_add(length)?)?);
        usize::try_from(u64::from_le_bytes(bytes)).ok()
    };
    let short = |at: usize| Some(usize::from(u16::from_le_bytes(*head.get(at..)?.first_chunk()?)));
    let (table, size, count) = if wide {
        (number(32, true)?, short(54)?, short(56)?)
    } else {
        (number(28, false)?, short(42)?, short(44)?)
    };
    let headers = (0..count).map_while(|index| table.checked_add(index.checked_mul(size)?));
    for header in headers {
        if number(header, false)? as u32 != PT_INTERP {
            continue;
        }
        let (offset, length) = if wide { (header + 8, header + 32) } else { (header + 4, header + 16) };
        let (offset, length) = (number(offset, wide)?, number(length, wide)?);
        let name = head.get(offset..offset.checked_add(length)?)?;
        return name.split(|byte| *byte == 0).next();
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn elf(wide: bool, kind: u32, name: &[u8]) -> Vec<u8> {
        let mut file = vec![0; 256];
        file[..4].copy_from_slice(b"\x7fELF");
        file[4] = if wide { 2 } else { 1 };
        let at = if wide { [32, 54, 56, 8, 32] } else { [28, 42, 44, 4, 16] };
        file[at[0]] = 64;
        file[at[1]] = 56;
        file[at[2]] = 2;
        let header = 64 + 56;
        file[header..header + 4].copy_from_slice(&kind.to_le_bytes());
        file[header + at[3]] = 200;
        file[header + at[4]] = name.len() as u8;
        file[200..200 + name.len()].copy_from_slice(name);
        file
    }

    #[test]
    fn interpreters() {
        let rows: &[(&[u8], Option<&str>)] = &[
            (b"#!/bin/sh\necho", Some("/bin/sh")),
            (b"#! /usr/bin/env  python\n", Some("/usr/bin/env")),
            (b"#!\n", None),
            (b"text", None),
            (b"", None),
            (b"\x7fELF", None),
            (b"\x7fELF\x02", None),
            (&elf(true, PT_INTERP, b"/lib64/ld.so\0"), Some("/lib64/ld.so")),
            (&elf(false, PT_INTERP, b"/lib/ld.so\0"), Some("/lib/ld.so")),
            (&elf(true, 1, b"/lib64/ld.so\0"), None),
            (&elf(true, PT_INTERP, b"/lib64/ld.so\0")[..190], None),
        ];
        for (head, wanted) in rows {
            assert_eq!(interpreter(head).as_deref(), *wanted, "{:?}", String::from_utf8_lossy(head));
        }
    }

    proptest::proptest! {
        #[test]
        fn any_header_is_survived(mut bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 5..200)) {
            bytes[..4].copy_from_slice(b"\x7fELF");
            bytes[4] = bytes[4] % 2 + 1;
            let _ = interpreter(&bytes);
        }
    }
}
