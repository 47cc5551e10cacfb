//! The table.

use std::fmt::Display;

pub fn head() {
    println!("{:<62} {:>12} {:>12} {:>9}", "what", "ferrite", "upstream", "ratio");
}

/// Something that only we are asked about.
pub fn tell(what: &str, seen: impl Display) {
    println!("{what:<62} {seen:>12}");
}

/// Ours, then upstream's if it is there. The ratio says how many times more ours is.
pub fn more_is_better(what: &str, seen: &[f64]) {
    row(what, seen, |ours, theirs| ours / theirs);
}

/// As [`more_is_better`] for a cost: the ratio says how many times less ours is.
pub fn less_is_better(what: &str, seen: &[f64]) {
    row(what, seen, |ours, theirs| theirs / ours);
}

fn row(what: &str, seen: &[f64], ratio: fn(f64, f64) -> f64) {
    match seen {
        [ours, theirs] => {
            println!("{what:<62} {ours:>12.1} {theirs:>12.1} {:>7.1} ×", ratio(*ours, *theirs));
        }
        _ => seen.iter().for_each(|ours| println!("{what:<62} {ours:>12.1}")),
    }
}
