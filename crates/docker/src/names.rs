//! Names for containers that were given none, and which names are allowed.

const ADJECTIVES: &[&str] = &[
    "agile", "amber", "bold", "brave", "bright", "calm", "candid", "careful", "cheerful", "clever", "cosy",
    "curious", "daring", "deft", "eager", "earnest", "elegant", "fair", "fearless", "fluent", "fond",
    "frank", "gentle", "gifted", "glad", "graceful", "happy", "hardy", "hearty", "honest", "humble", "jolly",
    "keen", "kind", "lively", "loyal", "lucid", "mellow", "merry", "mighty", "modest", "neat", "nimble",
    "noble", "patient", "peaceful", "placid", "plucky", "polite", "proud", "quick", "quiet", "ready",
    "serene", "sharp", "sincere", "sleepy", "smart", "steady", "sturdy", "subtle", "sunny", "swift", "tidy",
    "trusty", "upbeat", "vivid", "warm", "wise", "witty", "zealous", "zesty",
];

const SURNAMES: &[&str] = &[
    "abel",
    "ampere",
    "archimedes",
    "babbage",
    "banach",
    "bardeen",
    "bernoulli",
    "bohr",
    "boole",
    "bose",
    "brahe",
    "carson",
    "cauchy",
    "cerf",
    "chandrasekhar",
    "clarke",
    "copernicus",
    "curie",
    "darwin",
    "dijkstra",
    "dirac",
    "einstein",
    "erdos",
    "euclid",
    "euler",
    "faraday",
    "fermat",
    "fermi",
    "feynman",
    "franklin",
    "galileo",
    "galois",
    "gauss",
    "germain",
    "goodall",
    "hamilton",
    "hawking",
    "heisenberg",
    "herschel",
    "hilbert",
    "hopper",
    "hypatia",
    "jackson",
    "johnson",
    "kepler",
    "knuth",
    "kovalevskaya",
    "lamarr",
    "leavitt",
    "leibniz",
    "lovelace",
    "maxwell",
    "mcclintock",
    "meitner",
    "mendel",
    "newton",
    "nobel",
    "noether",
    "pascal",
    "pasteur",
    "perlman",
    "planck",
    "poincare",
    "ptolemy",
    "ramanujan",
    "ride",
    "ritchie",
    "rubin",
    "shannon",
    "tesla",
    "thompson",
    "torvalds",
    "turing",
    "volta",
    "wiles",
    "wozniak",
    "wu",
];

/// A name like `keen_turing`. After many tries a digit is added, so that there is always a free one.
pub fn random(taken: impl Fn(&str) -> bool) -> String {
    let pick = |words: &[&'static str]| words[rand::random_range(0..words.len())];
    let mut name = String::new();
    for attempt in 0..64 {
        name = format!("{}_{}", pick(ADJECTIVES), pick(SURNAMES));
        if attempt > 8 {
            name.push_str(&rand::random_range(0..1000).to_string());
        }
        if !taken(&name) {
            break;
        }
    }
    name
}

/// `[a-zA-Z0-9][a-zA-Z0-9_.-]+`
pub fn is_valid(name: &str) -> bool {
    let mut bytes = name.bytes();
    bytes.next().is_some_and(|b| b.is_ascii_alphanumeric())
        && name.len() >= 2
        && name.len() <= 255
        && bytes.all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for (name, valid) in
            [("web", true), ("w", false), ("-x", false), ("a/b", false), ("a.b_c-d", true), ("", false)]
        {
            assert_eq!(is_valid(name), valid, "{name:?}");
        }
        let name = random(|_| false);
        assert!(is_valid(&name) && name.contains('_'), "{name}");
        let crowded = random(|name| !name.ends_with(|c: char| c.is_ascii_digit()));
        assert!(crowded.ends_with(|c: char| c.is_ascii_digit()), "{crowded}");
    }
}
