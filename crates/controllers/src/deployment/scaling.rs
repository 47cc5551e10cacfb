//! Arithmetic of a rollout: numbers in, numbers out.

use super::Bounds;

/// One ReplicaSet as the arithmetic sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Size {
    pub(super) spec: i32,
    pub(super) available: i32,
}

fn total(sizes: &[Size]) -> i32 {
    sizes.iter().map(|size| size.spec).fold(0, i32::saturating_add)
}

/// The size that a rolling update allows for the new ReplicaSet now.
pub(super) fn grown(wanted: i32, bounds: Bounds, new: i32, all_specs: i32) -> i32 {
    if new >= wanted {
        return wanted;
    }
    let room = wanted.saturating_add(bounds.max_surge) - all_specs;
    if room <= 0 { new } else { new + room.min(wanted - new) }
}

/// The sizes that the old ReplicaSets, oldest first, should have now. Unavailable pods go first, then as
/// many others as availability allows.
pub(super) fn shrunk(wanted: i32, bounds: Bounds, new: Size, old: &[Size]) -> Vec<i32> {
    let mut sizes: Vec<i32> = old.iter().map(|size| size.spec).collect();
    let least = wanted - bounds.max_unavailable;
    let new_unavailable = new.spec - new.available;
    let budget = total(old).saturating_add(new.spec) - least - new_unavailable;
    if budget <= 0 {
        return sizes;
    }
    let mut left = budget;
    for (size, old) in sizes.iter_mut().zip(old) {
        let cut = left.min((*size - old.available).max(0));
        *size -= cut;
        left -= cut;
    }
    let available = old.iter().map(|size| size.available).fold(new.available, i32::saturating_add);
    let mut left = (available - least).max(0);
    for size in &mut sizes {
        let cut = left.min(*size);
        *size -= cut;
        left -= cut;
    }
    sizes
}

/// A ReplicaSet that takes part in proportional scaling.
#[derive(Debug, Clone, Copy)]
pub(super) struct Share {
    pub(super) spec: i32,
    /// The most pods there could be when it was last scaled, from its annotation.
    pub(super) max_before: Option<i32>,
}

/// Spreads a change of the wanted number over several active ReplicaSets in the middle of a rollout, in proportion
/// to their sizes. `sets` come larger first (ties: newer first when growing, older first when shrinking), and the
/// largest gets the remainder of rounding.
pub(super) fn proportional(wanted: i32, max_surge: i32, current: i32, sets: &[Share]) -> Vec<i32> {
    let allowed = if wanted > 0 { wanted.saturating_add(max_surge) } else { 0 };
    let to_add = allowed - sets.iter().map(|set| set.spec).sum::<i32>();
    let mut sizes: Vec<i32> = sets.iter().map(|set| set.spec).collect();
    if to_add == 0 {
        return sizes;
    }
    let mut added = 0;
    for (size, set) in sizes.iter_mut().zip(sets) {
        let left = to_add - added;
        if set.spec == 0 || left == 0 {
            continue;
        }
        let share = fraction(wanted, max_surge, current, *set);
        let share = if to_add > 0 { share.min(left) } else { share.max(left) };
        *size += share;
        added += share;
    }
    if let Some(first) = sizes.first_mut() {
        *first = (*first + to_add - added).max(0);
    }
    sizes
}

fn fraction(wanted: i32, max_surge: i32, current: i32, set: Share) -> i32 {
    if wanted == 0 {
        return -set.spec;
    }
    let before = set.max_before.filter(|before| *before != 0).unwrap_or(current);
    if before == 0 {
        return 0;
    }
    let size = f64::from(set.spec) * f64::from(wanted.saturating_add(max_surge)) / f64::from(before);
    // Sizes are far below 2^31, and the cast saturates.
    size.round() as i32 - set.spec
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bounds(max_surge: i32, max_unavailable: i32) -> Bounds {
        Bounds { max_surge, max_unavailable }
    }

    #[test]
    fn the_new_set_grows_into_the_surge() {
        for (wanted, surge, new, all, expected) in [
            (10, 3, 0, 10, 3),
            (10, 3, 3, 13, 3),
            (10, 3, 8, 9, 10),
            (10, 0, 0, 10, 0),
            (3, 1, 5, 5, 3),
            (0, 1, 0, 0, 0),
        ] {
            assert_eq!(grown(wanted, bounds(surge, 0), new, all), expected, "{wanted} {surge} {new} {all}");
        }
    }

    #[test]
    fn old_sets_shrink_within_availability() {
        let size = |spec, available| Size { spec, available };
        for (what, wanted, limit, new, old, expected) in [
            ("nothing available beyond the least", 10, bounds(3, 2), size(3, 0), vec![size(10, 10)], vec![8]),
            ("new pods not yet available", 10, bounds(0, 2), size(2, 0), vec![size(8, 8)], vec![8]),
            ("new pods available", 10, bounds(0, 2), size(2, 2), vec![size(8, 8)], vec![6]),
            (
                "unhealthy old pods go first",
                10,
                bounds(0, 2),
                size(0, 0),
                vec![size(2, 0), size(8, 8)],
                vec![0, 8],
            ),
            ("oldest first", 4, bounds(1, 0), size(4, 4), vec![size(1, 1), size(1, 1)], vec![0, 0]),
            ("budget is zero", 10, bounds(3, 0), size(3, 0), vec![size(10, 10)], vec![10]),
        ] {
            assert_eq!(shrunk(wanted, limit, new, &old), expected, "{what}");
        }
    }

    #[test]
    fn shares_are_proportional_and_the_largest_takes_the_rest() {
        let share = |spec, max| Share { spec, max_before: Some(max) };
        for (what, wanted, surge, sets, expected) in [
            (
                "documented example: 10 to 15 with surge 3",
                15,
                3,
                vec![share(8, 13), share(5, 13)],
                vec![11, 7],
            ),
            ("down to zero", 0, 3, vec![share(8, 13), share(5, 13)], vec![0, 0]),
            ("down", 5, 0, vec![share(8, 13), share(5, 13)], vec![3, 2]),
            ("nothing to add", 10, 3, vec![share(8, 13), share(5, 13)], vec![8, 5]),
            (
                "no annotation: share of the present size",
                20,
                0,
                vec![Share { spec: 10, max_before: None }],
                vec![20],
            ),
        ] {
            assert_eq!(proportional(wanted, surge, 10, &sets), expected, "{what}");
        }
    }
}
