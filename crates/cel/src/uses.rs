//! The environments of Kubernetes' uses of expressions: their variables and the types of these.

use crate::library::Library;
use crate::program::Environment;
use crate::schema::DeclType;
use crate::types::Type;

/// The type of the variable that holds the variables of a policy.
const VARIABLES: &str = "kubernetes.variables";

/// An object type: its name, and its fields with their types.
type ObjectRow = (&'static str, &'static [(&'static str, &'static str)]);

/// The object types that variables have. A type stands after those that its fields name.
const OBJECTS: &[ObjectRow] = &[
    ("kubernetes.GroupVersionKind", &[("group", "string"), ("version", "string"), ("kind", "string")]),
    (
        "kubernetes.GroupVersionResource",
        &[("group", "string"), ("version", "string"), ("resource", "string")],
    ),
    (
        "kubernetes.UserInfo",
        &[
            ("username", "string"),
            ("uid", "string"),
            ("groups", "list(string)"),
            ("extra", "map(string, list(string))"),
        ],
    ),
    (
        "kubernetes.AdmissionRequest",
        &[
            ("kind", "kubernetes.GroupVersionKind"),
            ("resource", "kubernetes.GroupVersionResource"),
            ("subResource", "string"),
            ("requestKind", "kubernetes.GroupVersionKind"),
            ("requestResource", "kubernetes.GroupVersionResource"),
            ("requestSubResource", "string"),
            ("name", "string"),
            ("namespace", "string"),
            ("operation", "string"),
            ("userInfo", "kubernetes.UserInfo"),
            ("dryRun", "bool"),
            ("options", "dyn"),
        ],
    ),
    (
        "kubernetes.NamespaceMetadata",
        &[
            ("name", "string"),
            ("generateName", "string"),
            ("namespace", "string"),
            ("labels", "map(string, string)"),
            ("annotations", "map(string, string)"),
            ("UID", "string"),
            ("creationTimestamp", "timestamp"),
            ("deletionGracePeriodSeconds", "int"),
            ("deletionTimestamp", "timestamp"),
            ("generation", "int"),
            ("resourceVersion", "string"),
            ("finalizers", "list(string)"),
        ],
    ),
    ("kubernetes.NamespaceSpec", &[("finalizers", "list(string)")]),
    (
        "kubernetes.NamespaceCondition",
        &[
            ("status", "string"),
            ("type", "string"),
            ("lastTransitionTime", "timestamp"),
            ("message", "string"),
            ("reason", "string"),
        ],
    ),
    (
        "kubernetes.NamespaceStatus",
        &[("conditions", "list(kubernetes.NamespaceCondition)"), ("phase", "string")],
    ),
    (
        "kubernetes.Namespace",
        &[
            ("metadata", "kubernetes.NamespaceMetadata"),
            ("spec", "kubernetes.NamespaceSpec"),
            ("status", "kubernetes.NamespaceStatus"),
        ],
    ),
    (
        "kubernetes.SelectorRequirement",
        &[("key", "string"), ("operator", "string"), ("values", "list(string)")],
    ),
    (
        "kubernetes.FieldSelectorAttributes",
        &[("rawSelector", "string"), ("requirements", "list(kubernetes.SelectorRequirement)")],
    ),
    (
        "kubernetes.LabelSelectorAttributes",
        &[("rawSelector", "string"), ("requirements", "list(kubernetes.SelectorRequirement)")],
    ),
    (
        "kubernetes.ResourceAttributes",
        &[
            ("namespace", "string"),
            ("verb", "string"),
            ("group", "string"),
            ("version", "string"),
            ("resource", "string"),
            ("subresource", "string"),
            ("name", "string"),
            ("fieldSelector", "kubernetes.FieldSelectorAttributes"),
            ("labelSelector", "kubernetes.LabelSelectorAttributes"),
        ],
    ),
    ("kubernetes.NonResourceAttributes", &[("path", "string"), ("verb", "string")]),
    (
        "kubernetes.SubjectAccessReviewSpec",
        &[
            ("resourceAttributes", "kubernetes.ResourceAttributes"),
            ("nonResourceAttributes", "kubernetes.NonResourceAttributes"),
            ("user", "string"),
            ("groups", "list(string)"),
            ("extra", "map(string, list(string))"),
            ("uid", "string"),
        ],
    ),
    (
        "kubernetes.DRADevice",
        &[
            ("driver", "string"),
            ("attributes", "map(string, map(string, any))"),
            ("capacity", "map(string, map(string, kubernetes.Quantity))"),
            ("allowMultipleAllocations", "bool"),
        ],
    ),
    ("JSONPatch", &[("op", "string"), ("path", "string"), ("from", "string"), ("value", "dyn")]),
];

impl Environment {
    /// Adds the object types `names`. A type that is none of this crate's is left out.
    fn with_objects(self, names: &[&str]) -> Self {
        OBJECTS.iter().filter(|(name, _)| names.contains(name)).fold(self, |environment, (name, fields)| {
            let fields = fields.iter().filter_map(|(field, of)| {
                // A field that is a reserved word is declared by its escaped name.
                let field = crate::escape::escape(field)?;
                Some((field, DeclType::simple(Type::parse(of)?)))
            });
            environment.with_types(&DeclType::object(name, fields))
        })
    }

    fn with_object_variable(self, variable: &str, of: &str) -> Self {
        self.with_variable(variable, Type::object(of))
    }

    /// Adds the variables of admission: `object`, `oldObject`, `request`, `namespaceObject`, and, if they are there,
    /// `params` and `authorizer`.
    pub fn with_admission_variables(self, params: bool, authorizer: bool) -> Self {
        let mut environment = self
            .with_objects(&[
                "kubernetes.GroupVersionKind",
                "kubernetes.GroupVersionResource",
                "kubernetes.UserInfo",
                "kubernetes.AdmissionRequest",
                "kubernetes.NamespaceMetadata",
                "kubernetes.NamespaceSpec",
                "kubernetes.NamespaceCondition",
                "kubernetes.NamespaceStatus",
                "kubernetes.Namespace",
            ])
            .with_variable("object", Type::Dyn)
            .with_variable("oldObject", Type::Dyn)
            .with_object_variable("request", "kubernetes.AdmissionRequest")
            .with_object_variable("namespaceObject", "kubernetes.Namespace");
        if params {
            environment = environment.with_variable("params", Type::Dyn);
        }
        if authorizer {
            environment = environment
                .with_object_variable("authorizer", "kubernetes.authorization.Authorizer")
                .with_object_variable("authorizer.requestResource", "kubernetes.authorization.ResourceCheck");
        }
        environment
    }

    /// Adds the variable `variables` with the named variables of a policy, each with the type of its expression.
    pub fn with_policy_variables<'v>(self, variables: impl IntoIterator<Item = (&'v str, Type)>) -> Self {
        let fields = variables.into_iter().map(|(name, of)| (name.to_owned(), DeclType::simple(of)));
        self.with_types(&DeclType::object(VARIABLES, fields)).with_object_variable("variables", VARIABLES)
    }

    /// Adds one named variable to `variables`. One of the same name is replaced.
    pub fn add_policy_variable(&mut self, name: &str, of: Type) {
        self.add_field(VARIABLES, name, of);
    }

    /// Adds the names for patches of mutating admission policies: `Object{...}`, `JSONPatch{...}`,
    /// `jsonpatch.escapeKey`.
    pub fn with_mutations(self) -> Self {
        self.with_dynamic_object("Object").with_objects(&["JSONPatch"]).with_library(Library::JsonPatch)
    }

    /// Adds the variable `claims` of an authentication configuration.
    pub fn with_claims(self) -> Self {
        self.with_variable("claims", Type::map(Type::String, Type::Any))
    }

    /// Adds the variable `user` of an authentication configuration.
    pub fn with_user(self) -> Self {
        self.with_objects(&["kubernetes.UserInfo"]).with_object_variable("user", "kubernetes.UserInfo")
    }

    /// Adds the variable `request` of an authorization configuration.
    pub fn with_subject_access_review(self) -> Self {
        self.with_objects(&[
            "kubernetes.SelectorRequirement",
            "kubernetes.FieldSelectorAttributes",
            "kubernetes.LabelSelectorAttributes",
            "kubernetes.ResourceAttributes",
            "kubernetes.NonResourceAttributes",
            "kubernetes.SubjectAccessReviewSpec",
        ])
        .with_object_variable("request", "kubernetes.SubjectAccessReviewSpec")
    }

    /// Adds the variable `device` of device selectors, and `cel.bind`.
    pub fn with_device(self) -> Self {
        self.with_objects(&["kubernetes.DRADevice"])
            .with_object_variable("device", "kubernetes.DRADevice")
            .with_library(Library::Bindings)
    }
}
