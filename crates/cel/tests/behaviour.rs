//! The behaviour of the engine where no recorded case shows it: bounds, uses, values.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};

use ferrite_cel::{
    Activation, AuthorizationDecision, Authorizer, AuthorizerValue, Check, CompileError, Environment,
    EvalError, LazyObject, Library, Limits, Range, Type, Value,
};
use ferrite_json::{Value as Json, json};

fn kubernetes() -> Environment {
    Environment::kubernetes(36)
}

fn evaluate_in(environment: &Environment, expression: &str) -> Result<Value<'static>, EvalError> {
    let program = environment.compile(expression).unwrap_or_else(|error| panic!("{expression}: {error}"));
    program.evaluate(&Activation::new(), Limits::cost(1_000_000)).result.map(Value::into_owned)
}

fn shown(expression: &str) -> String {
    match evaluate_in(&kubernetes(), expression) {
        Ok(value) => format!("{value:?}"),
        Err(error) => format!("error: {error}"),
    }
}

#[test]
fn operators_and_functions() {
    let table = [
        ("1 + 2 * 3 - 4 / 2 % 3", "5"),
        ("-(-3)", "3"),
        ("--3", "3"),
        ("9223372036854775807 + 1", "error: integer overflow"),
        ("-9223372036854775808 / -1", "error: integer overflow"),
        ("18446744073709551615u + 1u", "error: unsigned integer overflow"),
        ("string(1e6) + ' ' + string(123456.0) + ' ' + string(0.00001)", "\"1e+06 123456 1e-05\""),
        ("1 < 2.5 && 2u > 1 && 3.0 == 3.0", "true"),
        ("[1, 2, 3].map(x, x * x).filter(x, x > 1)", "[4, 9]"),
        ("[[1, 2], [3]].map(l, l.map(x, x + 1))", "[[2, 3], [4]]"),
        ("{'a': 1, 'b': 2}.all(k, k < 'c')", "true"),
        ("[1, 2].exists(x, x / 0 == 1 || x == 2)", "true"),
        ("'\u{e9}\u{20ac}\u{1F600}'.size()", "3"),
        ("'a,b,,c'.split(',')", "[\"a\", \"b\", \"\", \"c\"]"),
        ("'banana'.replace('a', 'o', 2)", "\"bonona\""),
        ("'banana'.lastIndexOf('an')", "3"),
        ("duration('1h30m').getMinutes()", "90"),
        ("timestamp('2024-02-29T12:00:00Z').getDayOfYear()", "59"),
        ("timestamp('2024-07-01T12:00:00Z').getHours('Europe/Berlin')", "14"),
        ("timestamp('2024-07-01T12:00:00Z').getHours('-02:30')", "9"),
        ("timestamp('2024-01-01T00:00:00Z') - timestamp('2023-12-31T00:00:00Z')", "duration(86400s)"),
        ("optional.of(1).optMap(x, x + 1).orValue(0)", "2"),
        ("{?'a': optional.none(), 'b': 1}", "{\"b\": 1}"),
        ("[3, 1, 2].sort()", "[1, 2, 3]"),
        ("['b', 'a'].sortBy(x, x)", "[\"a\", \"b\"]"),
        ("lists.range(3).transformMap(i, v, v * 2)", "{0: 0, 1: 2, 2: 4}"),
        ("sets.contains([1, 2, 3], [2])", "true"),
        ("quantity('1.5Gi').compareTo(quantity('1536Mi'))", "0"),
        ("url('https://a.b:80/c%20d?x=1&x=2#f').getQuery()", "{\"x\": [\"1\", \"2\"]}"),
        ("cidr('10.0.0.0/8').containsIP('10.1.2.3')", "true"),
        ("semver('v1.2', true).compareTo(semver('1.2.0-rc.1'))", "1"),
        ("format.dns1123Label().validate('a.b').value()", "[\"must not contain dots\"]"),
        ("'%s is %d%% of %.1f'.format(['x', 50, 2.0])", "\"x is 50% of 2.0\""),
        ("'x'.find('[a-z]+') + 'aXbX'.findAll('[A-Z]').join('-')", "\"xX-X\""),
    ];
    for (expression, expected) in table {
        assert_eq!(shown(expression), expected, "{expression}");
    }
}

/// Patterns have Go's meaning.
#[test]
fn patterns_are_go_s() {
    let table = [
        (r"'\u0663'.matches(r'^\d$')", "false"),
        (r"'3'.matches(r'^\d$')", "true"),
        (r"'\u00e9'.matches(r'^\w$')", "false"),
        (r"'a-b'.matches(r'^[\w-]+$')", "true"),
        (r"'[x'.matches(r'^[[x]+$')", "true"),
        (r"'a&&b'.matches(r'^[a-z&&b]+$')", "true"),
        (r"'{x}'.matches(r'^{x}$')", "true"),
        (r"'<'.matches(r'^\<$')", "true"),
        (r"'a.b'.matches(r'^\Qa.b\E$')", "true"),
        (r"'axb'.matches(r'^\Qa.b\E$')", "false"),
        (r"'foo bar'.find(r'\bbar\b')", "\"bar\""),
        (r"'A'.matches(r'(?i)^a$')", "true"),
    ];
    for (expression, expected) in table {
        assert_eq!(shown(expression), expected, "{expression}");
    }
    for pattern in ["(?=a)", "a**", "(?x)a", "[z", "(a", "a)", "*a", r"\1", "a{1001}"] {
        let expression = format!("'a'.matches(r'{pattern}')");
        assert!(matches!(kubernetes().compile(&expression), Err(CompileError::Check(_))), "{pattern}");
    }
}

#[test]
fn limits_end_an_evaluation() {
    let program =
        kubernetes().compile("lists.range(1000).all(x, lists.range(1000).all(y, x + y >= 0))").unwrap();
    let evaluation = program.evaluate(&Activation::new(), Limits::cost(10_000));
    assert_eq!(evaluation.result.unwrap_err(), EvalError::CostLimitExceeded);
    assert!(evaluation.cost > 10_000 && evaluation.cost < 12_000);
    // A limit is no error that an expression can absorb.
    let absorbing = kubernetes().compile("lists.range(1000).all(x, x >= 0) || true").unwrap();
    let evaluation = absorbing.evaluate(&Activation::new(), Limits::cost(100));
    assert_eq!(evaluation.result.unwrap_err(), EvalError::CostLimitExceeded);

    let interrupt = AtomicBool::new(false);
    interrupt.store(true, Ordering::Relaxed);
    let limits = Limits { cost: None, interrupt: Some(&interrupt) };
    assert_eq!(program.evaluate(&Activation::new(), limits).result.unwrap_err(), EvalError::Interrupted);
}

#[test]
fn memory_is_bounded() {
    let table = [
        // Each replacement of an empty string puts the text between all letters: its size is squared.
        "s.replace('', s).replace('', s).replace('', s).size() > 0",
        "lists.range(1000000000).size() > 0",
        // One long string many times, which takes memory only when it is written out.
        "'%s'.format([lists.range(100000).map(x, s)]).size() > 0",
        "s.split('').map(x, s).map(x, s.split('')).map(x, s.split('')).size() > 0",
    ];
    let environment = kubernetes().with_variable("s", Type::String);
    for expression in table {
        let program = environment.compile(expression).unwrap();
        let activation = Activation::new().with("s", "x".repeat(4000));
        let error = program.evaluate(&activation, Limits::default()).result.unwrap_err();
        assert_eq!(error, EvalError::MemoryLimitExceeded, "{expression}");
    }
}

#[test]
fn a_value_that_is_too_large_does_not_become_json() {
    let environment = kubernetes().with_variable("s", Type::String);
    let program = environment.compile("lists.range(100000).map(x, s)").unwrap();
    let activation = Activation::new().with("s", "x".repeat(4000));
    let value = program.evaluate(&activation, Limits::default()).result.unwrap();
    assert_eq!(value.to_json().unwrap_err().to_string(), "value is too large");
}

/// No expression overflows the stack: of a test, where it is small, of a debug build, where frames are large.
#[test]
fn depth_is_bounded() {
    let nested = |open: &str, inner: &str, close: &str, count: usize| {
        format!("{}{inner}{}", open.repeat(count), close.repeat(count))
    };
    let environment = kubernetes();
    for count in [100, 240] {
        assert_eq!(shown(&nested("(", "1", ")", count)), "1");
        assert!(evaluate_in(&environment, &nested("[", "1", "]", count)).is_ok());
        assert!(evaluate_in(&environment, &nested("!(", "true", ")", count)).is_ok());
        assert!(evaluate_in(&environment, &nested("int(", "1", ")", count)).is_ok());
        assert!(evaluate_in(&environment, &nested("false ? 0 : ", "1", "", count)).is_ok());
        assert!(evaluate_in(&environment, &format!("1{}", " + 1".repeat(count))).is_ok());
    }
    assert!(evaluate_in(&environment, &nested("[1].map(x, ", "1", ")", 200)).is_ok());
    assert!(evaluate_in(&environment, &format!("{}true", "true && ".repeat(5000))).is_ok());
    for text in [nested("(", "1", ")", 300), nested("[", "1", "]", 5000), format!("1{}", " + 1".repeat(400))]
    {
        assert!(matches!(environment.compile(&text), Err(CompileError::Parse(_))));
    }
    let long = "a".repeat(100_001);
    assert!(matches!(environment.compile(&long), Err(CompileError::Parse(_))));
    // Each level doubles the tree: the macro copies its receiver.
    let doubling = nested("", "optional.of(1)", ".optMap(x, x)", 40);
    assert!(environment.compile(&doubling).is_err());
    // Each level doubles the type.
    let doubling = (0..60).fold("1".to_owned(), |inner, _| format!("cel.bind(v, {inner}, {{v: v}})"));
    assert!(environment.clone().with_library(Library::Bindings).compile(&doubling).is_err());
}

#[test]
fn values_come_from_json_without_a_copy() {
    let object = json!({
        "metadata": {"name": "a", "labels": {"x": "1"}},
        "spec": {"replicas": 3, "ratio": 0.5, "none": null, "list": [1, 2, 3]},
    });
    let environment = kubernetes().with_variable("object", Type::Dyn);
    let table = [
        ("object.spec.replicas + 1", "4"),
        ("object.spec.ratio", "0.5"),
        ("has(object.spec.none)", "true"),
        ("object.spec.none == null", "true"),
        ("has(object.spec.missing)", "false"),
        ("object.metadata.labels.exists(k, k == 'x')", "true"),
        ("object.spec.list.sum() == 6", "true"),
        ("object.?spec.missing.orValue('d')", "\"d\""),
        ("object.metadata.name", "\"a\""),
        ("object == object", "true"),
        ("object.spec.missing", "error: no such key: missing"),
    ];
    for (expression, expected) in table {
        let program = environment.compile(expression).unwrap_or_else(|error| panic!("{expression}: {error}"));
        let activation = Activation::new().with("object", Value::from_json(&object, None).unwrap());
        let found = match program.evaluate(&activation, Limits::default()).result {
            Ok(value) => format!("{value:?}"),
            Err(error) => format!("error: {error}"),
        };
        assert_eq!(found, expected, "{expression}");
    }
}

struct Variables<'a> {
    object: &'a Json,
    made: OnceLock<Result<Value<'a>, EvalError>>,
    count: Mutex<usize>,
}

impl LazyObject for Variables<'_> {
    fn get(&self, field: &str) -> Option<Result<Value<'_>, EvalError>> {
        if field != "spec" {
            return None;
        }
        let made = self.made.get_or_init(|| {
            *self.count.lock().expect("not poisoned") += 1;
            Value::from_json(&self.object["spec"], None)
        });
        Some(made.clone())
    }
}

#[test]
fn variables_of_a_policy_are_computed_once_and_only_if_read() {
    let object = json!({"spec": {"replicas": 3}});
    let environment =
        kubernetes().with_admission_variables(false, false).with_policy_variables([("spec", Type::Dyn)]);
    let lazy = Variables { object: &object, made: OnceLock::new(), count: Mutex::new(0) };
    let mut activation = Activation::new();
    activation.set("variables", Ok(Value::Lazy(&lazy)));
    let unread = environment.compile("true").unwrap();
    assert!(unread.evaluate(&activation, Limits::default()).result.is_ok());
    assert_eq!(*lazy.count.lock().unwrap(), 0);
    let read = environment.compile("variables.spec.replicas == 3 && variables.spec.replicas < 4").unwrap();
    assert_eq!(read.evaluate(&activation, Limits::default()).result.unwrap().as_bool(), Some(true));
    assert_eq!(*lazy.count.lock().unwrap(), 1);
    let error = environment.compile("variables.other").unwrap_err();
    assert_eq!(error.issues()[0].message, "undefined field 'other'");
}

#[test]
fn admission_variables_have_types() {
    let environment = kubernetes().with_admission_variables(true, true);
    let table = [
        ("request.userInfo.username", Type::String),
        ("request.kind.group", Type::String),
        ("request.namespace", Type::String),
        ("namespaceObject.metadata.creationTimestamp", Type::Timestamp),
        ("namespaceObject.status.conditions[0].status", Type::String),
        ("params.x", Type::Dyn),
        ("authorizer.requestResource.check('get').allowed()", Type::Bool),
        ("authorizer.group('apps').resource('deployments').check('get').reason()", Type::String),
    ];
    for (expression, of) in table {
        assert_eq!(environment.check(expression), Ok(of), "{expression}");
    }
    let unknown = environment.check("request.nothing").unwrap_err();
    assert_eq!(unknown.issues()[0].message, "undefined field 'nothing'");
}

struct OnlyGet(Mutex<Vec<Check>>);

impl Authorizer for OnlyGet {
    fn authorize(&self, check: &Check) -> AuthorizationDecision {
        self.0.lock().expect("not poisoned").push(check.clone());
        AuthorizationDecision { allowed: check.verb == "get", reason: "because".into(), error: None }
    }
}

#[test]
fn an_authorizer_is_asked() {
    let asked = std::sync::Arc::new(OnlyGet(Mutex::new(Vec::new())));
    let environment = kubernetes().with_admission_variables(false, true);
    let expression = "authorizer.serviceAccount('ns', 'sa').group('apps').resource('deployments').namespace('ns')\
                      .name('n').check('get').allowed() && !authorizer.path('/healthz').check('post').allowed()";
    let program = environment.compile(expression).unwrap();
    let mut activation = Activation::new();
    activation.set("authorizer", Ok(AuthorizerValue::authorizer(asked.clone())));
    let evaluation = program.evaluate(&activation, Limits::cost(1_000_000));
    assert_eq!(evaluation.result.unwrap().as_bool(), Some(true));
    assert!(evaluation.cost >= 700_000, "each check is dear");
    let asked = asked.0.lock().unwrap();
    assert_eq!(asked[0].service_account, Some(("ns".into(), "sa".into())));
    assert_eq!((asked[0].group.as_str(), asked[0].resource.as_str()), ("apps", "deployments"));
    assert_eq!(asked[1].path.as_deref(), Some("/healthz"));
}

#[test]
fn mutations_make_objects_and_patches() {
    let environment = kubernetes().with_admission_variables(false, false).with_mutations();
    let program = environment
        .compile("Object{metadata: Object.metadata{labels: {'a': 'b'}}, spec: Object.spec{?replicas: optional.of(3)}}")
        .unwrap();
    assert_eq!(program.result_type(), &Type::object("Object"));
    let made = program.evaluate(&Activation::new(), Limits::default()).result.unwrap();
    assert_eq!(made.to_json().unwrap(), json!({"metadata": {"labels": {"a": "b"}}, "spec": {"replicas": 3}}));
    let expression =
        "[JSONPatch{op: 'add', path: '/metadata/labels/' + jsonpatch.escapeKey('a/b'), value: 'c'}]";
    let program = environment.compile(expression).unwrap();
    assert_eq!(program.result_type(), &Type::list(Type::object("JSONPatch")));
    let made = program.evaluate(&Activation::new(), Limits::default()).result.unwrap();
    assert_eq!(
        made.to_json().unwrap(),
        json!([{"op": "add", "path": "/metadata/labels/a~1b", "value": "c"}])
    );
    let error = environment.compile("JSONPatch{op: 1, nothing: 2}").unwrap_err();
    let messages: Vec<&str> = error.issues().iter().map(|issue| issue.message.as_str()).collect();
    assert_eq!(
        messages,
        ["expected type of field 'op' is 'string' but provided type is 'int'", "undefined field 'nothing'"]
    );
}

#[test]
fn devices_and_configurations_have_their_variables() {
    let device = kubernetes().with_device();
    let expression = "cel.bind(a, device.attributes['dra.example.com'], a.model == 'x') && \
                      device.capacity['dra.example.com'].memory.isGreaterThan(quantity('1Gi'))";
    assert_eq!(device.check(expression), Ok(Type::Bool));
    assert_eq!(kubernetes().with_claims().check("claims.sub == 'x'"), Ok(Type::Bool));
    assert_eq!(kubernetes().with_user().check("user.groups.all(g, g != 'x')"), Ok(Type::Bool));
    let review = kubernetes().with_subject_access_review();
    assert_eq!(
        review.check("has(request.resourceAttributes) && request.resourceAttributes.verb == 'get'"),
        Ok(Type::Bool)
    );
}

/// An older compatibility version does not know later functions.
#[test]
fn versions_have_their_libraries() {
    let table = [("quantity('1')", 28), ("ip('1.1.1.1')", 30), ("semver('1.0.0')", 33), ("[1].sort()", 34)];
    for (expression, since) in table {
        assert!(Environment::kubernetes(since).compile(expression).is_ok(), "{expression}");
        assert!(Environment::kubernetes(since - 1).compile(expression).is_err(), "{expression}");
    }
}

#[test]
fn a_program_is_shared_by_threads() {
    fn shared<T: Send + Sync>(_: &T) {}
    let program = kubernetes().with_variable("x", Type::Int).compile("x > 1").unwrap();
    shared(&program);
    assert_eq!(program.estimated_cost(), Some(Range { min: 2, max: 2 }));
    assert!(program.uses_variable("x") && !program.uses_variable("y"));
}

#[test]
fn syntax_errors_are_in_upstreams_words() {
    const EXPRESSION: &str =
        "'true', 'false', 'null', NUM_FLOAT, NUM_INT, NUM_UINT, STRING, BYTES, IDENTIFIER}";
    let table = [
        ("has(a.b", "1:8: Syntax error: missing ')' at '<EOF>'"),
        ("size(has(a.b", "1:13: Syntax error: mismatched input '<EOF>' expecting ')'"),
        ("[size(1]", "1:8: Syntax error: missing ')' at ']'"),
        ("a[0", "1:4: Syntax error: missing ']' at '<EOF>'"),
        ("[1, 2", "1:6: Syntax error: mismatched input '<EOF>' expecting {']', ','}"),
        ("[1 2]", "1:4: Syntax error: extraneous input '2' expecting {']', ','}"),
        ("[1,,2]", "1:4: Syntax error: mismatched input ',' expecting ']'"),
        ("{1: 2", "1:6: Syntax error: mismatched input '<EOF>' expecting {'}', ','}"),
        ("{1: 2,", "1:7: Syntax error: missing '}' at '<EOF>'"),
        ("{1 2}", "1:4: Syntax error: missing ':' at '2'"),
        ("a.", "1:3: Syntax error: no viable alternative at input '.'"),
        ("a..b", "1:3: Syntax error: no viable alternative at input '..'"),
        ("a. + b", "1:4: Syntax error: no viable alternative at input '. +'"),
        ("a.true", "1:3: Syntax error: mismatched input 'true' expecting IDENTIFIER"),
        ("..a", "1:2: Syntax error: no viable alternative at input '..'"),
        ("a = b", "1:3: Syntax error: token recognition error at: '= '"),
        ("a & b", "1:3: Syntax error: token recognition error at: '& '"),
        ("r'a", "1:2: Syntax error: token recognition error at: ''a'"),
    ];
    for (expression, expected) in table {
        let error = kubernetes().compile(expression).expect_err(expression).to_string();
        assert!(error.starts_with(&format!("ERROR: <input>:{expected}")), "{expression}: {error}");
    }
    for (expression, start) in [
        ("+1", "1:1: Syntax error: extraneous input '+' expecting {'[', '{', '(', '.', '-', '!', "),
        ("!", "1:2: Syntax error: extraneous input '<EOF>' expecting {'[', '{', '(', '.', '-', '!', "),
        ("a[", "1:3: Syntax error: mismatched input '<EOF>' expecting {'[', '{', '(', '.', '-', '!', '?', "),
        (
            "[",
            "1:2: Syntax error: mismatched input '<EOF>' expecting {'[', ']', '{', '(', '.', ',', '-', '!', '?', ",
        ),
        ("size(,)", "1:6: Syntax error: extraneous input ',' expecting {'[', '{', '(', ')', '.', '-', '!', "),
    ] {
        let error = kubernetes().compile(expression).expect_err(expression).to_string();
        let expected = format!("ERROR: <input>:{start}{EXPRESSION}");
        assert!(error.starts_with(&expected), "{expression}: {error}");
    }
    let empty = kubernetes().compile("").expect_err("empty").to_string();
    assert!(empty.starts_with("ERROR: <input>:1:0: Syntax error: ") && !empty.contains('\n'), "{empty}");
}
