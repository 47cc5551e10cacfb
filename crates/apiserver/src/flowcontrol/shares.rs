//! The seats of each level: its share of the server's, and the seats that it lends and borrows.

/// The share of a level, as it is configured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Share {
    pub shares: u32,
    pub lendable_percent: u32,
    /// None borrows without a limit.
    pub borrowing_percent: Option<u32>,
    pub exempt: bool,
}

/// The seats of a level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Bounds {
    /// By its share.
    pub nominal: u32,
    /// Seats left if it lends all that it may.
    pub lower: u32,
    /// With all it may borrow.
    pub upper: u32,
}

impl Bounds {
    /// The seats before there is a demand to go by.
    pub fn initial(&self) -> u32 {
        self.nominal - (self.nominal - self.lower) / 2
    }
}

fn percent_of(seats: u32, percent: u32) -> u32 {
    (f64::from(seats) * f64::from(percent) / 100.0).round() as u32
}

/// The bounds of all levels, in the order of their shares.
pub(super) fn bounds(total: u32, all: &[Share]) -> Vec<Bounds> {
    let sum: f64 = all.iter().map(|share| f64::from(share.shares)).sum();
    let of = |share: &Share| {
        let part = if sum > 0.0 { f64::from(share.shares) / sum } else { 0.0 };
        let nominal = (f64::from(total) * part).ceil() as u32;
        let lent = percent_of(nominal, share.lendable_percent).min(nominal);
        let borrowed = share.borrowing_percent.map_or(total, |percent| percent_of(nominal, percent));
        Bounds { nominal, lower: nominal - lent, upper: nominal.saturating_add(borrowed) }
    };
    all.iter().map(of).collect()
}

/// The demand and the bounds of a level.
#[derive(Debug, Clone, Copy)]
pub(super) struct Claim {
    pub exempt: bool,
    pub bounds: Bounds,
    /// The most that was asked for lately.
    pub most: u32,
    pub smoothed: f64,
}

impl Claim {
    /// Seats that the level used lately and may keep, never less than its lower bound.
    fn kept(&self) -> u32 {
        match self.exempt {
            true => self.bounds.lower.max(self.most),
            false => self.bounds.lower.max(self.bounds.nominal.min(self.most)),
        }
    }

    /// The seats that the level would like to have.
    pub fn target(&self) -> f64 {
        f64::from(self.kept()).max(self.smoothed)
    }
}

/// The seats of every level for the next while, and the fraction of its target that each level gets that is not at a bound.
pub(super) fn borrow(claims: &[Claim]) -> (Vec<u32>, f64) {
    let total: i64 = claims.iter().map(|claim| i64::from(claim.bounds.nominal)).sum();
    let exempt: i64 = claims.iter().filter(|c| c.exempt).map(|c| i64::from(c.kept())).sum();
    let limited = || claims.iter().filter(|claim| !claim.exempt);
    let left = total - exempt;
    let least: i64 = limited().map(|claim| i64::from(claim.bounds.lower)).sum();
    let kept: i64 = limited().map(|claim| i64::from(claim.kept())).sum();
    let fair = if left > kept { fair_fraction(total as f64, claims) } else { 0.0 };
    let seats = |claim: &Claim| -> u32 {
        let lower = claim.bounds.lower;
        if claim.exempt {
            claim.kept()
        } else if left <= least {
            lower
        } else if left <= kept {
            let part = (left - least) as f64 / (kept - least) as f64;
            lower + (f64::from(claim.kept() - lower) * part).round() as u32
        } else {
            allocation(claim, fair).round() as u32
        }
    };
    (claims.iter().map(seats).collect(), fair)
}

/// A claim too small to be divided by.
const SMALLEST: f64 = 0.001;

fn allocation(claim: &Claim, fair: f64) -> f64 {
    let (lower, upper) = (f64::from(claim.kept()), f64::from(claim.bounds.upper));
    (fair * claim.target().max(SMALLEST)).clamp(lower, upper.max(lower))
}

/// The fraction with which the allocations add up to `sum`. They grow with it, so that halving finds it.
fn fair_fraction(sum: f64, claims: &[Claim]) -> f64 {
    let limited: Vec<&Claim> = claims.iter().filter(|claim| !claim.exempt).collect();
    let given = |fair: f64| limited.iter().map(|claim| allocation(claim, fair)).sum::<f64>();
    let highest = limited
        .iter()
        .map(|claim| f64::from(claim.bounds.upper) / claim.target().max(SMALLEST))
        .fold(0.0, f64::max);
    let (mut low, mut high) = (0.0, highest);
    for _ in 0..100 {
        let middle = f64::midpoint(low, high);
        if given(middle) < sum { low = middle } else { high = middle }
    }
    high
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEFAULTS: [(u32, u32, bool); 8] = [
        (5, 0, false),
        (0, 0, true),
        (20, 50, false),
        (10, 0, false),
        (40, 25, false),
        (30, 33, false),
        (40, 50, false),
        (100, 90, false),
    ];

    fn defaults() -> Vec<Share> {
        let share = |(shares, lendable_percent, exempt)| Share {
            shares,
            lendable_percent,
            borrowing_percent: None,
            exempt,
        };
        DEFAULTS.into_iter().map(share).collect()
    }

    fn claims(most: [u32; 8]) -> Vec<Claim> {
        let all = defaults();
        let bounds = bounds(600, &all);
        let claim = |((share, bounds), most): ((&Share, Bounds), u32)| Claim {
            exempt: share.exempt,
            bounds,
            most,
            smoothed: f64::from(most),
        };
        all.iter().zip(bounds).zip(most).map(claim).collect()
    }

    #[test]
    fn shares_become_seats_as_upstreams_defaults_do() {
        let all = bounds(600, &defaults());
        let nominal: Vec<u32> = all.iter().map(|b| b.nominal).collect();
        assert_eq!(nominal, [13, 0, 49, 25, 98, 74, 98, 245]);
        let lower: Vec<u32> = all.iter().map(|b| b.lower).collect();
        assert_eq!(lower, [13, 0, 24, 25, 73, 50, 49, 24]);
        assert_eq!(all[7].initial(), 135);
        assert_eq!(bounds(600, &[Share::default()]), [Bounds { nominal: 0, lower: 0, upper: 600 }]);
    }

    #[test]
    fn a_busy_level_borrows_from_idle_ones() {
        let (seats, _) = borrow(&claims([0, 0, 0, 0, 0, 0, 0, 1000]));
        let total: u32 = claims([0; 8]).iter().map(|c| c.bounds.nominal).sum();
        assert!(seats[7] > 300, "{seats:?}");
        assert!(seats.iter().sum::<u32>().abs_diff(total) <= 4, "{seats:?} of {total}");
        for (claim, seats) in claims([0; 8]).iter().zip(&seats) {
            assert!(*seats >= claim.bounds.lower, "{claim:?} {seats}");
        }
    }

    #[test]
    fn busy_levels_keep_their_own() {
        let all = claims([1000; 8]);
        let (seats, _) = borrow(&all[2..]);
        for (claim, seats) in all[2..].iter().zip(&seats) {
            assert!(seats.abs_diff(claim.bounds.nominal) <= 1, "{claim:?} {seats}");
        }
    }

    #[test]
    fn exempt_requests_take_from_the_others_but_not_below_what_they_must_keep() {
        let mut most = [50; 8];
        most[1] = 5000;
        let all = claims(most);
        let (seats, fair) = borrow(&all);
        assert_eq!((seats[1], fair), (5000, 0.0));
        for (claim, seats) in all.iter().zip(&seats).filter(|(claim, _)| !claim.exempt) {
            assert_eq!(*seats, claim.bounds.lower, "{claim:?}");
        }
    }
}
