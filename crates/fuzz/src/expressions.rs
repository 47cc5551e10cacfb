//! Expressions: any text is compiled, evaluated within a limit, and printed.

use std::sync::OnceLock;

use crate::Target;
use ferrite_cel::{Activation, Environment, Limits, Type, Value};
use ferrite_json::{Value as Json, json};

/// The most that an evaluation may cost here: enough to reach every function, too little to take long.
const COST: u64 = 20_000;

fn environment() -> &'static Environment {
    static ENVIRONMENT: OnceLock<Environment> = OnceLock::new();
    ENVIRONMENT.get_or_init(|| {
        Environment::kubernetes(36)
            .with_variable("self", Type::Dyn)
            .with_admission_variables(true, false)
            .with_mutations()
            .with_device()
    })
}

fn object() -> &'static Json {
    static OBJECT: OnceLock<Json> = OnceLock::new();
    OBJECT.get_or_init(|| {
        json!({
            "metadata": {"name": "a", "labels": {"b": "c"}},
            "spec": {"replicas": 3, "max": 5, "name": "xyz", "containers": [{"image": "abc12"}], "none": null},
        })
    })
}

pub const CEL: Target = Target {
    name: "cel",
    run: |bytes| {
        let Ok(text) = std::str::from_utf8(bytes) else { return };
        let mut activation = Activation::new();
        for name in ["self", "object", "oldObject", "params"] {
            activation.set(name, Value::from_json(object(), None));
        }
        for program in
            [environment().compile(text), environment().compile_unchecked(text)].into_iter().flatten()
        {
            let evaluation = program.evaluate(&activation, Limits::cost(COST));
            if let Ok(value) = &evaluation.result {
                let _ = value.to_json();
            }
        }
        let plain = environment().clone().without_macros();
        if let Ok(printed) = plain.reprint(text) {
            let again = plain.reprint(&printed).expect("what is printed is an expression");
            assert_eq!(printed, again, "an expression reads differently the second time");
        }
    },
};
