//! Names of slices, and where their control groups are.

use std::fmt;

const SUFFIX: &str = ".slice";

/// Why something is not the name of a slice.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid slice name {0:?}: it must be parts joined by single dashes, and end with .slice")]
pub struct NameError(String);

/// A slice: `kubepods-burstable.slice` is the slice `burstable` in the slice `kubepods`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Slice {
    parts: Vec<String>,
}

impl Slice {
    /// From a unit's name, or from the path of its control group.
    pub fn parse(text: &str) -> Result<Self, NameError> {
        let wrong = || NameError(text.to_owned());
        let name = text.rsplit('/').next().unwrap_or_default();
        let stem = name.strip_suffix(SUFFIX).ok_or_else(wrong)?;
        if stem == "-" {
            return Ok(Self { parts: Vec::new() });
        }
        let parts: Vec<String> = stem.split('-').map(str::to_owned).collect();
        if parts.iter().any(String::is_empty) || stem.contains(char::is_whitespace) {
            return Err(wrong());
        }
        Ok(Self { parts })
    }

    /// Returns true if a parent of control groups is a slice of systemd.
    pub fn is_slice(parent: &str) -> bool {
        parent.ends_with(SUFFIX)
    }

    /// From the parts of a control group's path, the outermost first, as the kubelet names its groups.
    pub fn of<'a>(parts: impl IntoIterator<Item = &'a str>) -> Self {
        let kept = parts.into_iter().filter(|part| !part.is_empty());
        Self { parts: kept.map(escape).collect() }
    }

    /// Where its control group is: every slice is in the one its name begins with.
    pub fn path(&self) -> String {
        if self.parts.is_empty() {
            return "/".to_owned();
        }
        (1..=self.parts.len()).map(|count| format!("/{}{SUFFIX}", self.parts[..count].join("-"))).collect()
    }

    /// The slice it is in; none for the outermost.
    pub fn parent(&self) -> Option<Self> {
        let (_, above) = self.parts.split_last()?;
        Some(Self { parts: above.to_vec() })
    }
}

impl fmt::Display for Slice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stem = if self.parts.is_empty() { "-".to_owned() } else { self.parts.join("-") };
        write!(f, "{stem}{SUFFIX}")
    }
}

/// A part of a slice's name: dashes separate parts, so they become underscores, as the kubelet has it.
pub fn escape(part: &str) -> String {
    part.replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_are_nested_by_name() {
        for (name, path) in [
            ("-.slice", "/"),
            ("kubepods.slice", "/kubepods.slice"),
            ("kubepods-besteffort.slice", "/kubepods.slice/kubepods-besteffort.slice"),
            (
                "kubepods-burstable-pod1_2.slice",
                "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1_2.slice",
            ),
        ] {
            let slice = Slice::parse(name).unwrap();
            assert_eq!(slice.path(), path);
            assert_eq!(slice.to_string(), name);
            assert_eq!(Slice::parse(path).is_ok(), path != "/", "a path names the same slice");
        }
        let slice = Slice::parse("/a.slice/a-b.slice").unwrap();
        assert_eq!(slice, Slice::parse("a-b.slice").unwrap());
        assert_eq!(slice.parent().unwrap().to_string(), "a.slice");
    }

    #[test]
    fn what_is_no_slice() {
        for name in ["", "kubepods", ".slice", "a--b.slice", "-a.slice", "a-.slice", "a b.slice", "a.scope"] {
            assert!(Slice::parse(name).is_err(), "{name:?}");
        }
    }

    #[test]
    fn groups_of_pods() {
        for (parts, name) in [
            (&["kubepods"][..], "kubepods.slice"),
            (&["kubepods", "burstable", "pod1b2c-3d"], "kubepods-burstable-pod1b2c_3d.slice"),
            (&["", "ferrite", "kubepods", "podx"], "ferrite-kubepods-podx.slice"),
            (&["ferrite-2", "kubepods"], "ferrite_2-kubepods.slice"),
        ] {
            assert_eq!(Slice::of(parts.iter().copied()).to_string(), name);
        }
    }
}
