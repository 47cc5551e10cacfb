//! Links of the far side that must lead through the proxy.

/// Where a page came from, and where its links must lead.
pub(super) struct Links {
    /// Everything up to and with `proxy`.
    pub prefix: String,
    /// Address and port of the far side.
    pub far: String,
    /// The host that the client asked for.
    pub client: String,
}

impl Links {
    /// The link through the proxy; none when it may stay as it is: relative, to somewhere else, or right already.
    pub fn rewrite(&self, target: &str) -> Option<String> {
        let (host, rest) = split_host(target)?;
        if !rest.starts_with('/') || is_below(rest, &self.prefix) {
            return None;
        }
        match host {
            "" => Some(format!("{}{rest}", self.prefix)),
            host if host == self.client => {
                let head = target.get(..target.len() - rest.len())?;
                Some(format!("{head}{}{rest}", self.prefix))
            }
            host if host == self.far => Some(format!("{}{rest}", self.prefix)),
            _ => None,
        }
    }
}

/// The host, empty when the link has none, and the rest of the link.
fn split_host(target: &str) -> Option<(&str, &str)> {
    let after = match target.split_once("//") {
        Some((scheme, after)) if scheme.is_empty() || is_scheme(scheme) => after,
        _ => return Some(("", target)),
    };
    let end = after.find(['/', '?', '#']).unwrap_or(after.len());
    after.split_at_checked(end)
}

fn is_scheme(text: &str) -> bool {
    let name = text.strip_suffix(':').unwrap_or_default();
    name.starts_with(|c: char| c.is_ascii_alphabetic())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.'))
}

fn is_below(path: &str, prefix: &str) -> bool {
    path.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with(['/', '?', '#']))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_within_the_far_side_lead_through_the_proxy() {
        let links =
            Links { prefix: "/p".into(), far: "10.0.0.1:8080".into(), client: "api.example:6443".into() };
        for (target, expected) in [
            ("/x", Some("/p/x")),
            ("/x/?a=//b#c", Some("/p/x/?a=//b#c")),
            ("http://10.0.0.1:8080/x", Some("/p/x")),
            ("//10.0.0.1:8080/x/", Some("/p/x/")),
            ("https://api.example:6443/x", Some("https://api.example:6443/p/x")),
            ("/p/x", None),
            ("/px", Some("/p/px")),
            ("http://10.0.0.1:8080", None),
            ("http://10.0.0.1:81/x", None),
            ("http://example.com/x", None),
            ("//example.com/x", None),
            ("x", None),
            ("../x", None),
            ("?q", None),
            ("#top", None),
            ("mailto:a@b", None),
            ("javascript:go('//x')", None),
            ("", None),
        ] {
            assert_eq!(links.rewrite(target).as_deref(), expected, "{target}");
        }
    }
}
