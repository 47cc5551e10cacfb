//! Decides about an object from the state of its owners.

use kube::api::PropagationPolicy;

use super::{FOREGROUND, ORPHAN};

/// The state of one owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
    /// It exists.
    Solid,
    /// It is gone, or another object has its name.
    Dangling,
    /// It is being deleted and waits for its dependents.
    Waiting,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Step {
    Keep,
    /// Take away the references at these positions, keep the object.
    DropReferences(Vec<usize>),
    Delete {
        policy: PropagationPolicy,
        /// First make the object's own references non-blocking: it and a dependent may wait for each other.
        unblock: bool,
    },
}

/// `dependents_waiting` says of each of the object's own dependents whether it waits for dependents in turn.
pub(super) fn decide(owners: &[Owner], dependents_waiting: &[bool], finalizers: &[String]) -> Step {
    if owners.is_empty() {
        return Step::Keep;
    }
    if owners.contains(&Owner::Solid) {
        let loose: Vec<usize> = (0..owners.len()).filter(|index| owners[*index] != Owner::Solid).collect();
        return if loose.is_empty() { Step::Keep } else { Step::DropReferences(loose) };
    }
    if owners.contains(&Owner::Waiting) && !dependents_waiting.is_empty() {
        return Step::Delete {
            policy: PropagationPolicy::Foreground,
            unblock: dependents_waiting.iter().any(|waiting| *waiting),
        };
    }
    let has = |name: &str| finalizers.iter().any(|finalizer| finalizer == name);
    let policy = if has(ORPHAN) {
        PropagationPolicy::Orphan
    } else if has(FOREGROUND) {
        PropagationPolicy::Foreground
    } else {
        PropagationPolicy::Background
    };
    Step::Delete { policy, unblock: false }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_decide() {
        use Owner::{Dangling, Solid, Waiting};
        let delete = |policy, unblock| Step::Delete { policy, unblock };
        for (what, owners, dependents, finalizers, expected) in [
            ("no owner", vec![], vec![], vec![], Step::Keep),
            ("a living owner", vec![Solid], vec![], vec![], Step::Keep),
            ("one of two is gone", vec![Solid, Dangling], vec![], vec![], Step::DropReferences(vec![1])),
            ("one of two waits", vec![Waiting, Solid], vec![true], vec![], Step::DropReferences(vec![0])),
            ("all gone", vec![Dangling], vec![], vec![], delete(PropagationPolicy::Background, false)),
            (
                "gone, to be orphaned",
                vec![Dangling],
                vec![],
                vec!["orphan"],
                delete(PropagationPolicy::Orphan, false),
            ),
            (
                "gone, foreground",
                vec![Dangling],
                vec![],
                vec!["foregroundDeletion"],
                delete(PropagationPolicy::Foreground, false),
            ),
            (
                "owner waits, no dependents",
                vec![Waiting],
                vec![],
                vec![],
                delete(PropagationPolicy::Background, false),
            ),
            (
                "owner waits, has dependents",
                vec![Waiting],
                vec![false],
                vec![],
                delete(PropagationPolicy::Foreground, false),
            ),
            (
                "a possible circle",
                vec![Waiting],
                vec![false, true],
                vec![],
                delete(PropagationPolicy::Foreground, true),
            ),
        ] {
            let finalizers: Vec<String> = finalizers.into_iter().map(str::to_owned).collect();
            assert_eq!(decide(&owners, &dependents, &finalizers), expected, "{what}");
        }
    }
}
