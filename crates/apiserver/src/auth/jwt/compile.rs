//! The expressions of an authentication configuration, compiled and checked with upstream's words.

use super::claims::{Mapper, Rule, Source};
use super::config::{GivenJwt, Mapping, Mappings};
use ferrite_api::field::{FieldError, Path};
use ferrite_api::meta_validation::dns1123_subdomain;
use ferrite_cel::{Environment, Program, Type};
use std::collections::BTreeSet;

/// Compiles expressions, and sees whether they read what they must.
pub(super) struct Compiler {
    claims: Environment,
    user: Environment,
    reads_email: bool,
    reads_email_verified: bool,
}

/// True if an expression selects a member of `claims`, with or without a question mark.
fn selects(environment: &Environment, expression: &str, member: &str) -> bool {
    let Ok(text) = environment.reprint(expression) else { return false };
    [format!("claims.{member}"), format!("claims.?{member}")].iter().any(|wanted| {
        text.match_indices(wanted.as_str()).any(|(at, _)| {
            let after = text[at + wanted.len()..].chars().next();
            !after.is_some_and(|c| c.is_ascii_alphanumeric() || c == '_')
        })
    })
}

impl Compiler {
    pub fn new() -> Self {
        let base = || Environment::kubernetes(36);
        Self {
            claims: base().with_claims(),
            user: base().with_user(),
            reads_email: false,
            reads_email_verified: false,
        }
    }

    fn compile(
        environment: &Environment,
        text: &str,
        is_bool: bool,
        path: &Path,
    ) -> Result<Program, FieldError> {
        let invalid = |why: String| FieldError::invalid(path, text, why);
        let program = environment.compile(text).map_err(|e| invalid(format!("compilation failed: {e}")))?;
        match is_bool && *program.result_type() != Type::Bool {
            true => Err(invalid("must evaluate to bool".to_owned())),
            false => Ok(program),
        }
    }

    fn claim(&mut self, text: &str, is_bool: bool, path: &Path) -> Result<Program, FieldError> {
        Self::compile(&self.claims, text, is_bool, path)
    }

    pub fn claim_rules(
        &mut self,
        given: &GivenJwt,
        path: &Path,
        mapper: &mut Mapper,
        errors: &mut Vec<FieldError>,
    ) {
        let (mut claims, mut expressions) = (BTreeSet::new(), BTreeSet::new());
        for (index, rule) in given.claim_validation_rules.iter().enumerate() {
            let path = path.index(index);
            match (rule.claim.is_empty(), rule.expression.is_empty()) {
                (false, false) => {
                    let why = "claim and expression can't both be set";
                    errors.push(FieldError::invalid(&path, rule.claim.as_str(), why));
                }
                (true, true) => errors.push(FieldError::required(&path, "claim or expression is required")),
                (false, true) => {
                    if !rule.message.is_empty() {
                        let why = "may not be specified when claim is set";
                        errors.push(FieldError::invalid(&path.child("message"), rule.message.as_str(), why));
                    }
                    if !claims.insert(&rule.claim) {
                        errors.push(FieldError::duplicate(&path.child("claim"), rule.claim.as_str()));
                    }
                    mapper.required.push((rule.claim.clone(), rule.required_value.clone()));
                }
                (true, false) => {
                    let expression = path.child("expression");
                    if !rule.required_value.is_empty() {
                        let why = "may not be specified when expression is set";
                        let path = path.child("requiredValue");
                        errors.push(FieldError::invalid(&path, rule.required_value.as_str(), why));
                    }
                    if !expressions.insert(&rule.expression) {
                        errors.push(FieldError::duplicate(&expression, rule.expression.as_str()));
                        continue;
                    }
                    match self.claim(&rule.expression, true, &expression) {
                        Err(error) => errors.push(error),
                        Ok(program) => {
                            self.reads_email_verified |=
                                selects(&self.claims, &rule.expression, "email_verified");
                            mapper.claim_rules.push(Rule::new(program, &rule.expression, &rule.message));
                        }
                    }
                }
            }
        }
    }

    fn mapping(
        &mut self,
        given: &Mapping,
        path: &Path,
        needed: bool,
        errors: &mut Vec<FieldError>,
    ) -> Source {
        match (given.claim.is_empty(), given.expression.is_empty()) {
            (false, false) => {
                errors.push(FieldError::invalid(path, "", "claim and expression can't both be set"));
                Source::None
            }
            (true, true) => {
                if needed {
                    errors.push(FieldError::required(path, "claim or expression is required"));
                }
                Source::None
            }
            (true, false) => {
                if let Some(prefix) = &given.prefix {
                    let why = "may not be specified when expression is set";
                    errors.push(FieldError::invalid(&path.child("prefix"), prefix.as_str(), why));
                }
                match self.claim(&given.expression, false, &path.child("expression")) {
                    Ok(program) => Source::Expression(Box::new(program)),
                    Err(error) => {
                        errors.push(error);
                        Source::None
                    }
                }
            }
            (false, true) => {
                if given.prefix.is_none() {
                    let why = "prefix is required when claim is set. It can be set to an empty string to disable prefixing";
                    errors.push(FieldError::required(&path.child("prefix"), why));
                }
                Source::Claim { name: given.claim.clone(), prefix: given.prefix.clone().unwrap_or_default() }
            }
        }
    }

    pub fn mappings(
        &mut self,
        given: &Mappings,
        path: &Path,
        mapper: &mut Mapper,
        errors: &mut Vec<FieldError>,
    ) {
        let before = errors.len();
        mapper.username = self.mapping(&given.username, &path.child("username"), true, errors);
        if errors.len() == before && !given.username.expression.is_empty() {
            self.reads_email |= selects(&self.claims, &given.username.expression, "email");
            self.reads_email_verified |= selects(&self.claims, &given.username.expression, "email_verified");
        }
        mapper.groups = self.mapping(&given.groups, &path.child("groups"), false, errors);
        // The UID has no prefix.
        let uid = Mapping { prefix: (!given.uid.claim.is_empty()).then(String::new), ..given.uid.clone() };
        mapper.uid = self.mapping(&uid, &path.child("uid"), false, errors);
        let mut seen = BTreeSet::new();
        for (index, extra) in given.extra.iter().enumerate() {
            let path = path.child("extra").index(index);
            let key = path.child("key");
            errors.extend(check_extra_key(&extra.key, &key));
            if !seen.insert(&extra.key) {
                errors.push(FieldError::duplicate(&key, extra.key.as_str()));
                continue;
            }
            let value = path.child("valueExpression");
            if extra.value_expression.is_empty() {
                errors.push(FieldError::required(&value, ""));
                continue;
            }
            match self.claim(&extra.value_expression, false, &value) {
                Err(error) => errors.push(error),
                Ok(program) => {
                    self.reads_email_verified |=
                        selects(&self.claims, &extra.value_expression, "email_verified");
                    mapper.extra.push((extra.key.clone(), extra.value_expression.clone(), program));
                }
            }
        }
        if self.reads_email && !self.reads_email_verified {
            let why = "claims.email_verified must be used in claimMappings.username.expression or claimMappings.extra[*].valueExpression or claimValidationRules[*].expression when claims.email is used in claimMappings.username.expression";
            let path = path.child("username").child("expression");
            errors.push(FieldError::invalid(&path, given.username.expression.as_str(), why));
        }
    }

    pub fn user_rules(
        &mut self,
        given: &GivenJwt,
        path: &Path,
        mapper: &mut Mapper,
        errors: &mut Vec<FieldError>,
    ) {
        let mut seen = BTreeSet::new();
        for (index, rule) in given.user_validation_rules.iter().enumerate() {
            let path = path.index(index).child("expression");
            if rule.expression.is_empty() {
                errors.push(FieldError::required(&path, ""));
            } else if !seen.insert(&rule.expression) {
                errors.push(FieldError::duplicate(&path, rule.expression.as_str()));
            } else {
                match Self::compile(&self.user, &rule.expression, true, &path) {
                    Err(error) => errors.push(error),
                    Ok(program) => {
                        mapper.user_rules.push(Rule::new(program, &rule.expression, &rule.message))
                    }
                }
            }
        }
    }
}

/// A key of extra information is a path below a domain that is not Kubernetes' own.
fn check_extra_key(key: &str, path: &Path) -> Vec<FieldError> {
    let invalid = |why: &str| FieldError::invalid(path, key, why);
    let mut errors = Vec::new();
    if key.is_empty() {
        errors.push(FieldError::required(path, ""));
        return errors;
    }
    let (domain, rest) = key.split_once('/').unwrap_or(("", ""));
    if domain.is_empty() || rest.is_empty() {
        errors.push(invalid("must be a domain-prefixed path (such as \"acme.io/foo\")"));
    } else {
        errors.extend(dns1123_subdomain(domain).iter().map(|why| invalid(why)));
    }
    if key.to_lowercase() != key {
        errors.push(invalid("must be lowercase"));
    }
    let own = |suffix: &str| domain == suffix || domain.ends_with(&format!(".{suffix}"));
    if own("kubernetes.io") || own("k8s.io") {
        errors.push(invalid("k8s.io, kubernetes.io and their subdomains are reserved for Kubernetes use"));
    }
    errors
}
