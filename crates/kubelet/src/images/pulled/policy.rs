//! Which images need credentials that are known to open them, although the node has them already.

use crate::images::reference;

/// `imagePullCredentialsVerificationPolicy` of KubeletConfiguration.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum VerificationPolicy {
    /// Every pod may use every image of the node.
    NeverVerify,
    /// Every pod may use images that no kubelet pulled: they were put on the node by its administrator.
    #[default]
    NeverVerifyPreloadedImages,
    /// Every pod may use the images of the list.
    NeverVerifyAllowlistedImages(Allowlist),
    AlwaysVerify,
}

/// A policy that cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum VerificationPolicyError {
    #[error(
        "{0:?} is none of NeverVerify, NeverVerifyPreloadedImages, NeverVerifyAllowlistedImages and AlwaysVerify"
    )]
    Policy(String),
    #[error("a list of images needs the policy NeverVerifyAllowlistedImages")]
    UnusedAllowlist,
    #[error("{0:?} begins or ends with a space")]
    Spaces(String),
    #[error("{0:?} has a wildcard: only a pattern's last part may be *")]
    Wildcard(String),
    #[error("{0:?} names no registry")]
    NoRegistry(String),
    #[error("{0:?} is no image name without tag and digest")]
    Name(String),
}

/// Names of repositories, and prefixes of names that end with a slash.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Allowlist {
    names: Vec<String>,
    prefixes: Vec<String>,
}

impl Allowlist {
    fn parse(patterns: &[String]) -> Result<Self, VerificationPolicyError> {
        use VerificationPolicyError::*;
        let mut list = Self::default();
        for pattern in patterns {
            if pattern.trim() != pattern {
                return Err(Spaces(pattern.clone()));
            }
            let prefix = pattern.strip_suffix('*').filter(|prefix| prefix.ends_with('/'));
            match prefix {
                _ if prefix.unwrap_or(pattern).contains('*') => return Err(Wildcard(pattern.clone())),
                Some("/") => return Err(NoRegistry(pattern.clone())),
                Some(prefix) => list.prefixes.push(prefix.to_owned()),
                None if reference::repository(pattern) != Some(pattern.as_str()) => {
                    return Err(Name(pattern.clone()));
                }
                None => list.names.push(pattern.clone()),
            }
        }
        Ok(list)
    }

    fn has(&self, image: &str) -> bool {
        let name = reference::repository(image).unwrap_or(image);
        self.names.iter().any(|known| known == name)
            || self.prefixes.iter().any(|prefix| name.starts_with(prefix.as_str()))
    }
}

impl VerificationPolicy {
    /// Reads the two fields of KubeletConfiguration. The empty policy is the default.
    pub fn parse(policy: &str, allowlist: &[String]) -> Result<Self, VerificationPolicyError> {
        let list = Allowlist::parse(allowlist)?;
        let read = match policy {
            "NeverVerify" => Self::NeverVerify,
            "" | "NeverVerifyPreloadedImages" => Self::NeverVerifyPreloadedImages,
            "NeverVerifyAllowlistedImages" => return Ok(Self::NeverVerifyAllowlistedImages(list)),
            "AlwaysVerify" => Self::AlwaysVerify,
            other => return Err(VerificationPolicyError::Policy(other.to_owned())),
        };
        if !allowlist.is_empty() {
            return Err(VerificationPolicyError::UnusedAllowlist);
        }
        Ok(read)
    }

    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::NeverVerify => "NeverVerify",
            Self::NeverVerifyPreloadedImages => "NeverVerifyPreloadedImages",
            Self::NeverVerifyAllowlistedImages(_) => "NeverVerifyAllowlistedImages",
            Self::AlwaysVerify => "AlwaysVerify",
        }
    }

    /// The patterns of the list.
    pub(crate) fn allowlist(&self) -> Vec<String> {
        let Self::NeverVerifyAllowlistedImages(list) = self else { return Vec::new() };
        let prefixes = list.prefixes.iter().map(|prefix| format!("{prefix}*"));
        list.names.iter().cloned().chain(prefixes).collect()
    }

    /// True if a pod needs credentials for an image that the node has.
    pub(super) fn requires(&self, image: &str, pulled_by_kubelet: bool) -> bool {
        match self {
            Self::NeverVerify => false,
            Self::NeverVerifyPreloadedImages => pulled_by_kubelet,
            Self::NeverVerifyAllowlistedImages(list) => !list.has(image),
            Self::AlwaysVerify => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_say_which_images_need_credentials() {
        let list = ["r.io/team/*".to_owned(), "r.io/app".to_owned(), "localhost:5000/x".to_owned()];
        // Policy, image, pulled by the kubelet, credentials needed.
        for (policy, image, pulled, needed) in [
            ("NeverVerify", "r.io/app:1", true, false),
            ("NeverVerifyPreloadedImages", "r.io/app:1", true, true),
            ("NeverVerifyPreloadedImages", "r.io/app:1", false, false),
            ("", "r.io/app:1", true, true),
            ("AlwaysVerify", "r.io/app:1", false, true),
            ("NeverVerifyAllowlistedImages", "r.io/app:1", true, false),
            ("NeverVerifyAllowlistedImages", "r.io/app", false, false),
            ("NeverVerifyAllowlistedImages", "r.io/app/more:1", false, true),
            ("NeverVerifyAllowlistedImages", "r.io/team/a/b:1", true, false),
            ("NeverVerifyAllowlistedImages", "r.io/teammate/a:1", true, true),
            ("NeverVerifyAllowlistedImages", "localhost:5000/x:2", true, false),
        ] {
            let list = if policy == "NeverVerifyAllowlistedImages" { &list[..] } else { &[] };
            let read = VerificationPolicy::parse(policy, list).unwrap();
            assert_eq!(read.requires(image, pulled), needed, "{policy} {image} {pulled}");
        }
    }

    #[test]
    fn policies_that_make_no_sense_are_refused() {
        use VerificationPolicyError::*;
        let allowlisted = "NeverVerifyAllowlistedImages";
        for (policy, pattern, error) in [
            ("Sometimes", None, Policy("Sometimes".into())),
            ("AlwaysVerify", Some("r.io/x"), UnusedAllowlist),
            (allowlisted, Some(" r.io/x"), Spaces(" r.io/x".into())),
            (allowlisted, Some("r.io/*/x"), Wildcard("r.io/*/x".into())),
            (allowlisted, Some("r.io*"), Wildcard("r.io*".into())),
            (allowlisted, Some("*"), Wildcard("*".into())),
            (allowlisted, Some("/*"), NoRegistry("/*".into())),
            (allowlisted, Some("r.io/x:1"), Name("r.io/x:1".into())),
            (allowlisted, Some(""), Name("".into())),
        ] {
            let patterns: Vec<String> = pattern.into_iter().map(str::to_owned).collect();
            assert_eq!(VerificationPolicy::parse(policy, &patterns), Err(error), "{policy} {pattern:?}");
        }
    }
}
