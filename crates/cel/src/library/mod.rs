//! Libraries: the functions and macros that environments are made of.

mod standard;
mod tables;

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use crate::macros::{self, Macro};
use crate::types::Type;

/// A function's name, the id of an overload, its signature.
type Row = (&'static str, &'static str, &'static str);

/// A part of an environment that can be added to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Library {
    Standard,
    MixedComparisons,
    Strings,
    /// `format`, `strings.quote`.
    Strings2,
    /// `string.reverse`. Not part of Kubernetes.
    Strings3,
    Lists,
    ListsExtension,
    Regex,
    Urls,
    Authz,
    AuthzSelectors,
    Optional,
    Quantity,
    Sets,
    Ip,
    Cidr,
    Format,
    TwoVariables,
    Semver,
    JsonPatch,
    DeviceSelectors,
    /// `cel.bind`; of Kubernetes' environments only device selectors have it.
    Bindings,
    /// Not part of Kubernetes.
    Math,
    /// Not part of Kubernetes.
    Encoders,
}

struct Entry {
    library: Library,
    /// The minor version of Kubernetes that has the library in its base environment; `None` for no version.
    since: Option<u32>,
    rows: &'static [Row],
    macros: &'static [Macro],
}

const fn entry(library: Library, since: u32, rows: &'static [Row]) -> Entry {
    Entry { library, since: Some(since), rows, macros: &[] }
}

const fn extra(library: Library, rows: &'static [Row], macros: &'static [Macro]) -> Entry {
    Entry { library, since: None, rows, macros }
}

/// All libraries, in the order in which upstream adds them.
const LIBRARIES: &[Entry] = &[
    Entry { macros: macros::STANDARD, ..entry(Library::Standard, 0, standard::STANDARD) },
    entry(Library::Urls, 0, tables::URLS),
    entry(Library::Regex, 0, tables::REGEX),
    entry(Library::Lists, 0, tables::LISTS),
    entry(Library::Strings, 0, tables::STRINGS),
    entry(Library::Authz, 27, tables::AUTHZ),
    entry(Library::MixedComparisons, 28, standard::MIXED_COMPARISONS),
    Entry { macros: macros::OPTIONAL, ..entry(Library::Optional, 28, tables::OPTIONAL) },
    entry(Library::Quantity, 28, tables::QUANTITY),
    entry(Library::Strings2, 29, tables::STRINGS_2),
    entry(Library::Sets, 29, tables::SETS),
    entry(Library::Ip, 30, tables::IP),
    entry(Library::Cidr, 30, tables::CIDR),
    entry(Library::Format, 31, tables::FORMAT),
    entry(Library::AuthzSelectors, 31, tables::AUTHZ_SELECTORS),
    Entry { macros: macros::TWO_VARIABLES, ..entry(Library::TwoVariables, 32, tables::TWO_VARIABLES) },
    entry(Library::Semver, 33, tables::SEMVER),
    Entry { macros: macros::SORT_BY, ..entry(Library::ListsExtension, 34, tables::LISTS_EXTENSION) },
    extra(Library::JsonPatch, tables::JSON_PATCH, &[]),
    extra(Library::DeviceSelectors, tables::DEVICE_SELECTORS, &[]),
    extra(Library::Bindings, &[], macros::BINDINGS),
    extra(Library::Strings3, tables::STRINGS_3, &[]),
    extra(Library::Math, tables::MATH, macros::MATH),
    extra(Library::Encoders, tables::ENCODERS, &[]),
];

/// The libraries of the base environment of Kubernetes 1.`minor`.
pub(crate) fn base(minor: u32) -> impl Iterator<Item = Library> {
    LIBRARIES
        .iter()
        .filter(move |entry| entry.since.is_some_and(|since| since <= minor))
        .map(|entry| entry.library)
}

impl Library {
    pub(crate) fn macros(self) -> &'static [Macro] {
        LIBRARIES.iter().find(|entry| entry.library == self).map_or(&[], |entry| entry.macros)
    }

    /// The overloads that the library declares, by the names of their functions.
    pub(crate) fn overloads(self) -> &'static [NamedOverload] {
        static PARSED: OnceLock<HashMap<Library, Vec<NamedOverload>>> = OnceLock::new();
        let parsed = PARSED.get_or_init(|| {
            let parse = |rows: &'static [Row]| {
                rows.iter().map(|row| (row.0, Arc::new(Overload::of_row(row)))).collect()
            };
            LIBRARIES.iter().map(|entry| (entry.library, parse(entry.rows))).collect()
        });
        parsed.get(&self).map_or(&[], Vec::as_slice)
    }
}

/// An overload with the name of its function.
type NamedOverload = (&'static str, Arc<Overload>);

/// One signature of a function.
#[derive(Debug, Clone)]
pub(crate) struct Overload {
    pub id: Arc<str>,
    /// The first parameter is the receiver.
    pub receiver: bool,
    pub params: Vec<Type>,
    pub result: Type,
    pub type_params: Vec<Arc<str>>,
}

impl Overload {
    pub fn new(id: &str, receiver: bool, params: Vec<Type>, result: Type) -> Self {
        let mut type_params = Vec::new();
        for of in params.iter().chain([&result]) {
            collect_params(of, &mut type_params);
        }
        Self { id: id.into(), receiver, params, result, type_params }
    }

    fn of_row((name, id, signature): &Row) -> Self {
        let parse = |text: &str| {
            Type::parse(text).unwrap_or_else(|| panic!("the signature of {name} is invalid: {signature}"))
        };
        let (receiver, rest) = match signature.strip_prefix('.') {
            Some(rest) => (true, rest),
            None => (false, *signature),
        };
        let (params, result) = rest.rsplit_once("-> ").unwrap_or(("", rest));
        let params = split(params).into_iter().map(parse).collect();
        Self::new(id, receiver, params, parse(result))
    }
}

/// Splits at the commas that are in no parentheses.
fn split(list: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    let (mut depth, mut start) = (0, 0);
    for (at, c) in list.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(list[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(list[start..].trim());
    parts.retain(|part| !part.is_empty());
    parts
}

fn collect_params(of: &Type, found: &mut Vec<Arc<str>>) {
    match of {
        Type::Param(name) if !found.contains(name) => found.push(name.clone()),
        Type::List(of) | Type::Wrapper(of) | Type::Type(Some(of)) => collect_params(of, found),
        Type::Map(of) => {
            collect_params(&of.0, found);
            collect_params(&of.1, found);
        }
        Type::Opaque(_, params) => params.iter().for_each(|param| collect_params(param, found)),
        _ => {}
    }
}
