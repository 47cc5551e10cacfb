//! From the claims of a token to a user. Pure.

use crate::auth::User;
use ferrite_cel::{Activation, Limits, Program, Value as Cel};
use ferrite_json::{Value, json};

/// One evaluation may cost this much. Upstream has no limit here.
const COST: u64 = 10_000_000;

/// Where a piece of the user comes from.
#[derive(Debug, Default)]
pub(super) enum Source {
    #[default]
    None,
    Claim {
        name: String,
        prefix: String,
    },
    Expression(Box<Program>),
}

/// A condition with its own message.
#[derive(Debug)]
pub(super) struct Rule {
    program: Program,
    expression: String,
    message: String,
}

impl Rule {
    pub fn new(program: Program, expression: &str, message: &str) -> Self {
        Self { program, expression: expression.to_owned(), message: message.to_owned() }
    }

    fn check(&self, activation: &Activation<'_>) -> Result<(), String> {
        let evaluated = self.program.evaluate(activation, Limits::cost(COST)).result;
        let value =
            evaluated.map_err(|e| format!("expression '{}' resulted in error: {e}", self.expression))?;
        match (value.as_bool(), self.message.is_empty()) {
            (Some(true), _) => Ok(()),
            (_, true) => Err(format!("validation expression '{}' failed", self.expression)),
            (_, false) => {
                Err(format!("validation expression '{}' failed: {}", self.expression, self.message))
            }
        }
    }
}

/// The rules of one issuer.
#[derive(Debug, Default)]
pub(super) struct Mapper {
    pub username: Source,
    pub groups: Source,
    pub uid: Source,
    /// Key, expression as written, and compiled.
    pub extra: Vec<(String, String, Program)>,
    /// Claims that must have a value.
    pub required: Vec<(String, String)>,
    pub claim_rules: Vec<Rule>,
    pub user_rules: Vec<Rule>,
}

fn evaluated<'a>(program: &Program, activation: &Activation<'a>) -> Result<Cel<'a>, String> {
    program.evaluate(activation, Limits::cost(COST)).result.map_err(|error| error.to_string())
}

/// A text or a list of texts; empty ones are left out.
fn strings(value: &Cel<'_>) -> Result<Vec<String>, String> {
    let wrong = || "expression must return a string or a list of strings".to_owned();
    let all = match value.to_json().map_err(|error| error.to_string())? {
        Value::Null => Vec::new(),
        Value::String(text) => vec![text.to_string()],
        Value::Array(list) => list
            .iter()
            .map(|item| item.as_str().map(str::to_owned).ok_or_else(wrong))
            .collect::<Result<_, _>>()?,
        _ => return Err(wrong()),
    };
    Ok(all.into_iter().filter(|text| !text.is_empty()).collect())
}

fn text_claim<'a>(claims: &'a Value, name: &str) -> Result<&'a str, String> {
    match claims.get(name) {
        None => Err("claim not present".to_owned()),
        Some(value) => value.as_str().ok_or_else(|| "the claim is not a string".to_owned()),
    }
}

impl Mapper {
    /// The user of a token whose signature, issuer, audience and time are right. Errors are upstream's.
    pub fn user(&self, claims: &Value) -> Result<User, String> {
        let mut activation = Activation::new();
        activation.set("claims", Cel::from_json(claims, None));
        let name = self.name(claims, &activation)?;
        let groups = self.groups(claims, &activation)?;
        let uid = self.uid(claims, &activation)?;
        let mut user = User { uid, ..User::new(name, groups) };
        if let Some(id) = claims.get("jti").and_then(Value::as_str).filter(|id| !id.is_empty()) {
            user = user.with_credential(format!("JTI={id}"));
        }
        for (key, expression, program) in &self.extra {
            let failed =
                |why: String| format!("oidc: error evaluating extra claim expression: {expression}: {why}");
            let values = strings(&evaluated(program, &activation).map_err(failed)?).map_err(failed)?;
            if !values.is_empty() {
                user.extra.insert(key.clone(), values);
            }
        }
        self.check_claims(claims, &activation)?;
        self.check_user(&user)?;
        Ok(user)
    }

    fn name(&self, claims: &Value, activation: &Activation<'_>) -> Result<String, String> {
        let (name, prefix) = match &self.username {
            Source::Expression(program) => {
                let failed = |why: String| format!("oidc: error evaluating username claim expression: {why}");
                let value = evaluated(program, activation).map_err(failed)?;
                let name = value
                    .as_str()
                    .ok_or_else(|| failed("username claim expression must return a string".to_owned()))?;
                return match name {
                    "" => Err("oidc: empty username via CEL expression is not allowed".to_owned()),
                    name => Ok(name.to_owned()),
                };
            }
            Source::Claim { name, prefix } => (name, prefix),
            Source::None => return Err("oidc: no claim has the username".to_owned()),
        };
        let value =
            text_claim(claims, name).map_err(|why| format!("oidc: parse username claims {name:?}: {why}"))?;
        if name == "email" {
            // As upstream: an address that the issuer has not verified is nobody's.
            match claims.get("email_verified") {
                None => {}
                Some(verified) => match verified.as_bool() {
                    Some(true) => {}
                    Some(false) => return Err("oidc: email not verified".to_owned()),
                    None => return Err("oidc: parse 'email_verified' claim: it is no bool".to_owned()),
                },
            }
        }
        Ok(format!("{prefix}{value}"))
    }

    fn groups(&self, claims: &Value, activation: &Activation<'_>) -> Result<Vec<String>, String> {
        match &self.groups {
            Source::None => Ok(Vec::new()),
            Source::Claim { name, prefix } => {
                let wrong = || {
                    format!("oidc: parse groups claim {name:?}: it is neither a string nor a list of strings")
                };
                let given = match claims.get(name) {
                    None | Some(Value::Null) => return Ok(Vec::new()),
                    Some(Value::String(one)) => vec![one.to_string()],
                    Some(Value::Array(list)) => list
                        .iter()
                        .map(|item| item.as_str().map(str::to_owned).ok_or_else(wrong))
                        .collect::<Result<_, _>>()?,
                    Some(_) => return Err(wrong()),
                };
                Ok(given.into_iter().map(|group| format!("{prefix}{group}")).collect())
            }
            Source::Expression(program) => {
                let failed = |why: String| format!("oidc: error evaluating group claim expression: {why}");
                strings(&evaluated(program, activation).map_err(failed)?).map_err(failed)
            }
        }
    }

    fn uid(&self, claims: &Value, activation: &Activation<'_>) -> Result<String, String> {
        match &self.uid {
            Source::None => Ok(String::new()),
            Source::Claim { name, .. } => {
                let value = text_claim(claims, name);
                value.map(str::to_owned).map_err(|why| format!("oidc: parse uid claim {name:?}: {why}"))
            }
            Source::Expression(program) => {
                let failed = |why: String| format!("oidc: error evaluating uid claim expression: {why}");
                let value = evaluated(program, activation).map_err(failed)?;
                let text = value.as_str().map(str::to_owned);
                text.ok_or_else(|| failed("uid claim expression must return a string".to_owned()))
            }
        }
    }

    fn check_claims(&self, claims: &Value, activation: &Activation<'_>) -> Result<(), String> {
        for (claim, wanted) in &self.required {
            let Some(value) = claims.get(claim) else {
                return Err(format!("oidc: required claim {claim} not present in ID token"));
            };
            let Some(value) = value.as_str() else {
                return Err(format!("oidc: parse claim {claim}: it is no string"));
            };
            if value != wanted {
                return Err(format!(
                    "oidc: required claim {claim} value does not match. Got = {value}, want = {wanted}"
                ));
            }
        }
        let failed = |why| format!("oidc: error evaluating claim validation expression: {why}");
        self.claim_rules.iter().try_for_each(|rule| rule.check(activation)).map_err(failed)
    }

    fn check_user(&self, user: &User) -> Result<(), String> {
        if self.user_rules.is_empty() {
            return Ok(());
        }
        // As the issuer has it: without the group that everybody is in.
        let groups: Vec<&str> =
            user.groups.iter().map(String::as_str).filter(|group| *group != "system:authenticated").collect();
        let info = json!({"username": user.name, "uid": user.uid, "groups": groups, "extra": user.extra});
        let mut activation = Activation::new();
        activation.set("user", Cel::from_json(&info, None));
        let failed = |why| format!("oidc: error evaluating user info validation rule: {why}");
        self.user_rules.iter().try_for_each(|rule| rule.check(&activation)).map_err(failed)
    }
}
