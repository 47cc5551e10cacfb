//! Resolves the user and groups of a container's process with the image's own passwd and group files.

use super::SpecError;

/// The user settings of the pod and the image.
#[derive(Debug, Clone, Default)]
pub struct IdentityRequest<'a> {
    /// `user[:group]` of the image.
    pub image_user: &'a str,
    pub run_as_user: Option<i64>,
    pub run_as_username: &'a str,
    pub run_as_group: Option<i64>,
    pub supplemental_groups: &'a [i64],
    /// Leave out the groups the image's group file would add.
    pub strict_groups: bool,
}

/// The resolved user.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Identity {
    pub uid: u32,
    pub gid: u32,
    /// Supplementary groups, the primary one first, without repetition.
    pub groups: Vec<u32>,
    pub home: String,
}

struct Passwd<'a> {
    name: &'a str,
    uid: u32,
    gid: u32,
    home: &'a str,
}

fn passwd(text: &str) -> impl Iterator<Item = Passwd<'_>> {
    text.lines().filter_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        let uid = fields.nth(1)?.parse().ok().and_then(id)?;
        let gid = fields.next()?.parse().ok().and_then(id)?;
        let home = fields.nth(1).unwrap_or("");
        Some(Passwd { name, uid, gid, home })
    })
}

/// Name, number and members of each group.
fn groups(text: &str) -> impl Iterator<Item = (&str, u32, &str)> {
    text.lines().filter_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        let gid = fields.nth(1)?.parse().ok().and_then(id)?;
        Some((name, gid, fields.next().unwrap_or("")))
    })
}

/// The largest number a user or group may have, as the API has it. The kernel takes 2^32 - 1 for "leave it as it is".
const MAX_ID: u32 = i32::MAX as u32;

fn id(value: i64) -> Option<u32> {
    u32::try_from(value).ok().filter(|id| *id <= MAX_ID)
}

/// A user or group as an image gives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Named<'a> {
    Number(u32),
    Name(&'a str),
    /// Written as a number, but none that a user can have. It is never looked up as a name: a check of
    /// numbers would have seen another user than the one that runs.
    OutOfRange,
}

impl<'a> Named<'a> {
    pub fn parse(text: &'a str) -> Self {
        let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
        if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
            return Self::Name(text);
        }
        text.parse::<i64>().ok().and_then(id).map_or(Self::OutOfRange, Self::Number)
    }
}

pub fn resolve(
    request: &IdentityRequest<'_>,
    passwd_file: &str,
    group_file: &str,
) -> Result<Identity, SpecError> {
    // The pod's user replaces the image's whole `user:group`.
    let from_pod = request
        .run_as_user
        .map(|uid| uid.to_string())
        .or_else(|| (!request.run_as_username.is_empty()).then(|| request.run_as_username.to_owned()));
    let text = from_pod.unwrap_or_else(|| request.image_user.to_owned());
    let (user, group) = text.split_once(':').unwrap_or((&text, ""));
    let user = if user.is_empty() { "0" } else { user };

    let unknown = || SpecError::User(user.to_owned());
    let (entry, uid) = match Named::parse(user) {
        Named::OutOfRange => return Err(unknown()),
        Named::Number(uid) => (passwd(passwd_file).find(|entry| entry.uid == uid), uid),
        Named::Name(name) => {
            let entry = passwd(passwd_file).find(|entry| entry.name == name).ok_or_else(unknown)?;
            let uid = entry.uid;
            (Some(entry), uid)
        }
    };
    let gid = if let Some(gid) = request.run_as_group {
        id(gid).ok_or_else(|| SpecError::Group(gid.to_string()))?
    } else if group.is_empty() {
        entry.as_ref().map_or(0, |entry| entry.gid)
    } else {
        let unknown = || SpecError::Group(group.to_owned());
        match Named::parse(group) {
            Named::OutOfRange => return Err(unknown()),
            Named::Number(gid) => gid,
            Named::Name(group) => groups(group_file)
                .find(|(name, ..)| *name == group)
                .map(|(_, gid, _)| gid)
                .ok_or_else(unknown)?,
        }
    };

    let mut all = vec![gid];
    let mut add = |gid: u32| {
        if !all.contains(&gid) {
            all.push(gid);
        }
    };
    if let Some(entry) = entry.as_ref().filter(|_| !request.strict_groups) {
        for (_, gid, members) in groups(group_file) {
            if members.split(',').any(|member| member == entry.name) {
                add(gid);
            }
        }
    }
    for gid in request.supplemental_groups {
        add(id(*gid).ok_or_else(|| SpecError::Group(gid.to_string()))?);
    }
    let home = entry.map(|entry| entry.home).filter(|home| !home.is_empty()).unwrap_or("/").to_owned();
    Ok(Identity { uid, gid, groups: all, home })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\nweb:x:101:102:Web:/srv:/bin/false\nbroken\n\
        4294967296:x:0:0::/:/bin/sh\n-1:x:0:0::/:/bin/sh\nhuge:x:4294967295:0::/:/bin/sh\n";
    const GROUP: &str = "root:x:0:\nweb:x:102:\nlog:x:4:web,other\naudio:x:29:web\n";

    #[test]
    fn table() {
        let base = IdentityRequest::default();
        type Row<'a> = (&'a str, IdentityRequest<'a>, Result<(u32, u32, Vec<u32>, &'a str), SpecError>);
        let rows: Vec<Row<'_>> = vec![
            ("nothing said is root", base.clone(), Ok((0, 0, vec![0], "/root"))),
            (
                "by name",
                IdentityRequest { image_user: "web", ..base.clone() },
                Ok((101, 102, vec![102, 4, 29], "/srv")),
            ),
            (
                "by number, known",
                IdentityRequest { image_user: "101", ..base.clone() },
                Ok((101, 102, vec![102, 4, 29], "/srv")),
            ),
            (
                "by number, unknown",
                IdentityRequest { image_user: "5000", ..base.clone() },
                Ok((5000, 0, vec![0], "/")),
            ),
            (
                "group by name",
                IdentityRequest { image_user: "5000:audio", ..base.clone() },
                Ok((5000, 29, vec![29], "/")),
            ),
            (
                "the pod's user drops the image's group",
                IdentityRequest { image_user: "web:audio", run_as_user: Some(7), ..base.clone() },
                Ok((7, 0, vec![0], "/")),
            ),
            (
                "the pod's groups",
                IdentityRequest {
                    image_user: "web",
                    run_as_group: Some(9),
                    supplemental_groups: &[4, 77],
                    ..base.clone()
                },
                Ok((101, 9, vec![9, 4, 29, 77], "/srv")),
            ),
            (
                "strict groups",
                IdentityRequest {
                    image_user: "web",
                    supplemental_groups: &[77],
                    strict_groups: true,
                    ..base.clone()
                },
                Ok((101, 102, vec![102, 77], "/srv")),
            ),
            (
                "unknown name",
                IdentityRequest { image_user: "nobody", ..base.clone() },
                Err(SpecError::User("nobody".into())),
            ),
            (
                "a number that nobody can have",
                IdentityRequest { image_user: "4294967295", ..base.clone() },
                Err(SpecError::User("4294967295".into())),
            ),
            (
                "is no name either",
                IdentityRequest { image_user: "4294967296", ..base.clone() },
                Err(SpecError::User("4294967296".into())),
            ),
            (
                "nor with a sign",
                IdentityRequest { image_user: "-1", ..base.clone() },
                Err(SpecError::User("-1".into())),
            ),
            (
                "the same for groups",
                IdentityRequest { image_user: "5:4294967295", ..base.clone() },
                Err(SpecError::Group("4294967295".into())),
            ),
            (
                "a name with a number that nobody can have",
                IdentityRequest { image_user: "huge", ..base.clone() },
                Err(SpecError::User("huge".into())),
            ),
            (
                "unknown group",
                IdentityRequest { image_user: "web:nope", ..base },
                Err(SpecError::Group("nope".into())),
            ),
        ];
        for (name, request, expected) in rows {
            let got = resolve(&request, PASSWD, GROUP);
            let expected =
                expected.map(|(uid, gid, groups, home)| Identity { uid, gid, groups, home: home.to_owned() });
            assert_eq!(got, expected, "{name}");
        }
    }
}
