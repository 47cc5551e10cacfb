//! Signatures of the libraries.
//!
//! Of several overloads that fit an empty list the first counts, so that their order is upstream's. A row is the function's name, the id of the overload, and its signature. A dot before the parameters marks a
//! function that is called on a receiver, its first parameter.

use super::Row;
/// The library `kubernetes.Semver`.
pub(super) const SEMVER: &[Row] = &[
    ("compareTo", "semver_compare_to", ".kubernetes.Semver, kubernetes.Semver -> int"),
    ("isGreaterThan", "semver_is_greater_than", ".kubernetes.Semver, kubernetes.Semver -> bool"),
    ("isLessThan", "semver_is_less_than", ".kubernetes.Semver, kubernetes.Semver -> bool"),
    ("isSemver", "is_semver_string", "string -> bool"),
    ("isSemver", "is_semver_string_bool", "string, bool -> bool"),
    ("major", "semver_major", ".kubernetes.Semver -> int"),
    ("minor", "semver_minor", ".kubernetes.Semver -> int"),
    ("patch", "semver_patch", ".kubernetes.Semver -> int"),
    ("semver", "string_bool_to_semver", "string, bool -> kubernetes.Semver"),
    ("semver", "string_to_semver", "string -> kubernetes.Semver"),
];

/// The library `kubernetes.authz`.
pub(super) const AUTHZ: &[Row] = &[
    ("allowed", "decision_allowed", ".kubernetes.authorization.Decision -> bool"),
    (
        "check",
        "pathcheck_check",
        ".kubernetes.authorization.PathCheck, string -> kubernetes.authorization.Decision",
    ),
    (
        "check",
        "resourcecheck_check",
        ".kubernetes.authorization.ResourceCheck, string -> kubernetes.authorization.Decision",
    ),
    ("error", "decision_error", ".kubernetes.authorization.Decision -> string"),
    ("errored", "decision_errored", ".kubernetes.authorization.Decision -> bool"),
    (
        "group",
        "authorizer_group",
        ".kubernetes.authorization.Authorizer, string -> kubernetes.authorization.GroupCheck",
    ),
    (
        "name",
        "resourcecheck_name",
        ".kubernetes.authorization.ResourceCheck, string -> kubernetes.authorization.ResourceCheck",
    ),
    (
        "namespace",
        "resourcecheck_namespace",
        ".kubernetes.authorization.ResourceCheck, string -> kubernetes.authorization.ResourceCheck",
    ),
    (
        "path",
        "authorizer_path",
        ".kubernetes.authorization.Authorizer, string -> kubernetes.authorization.PathCheck",
    ),
    ("reason", "decision_reason", ".kubernetes.authorization.Decision -> string"),
    (
        "resource",
        "groupcheck_resource",
        ".kubernetes.authorization.GroupCheck, string -> kubernetes.authorization.ResourceCheck",
    ),
    (
        "serviceAccount",
        "authorizer_serviceaccount",
        ".kubernetes.authorization.Authorizer, string, string -> kubernetes.authorization.Authorizer",
    ),
    (
        "subresource",
        "resourcecheck_subresource",
        ".kubernetes.authorization.ResourceCheck, string -> kubernetes.authorization.ResourceCheck",
    ),
];

/// The library `kubernetes.authzSelectors`.
pub(super) const AUTHZ_SELECTORS: &[Row] = &[
    (
        "fieldSelector",
        "authorizer_fieldselector",
        ".kubernetes.authorization.ResourceCheck, string -> kubernetes.authorization.ResourceCheck",
    ),
    (
        "labelSelector",
        "authorizer_labelselector",
        ".kubernetes.authorization.ResourceCheck, string -> kubernetes.authorization.ResourceCheck",
    ),
];

/// The library `kubernetes.format`.
pub(super) const FORMAT: &[Row] = &[
    ("format.byte", "format.byte", " -> kubernetes.NamedFormat"),
    ("format.date", "format.date", " -> kubernetes.NamedFormat"),
    ("format.datetime", "format.datetime", " -> kubernetes.NamedFormat"),
    ("format.dns1035Label", "format.dns1035Label", " -> kubernetes.NamedFormat"),
    ("format.dns1035LabelPrefix", "format.dns1035LabelPrefix", " -> kubernetes.NamedFormat"),
    ("format.dns1123Label", "format.dns1123Label", " -> kubernetes.NamedFormat"),
    ("format.dns1123LabelPrefix", "format.dns1123LabelPrefix", " -> kubernetes.NamedFormat"),
    ("format.dns1123Subdomain", "format.dns1123Subdomain", " -> kubernetes.NamedFormat"),
    ("format.dns1123SubdomainPrefix", "format.dns1123SubdomainPrefix", " -> kubernetes.NamedFormat"),
    ("format.labelValue", "format.labelValue", " -> kubernetes.NamedFormat"),
    ("format.named", "format-named", "string -> optional_type(kubernetes.NamedFormat)"),
    ("format.qualifiedName", "format.qualifiedName", " -> kubernetes.NamedFormat"),
    ("format.uri", "format.uri", " -> kubernetes.NamedFormat"),
    ("format.uuid", "format.uuid", " -> kubernetes.NamedFormat"),
    ("validate", "format-validate", ".kubernetes.NamedFormat, string -> optional_type(list(string))"),
];

/// The library `kubernetes.lists`.
pub(super) const LISTS: &[Row] = &[
    ("indexOf", "list_a_index_of_int", ".list(A), A -> int"),
    ("isSorted", "list_int_is_sorted_bool", ".list(int) -> bool"),
    ("isSorted", "list_uint_is_sorted_bool", ".list(uint) -> bool"),
    ("isSorted", "list_double_is_sorted_bool", ".list(double) -> bool"),
    ("isSorted", "list_bool_is_sorted_bool", ".list(bool) -> bool"),
    ("isSorted", "list_duration_is_sorted_bool", ".list(duration) -> bool"),
    ("isSorted", "list_timestamp_is_sorted_bool", ".list(timestamp) -> bool"),
    ("isSorted", "list_string_is_sorted_bool", ".list(string) -> bool"),
    ("isSorted", "list_bytes_is_sorted_bool", ".list(bytes) -> bool"),
    ("lastIndexOf", "list_a_last_index_of_int", ".list(A), A -> int"),
    ("max", "list_int_max_int", ".list(int) -> int"),
    ("max", "list_uint_max_uint", ".list(uint) -> uint"),
    ("max", "list_double_max_double", ".list(double) -> double"),
    ("max", "list_bool_max_bool", ".list(bool) -> bool"),
    ("max", "list_duration_max_duration", ".list(duration) -> duration"),
    ("max", "list_timestamp_max_timestamp", ".list(timestamp) -> timestamp"),
    ("max", "list_string_max_string", ".list(string) -> string"),
    ("max", "list_bytes_max_bytes", ".list(bytes) -> bytes"),
    ("min", "list_int_min_int", ".list(int) -> int"),
    ("min", "list_uint_min_uint", ".list(uint) -> uint"),
    ("min", "list_double_min_double", ".list(double) -> double"),
    ("min", "list_bool_min_bool", ".list(bool) -> bool"),
    ("min", "list_duration_min_duration", ".list(duration) -> duration"),
    ("min", "list_timestamp_min_timestamp", ".list(timestamp) -> timestamp"),
    ("min", "list_string_min_string", ".list(string) -> string"),
    ("min", "list_bytes_min_bytes", ".list(bytes) -> bytes"),
    ("sum", "list_int_sum_int", ".list(int) -> int"),
    ("sum", "list_uint_sum_uint", ".list(uint) -> uint"),
    ("sum", "list_double_sum_double", ".list(double) -> double"),
    ("sum", "list_duration_sum_duration", ".list(duration) -> duration"),
];

/// The library `kubernetes.net.cidr`.
pub(super) const CIDR: &[Row] = &[
    ("cidr", "string_to_cidr", "string -> net.CIDR"),
    ("containsCIDR", "cidr_contains_cidr", ".net.CIDR, net.CIDR -> bool"),
    ("containsCIDR", "cidr_contains_cidr_string", ".net.CIDR, string -> bool"),
    ("containsIP", "cidr_contains_ip_ip", ".net.CIDR, net.IP -> bool"),
    ("containsIP", "cidr_contains_ip_string", ".net.CIDR, string -> bool"),
    ("ip", "cidr_ip", ".net.CIDR -> net.IP"),
    ("isCIDR", "is_cidr", "string -> bool"),
    ("masked", "cidr_masked", ".net.CIDR -> net.CIDR"),
    ("prefixLength", "cidr_prefix_length", ".net.CIDR -> int"),
    ("string", "cidr_to_string", "net.CIDR -> string"),
];

/// The library `kubernetes.net.ip`.
pub(super) const IP: &[Row] = &[
    ("family", "ip_family", ".net.IP -> int"),
    ("ip", "string_to_ip", "string -> net.IP"),
    ("ip.isCanonical", "ip_is_canonical", "string -> bool"),
    ("isGlobalUnicast", "ip_is_global_unicast", ".net.IP -> bool"),
    ("isIP", "is_ip", "string -> bool"),
    ("isLinkLocalMulticast", "ip_is_link_local_multicast", ".net.IP -> bool"),
    ("isLinkLocalUnicast", "ip_is_link_local_unicast", ".net.IP -> bool"),
    ("isLoopback", "ip_is_loopback", ".net.IP -> bool"),
    ("isUnspecified", "ip_is_unspecified", ".net.IP -> bool"),
    ("string", "ip_to_string", "net.IP -> string"),
];

/// The library `kubernetes.quantity`.
pub(super) const QUANTITY: &[Row] = &[
    ("add", "quantity_add", ".kubernetes.Quantity, kubernetes.Quantity -> kubernetes.Quantity"),
    ("add", "quantity_add_int", ".kubernetes.Quantity, int -> kubernetes.Quantity"),
    ("asApproximateFloat", "quantity_get_float", ".kubernetes.Quantity -> double"),
    ("asInteger", "quantity_get_int", ".kubernetes.Quantity -> int"),
    ("compareTo", "quantity_compare_to", ".kubernetes.Quantity, kubernetes.Quantity -> int"),
    ("isGreaterThan", "quantity_is_greater_than", ".kubernetes.Quantity, kubernetes.Quantity -> bool"),
    ("isInteger", "quantity_is_integer", ".kubernetes.Quantity -> bool"),
    ("isLessThan", "quantity_is_less_than", ".kubernetes.Quantity, kubernetes.Quantity -> bool"),
    ("isQuantity", "is_quantity_string", "string -> bool"),
    ("quantity", "string_to_quantity", "string -> kubernetes.Quantity"),
    ("sign", "quantity_sign", "kubernetes.Quantity -> int"),
    ("sub", "quantity_sub", ".kubernetes.Quantity, kubernetes.Quantity -> kubernetes.Quantity"),
    ("sub", "quantity_sub_int", ".kubernetes.Quantity, int -> kubernetes.Quantity"),
];

/// The library `kubernetes.regex`.
pub(super) const REGEX: &[Row] = &[
    ("find", "string_find_string", ".string, string -> string"),
    ("findAll", "string_find_all_string", ".string, string -> list(string)"),
    ("findAll", "string_find_all_string_int", ".string, string, int -> list(string)"),
];

/// The library `kubernetes.urls`.
pub(super) const URLS: &[Row] = &[
    ("getEscapedPath", "url_get_escaped_path", ".kubernetes.URL -> string"),
    ("getHost", "url_get_host", ".kubernetes.URL -> string"),
    ("getHostname", "url_get_hostname", ".kubernetes.URL -> string"),
    ("getPort", "url_get_port", ".kubernetes.URL -> string"),
    ("getQuery", "url_get_query", ".kubernetes.URL -> map(string, list(string))"),
    ("getScheme", "url_get_scheme", ".kubernetes.URL -> string"),
    ("isURL", "is_url_string", "string -> bool"),
    ("url", "string_to_url", "string -> kubernetes.URL"),
];

/// The lists extension, version 3.
pub(super) const LISTS_EXTENSION: &[Row] = &[
    ("@sortByAssociatedKeys", "list_int_sortByAssociatedKeys", ".list(T), list(int) -> list(T)"),
    ("@sortByAssociatedKeys", "list_uint_sortByAssociatedKeys", ".list(T), list(uint) -> list(T)"),
    ("@sortByAssociatedKeys", "list_double_sortByAssociatedKeys", ".list(T), list(double) -> list(T)"),
    ("@sortByAssociatedKeys", "list_bool_sortByAssociatedKeys", ".list(T), list(bool) -> list(T)"),
    (
        "@sortByAssociatedKeys",
        "list_google.protobuf.Duration_sortByAssociatedKeys",
        ".list(T), list(duration) -> list(T)",
    ),
    (
        "@sortByAssociatedKeys",
        "list_google.protobuf.Timestamp_sortByAssociatedKeys",
        ".list(T), list(timestamp) -> list(T)",
    ),
    ("@sortByAssociatedKeys", "list_string_sortByAssociatedKeys", ".list(T), list(string) -> list(T)"),
    ("@sortByAssociatedKeys", "list_bytes_sortByAssociatedKeys", ".list(T), list(bytes) -> list(T)"),
    ("distinct", "list_distinct", ".list(T) -> list(T)"),
    ("flatten", "list_flatten", ".list(list(T)) -> list(T)"),
    ("flatten", "list_flatten_int", ".list(dyn), int -> list(dyn)"),
    ("lists.range", "lists_range", "int -> list(int)"),
    ("reverse", "list_reverse", ".list(T) -> list(T)"),
    ("slice", "list_slice", ".list(T), int, int -> list(T)"),
    ("sort", "list_int_sort", ".list(int) -> list(int)"),
    ("sort", "list_uint_sort", ".list(uint) -> list(uint)"),
    ("sort", "list_double_sort", ".list(double) -> list(double)"),
    ("sort", "list_bool_sort", ".list(bool) -> list(bool)"),
    ("sort", "list_google.protobuf.Duration_sort", ".list(duration) -> list(duration)"),
    ("sort", "list_google.protobuf.Timestamp_sort", ".list(timestamp) -> list(timestamp)"),
    ("sort", "list_string_sort", ".list(string) -> list(string)"),
    ("sort", "list_bytes_sort", ".list(bytes) -> list(bytes)"),
];

/// The library `optional types`.
pub(super) const OPTIONAL: &[Row] = &[
    ("_?._", "select_optional_field", "dyn, string -> optional_type(V)"),
    ("_[?_]", "list_optindex_optional_int", "list(V), int -> optional_type(V)"),
    ("_[?_]", "map_optindex_optional_value", "map(K, V), K -> optional_type(V)"),
    ("_[?_]", "optional_list_optindex_optional_int", "optional_type(list(V)), int -> optional_type(V)"),
    ("_[?_]", "optional_map_optindex_optional_value", "optional_type(map(K, V)), K -> optional_type(V)"),
    ("_[_]", "optional_list_index_int", "optional_type(list(V)), int -> optional_type(V)"),
    ("_[_]", "optional_map_index_value", "optional_type(map(K, V)), K -> optional_type(V)"),
    ("first", "list_first", ".list(V) -> optional_type(V)"),
    ("hasValue", "optional_hasValue", ".optional_type(V) -> bool"),
    ("last", "list_last", ".list(V) -> optional_type(V)"),
    ("optional.none", "optional_none", " -> optional_type(V)"),
    ("optional.of", "optional_of", "V -> optional_type(V)"),
    ("optional.ofNonZeroValue", "optional_ofNonZeroValue", "V -> optional_type(V)"),
    ("optional.unwrap", "optional_unwrap", "list(optional_type(V)) -> list(V)"),
    ("or", "optional_or_optional", ".optional_type(V), optional_type(V) -> optional_type(V)"),
    ("orValue", "optional_orValue_value", ".optional_type(V), V -> V"),
    ("unwrapOpt", "optional_unwrapOpt", ".list(optional_type(V)) -> list(V)"),
    ("value", "optional_value", ".optional_type(V) -> V"),
];

/// The library `sets extension`.
pub(super) const SETS: &[Row] = &[
    ("sets.contains", "list_sets_contains_list", "list(T), list(T) -> bool"),
    ("sets.equivalent", "list_sets_equivalent_list", "list(T), list(T) -> bool"),
    ("sets.intersects", "list_sets_intersects_list", "list(T), list(T) -> bool"),
];

/// The strings extension, version 0.
pub(super) const STRINGS: &[Row] = &[
    ("charAt", "string_char_at_int", ".string, int -> string"),
    ("indexOf", "string_index_of_string", ".string, string -> int"),
    ("indexOf", "string_index_of_string_int", ".string, string, int -> int"),
    ("join", "list_join", ".list(string) -> string"),
    ("join", "list_join_string", ".list(string), string -> string"),
    ("lastIndexOf", "string_last_index_of_string", ".string, string -> int"),
    ("lastIndexOf", "string_last_index_of_string_int", ".string, string, int -> int"),
    ("lowerAscii", "string_lower_ascii", ".string -> string"),
    ("replace", "string_replace_string_string", ".string, string, string -> string"),
    ("replace", "string_replace_string_string_int", ".string, string, string, int -> string"),
    ("split", "string_split_string", ".string, string -> list(string)"),
    ("split", "string_split_string_int", ".string, string, int -> list(string)"),
    ("substring", "string_substring_int", ".string, int -> string"),
    ("substring", "string_substring_int_int", ".string, int, int -> string"),
    ("trim", "string_trim", ".string -> string"),
    ("upperAscii", "string_upper_ascii", ".string -> string"),
];

/// Additions of version 2 of the strings extension.
pub(super) const STRINGS_2: &[Row] = &[
    ("format", "string_format", ".string, list(dyn) -> string"),
    ("strings.quote", "strings_quote", "string -> string"),
];

/// The library `two-variable comprehensions`.
pub(super) const TWO_VARIABLES: &[Row] = &[
    ("cel.@mapInsert", "@mapInsert_map_key_value", "map(K, V), K, V -> map(K, V)"),
    ("cel.@mapInsert", "@mapInsert_map_map", "map(K, V), map(K, V) -> map(K, V)"),
];

/// For patches of mutating admission policies.
pub(super) const JSON_PATCH: &[Row] =
    &[("jsonpatch.escapeKey", "string_jsonpatch_escapeKey_string", "string -> string")];

/// `includes`, for device selectors with attributes that are lists.
pub(super) const DEVICE_SELECTORS: &[Row] = &[("includes", "dra_includes_dyn_dyn", ".dyn, dyn -> bool")];

/// The math extension. Kubernetes does not have it.
pub(super) const MATH: &[Row] = &[
    ("math.@max", "math_@max_int", "int -> int"),
    ("math.@max", "math_@max_uint", "uint -> uint"),
    ("math.@max", "math_@max_double", "double -> double"),
    ("math.@max", "math_@max_int_int", "int, int -> int"),
    ("math.@max", "math_@max_int_uint", "int, uint -> dyn"),
    ("math.@max", "math_@max_int_double", "int, double -> dyn"),
    ("math.@max", "math_@max_uint_int", "uint, int -> dyn"),
    ("math.@max", "math_@max_uint_uint", "uint, uint -> uint"),
    ("math.@max", "math_@max_uint_double", "uint, double -> dyn"),
    ("math.@max", "math_@max_double_int", "double, int -> dyn"),
    ("math.@max", "math_@max_double_uint", "double, uint -> dyn"),
    ("math.@max", "math_@max_double_double", "double, double -> double"),
    ("math.@max", "math_@max_list_int", "list(int) -> int"),
    ("math.@max", "math_@max_list_uint", "list(uint) -> uint"),
    ("math.@max", "math_@max_list_double", "list(double) -> double"),
    ("math.@min", "math_@min_int", "int -> int"),
    ("math.@min", "math_@min_uint", "uint -> uint"),
    ("math.@min", "math_@min_double", "double -> double"),
    ("math.@min", "math_@min_int_int", "int, int -> int"),
    ("math.@min", "math_@min_int_uint", "int, uint -> dyn"),
    ("math.@min", "math_@min_int_double", "int, double -> dyn"),
    ("math.@min", "math_@min_uint_int", "uint, int -> dyn"),
    ("math.@min", "math_@min_uint_uint", "uint, uint -> uint"),
    ("math.@min", "math_@min_uint_double", "uint, double -> dyn"),
    ("math.@min", "math_@min_double_int", "double, int -> dyn"),
    ("math.@min", "math_@min_double_uint", "double, uint -> dyn"),
    ("math.@min", "math_@min_double_double", "double, double -> double"),
    ("math.@min", "math_@min_list_int", "list(int) -> int"),
    ("math.@min", "math_@min_list_uint", "list(uint) -> uint"),
    ("math.@min", "math_@min_list_double", "list(double) -> double"),
    ("math.ceil", "math_ceil_double", "double -> double"),
    ("math.floor", "math_floor_double", "double -> double"),
    ("math.round", "math_round_double", "double -> double"),
    ("math.trunc", "math_trunc_double", "double -> double"),
    ("math.isInf", "math_isInf_double", "double -> bool"),
    ("math.isNaN", "math_isNaN_double", "double -> bool"),
    ("math.isFinite", "math_isFinite_double", "double -> bool"),
    ("math.abs", "math_abs_double", "double -> double"),
    ("math.abs", "math_abs_int", "int -> int"),
    ("math.abs", "math_abs_uint", "uint -> uint"),
    ("math.sign", "math_sign_double", "double -> double"),
    ("math.sign", "math_sign_int", "int -> int"),
    ("math.sign", "math_sign_uint", "uint -> uint"),
    ("math.sqrt", "math_sqrt_double", "double -> double"),
    ("math.sqrt", "math_sqrt_int", "int -> double"),
    ("math.sqrt", "math_sqrt_uint", "uint -> double"),
    ("math.bitAnd", "math_bitAnd_int_int", "int, int -> int"),
    ("math.bitAnd", "math_bitAnd_uint_uint", "uint, uint -> uint"),
    ("math.bitOr", "math_bitOr_int_int", "int, int -> int"),
    ("math.bitOr", "math_bitOr_uint_uint", "uint, uint -> uint"),
    ("math.bitXor", "math_bitXor_int_int", "int, int -> int"),
    ("math.bitXor", "math_bitXor_uint_uint", "uint, uint -> uint"),
    ("math.bitNot", "math_bitNot_int_int", "int -> int"),
    ("math.bitNot", "math_bitNot_uint_uint", "uint -> uint"),
    ("math.bitShiftLeft", "math_bitShiftLeft_int_int", "int, int -> int"),
    ("math.bitShiftLeft", "math_bitShiftLeft_uint_int", "uint, int -> uint"),
    ("math.bitShiftRight", "math_bitShiftRight_int_int", "int, int -> int"),
    ("math.bitShiftRight", "math_bitShiftRight_uint_int", "uint, int -> uint"),
];

/// The encoders extension. Kubernetes does not have it.
pub(super) const ENCODERS: &[Row] = &[
    ("base64.encode", "base64_encode_bytes", "bytes -> string"),
    ("base64.decode", "base64_decode_string", "string -> bytes"),
];

/// Additions of version 3 of the strings extension. Kubernetes does not have them.
pub(super) const STRINGS_3: &[Row] = &[("reverse", "string_reverse", ".string -> string")];
