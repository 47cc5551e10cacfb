//! The part of Go's templates that `--format` is used with.
//!
//! Fields and chains of them, `json`, `join`, `index`, `len`, `upper`, `lower`, `title`, `split`, `println`,
//! `printf` (`%s %d %v %q`), comparisons, `and`/`or`/`not`, pipes, `if`/`else`, `range` (with variables),
//! `with`, and the trimming dashes. Values are JSON.

mod functions;

use std::collections::BTreeMap;

use serde_json::Value;

use functions::{FUNCTIONS, fail, function, print, printed, truth};

/// Longest template and most output: a loop over a loop must not fill memory.
const MAX_TEMPLATE: usize = 64 << 10;
const MAX_OUTPUT: usize = 64 << 20;
const MAX_DEPTH: usize = 64;

/// An error in a template, or in the value that it was applied to.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum TemplateError {
    #[error("Template parsing error: template: :1: {0}")]
    Parse(String),
    #[error("Template parsing error: template: :1: executing \"\" at <{at}>: {what}")]
    Execute { at: String, what: String },
}

#[derive(Debug)]
enum Node {
    Text(String),
    Print(Pipeline),
    If(Pipeline, Vec<Node>, Vec<Node>),
    Range {
        key: Option<String>,
        value: Option<String>,
        over: Pipeline,
        body: Vec<Node>,
        otherwise: Vec<Node>,
    },
    With(Pipeline, Vec<Node>, Vec<Node>),
    Set(String, Pipeline),
}

/// Commands; each one's result is the last argument of the next.
type Pipeline = Vec<Vec<Term>>;

#[derive(Debug, Clone)]
enum Term {
    Field(Vec<String>),
    /// `$` or `$x`, with fields.
    Variable(String, Vec<String>),
    Word(String),
    Literal(Value),
    Group(Vec<Vec<Term>>, Vec<String>),
}

/// A parsed template.
#[derive(Debug)]
pub struct Template(Vec<Node>);

impl Template {
    pub fn parse(text: &str) -> Result<Self, TemplateError> {
        if text.len() > MAX_TEMPLATE {
            return Err(TemplateError::Parse("the template is too long".into()));
        }
        let pieces = pieces(text)?;
        let mut parser = Parser { pieces: &pieces, at: 0 };
        let (nodes, end) = parser.block(0)?;
        match end {
            None => Ok(Self(nodes)),
            Some(word) => Err(TemplateError::Parse(format!("unexpected {{{{{word}}}}}"))),
        }
    }

    pub fn render(&self, data: &Value) -> Result<String, TemplateError> {
        let mut out = String::new();
        let mut scope = Scope { root: data, variables: BTreeMap::new() };
        scope.run(&self.0, data, &mut out)?;
        Ok(out)
    }
}

enum Piece {
    Text(String),
    Action(String),
}

fn pieces(text: &str) -> Result<Vec<Piece>, TemplateError> {
    let mut out = Vec::new();
    let mut rest = text;
    let mut trim_next = false;
    while let Some(start) = rest.find("{{") {
        let mut before = &rest[..start];
        let after = &rest[start + 2..];
        let end = action_end(after).ok_or_else(|| TemplateError::Parse("unclosed action".into()))?;
        let mut action = &after[..end];
        if trim_next {
            before = before.trim_start();
        }
        if let Some(trimmed) = action.strip_prefix("- ") {
            before = before.trim_end();
            action = trimmed;
        }
        trim_next = action.ends_with(" -");
        let action = action.strip_suffix(" -").unwrap_or(action).trim();
        out.push(Piece::Text(before.to_owned()));
        if !action.starts_with("/*") {
            out.push(Piece::Action(action.to_owned()));
        }
        rest = &after[end + 2..];
    }
    out.push(Piece::Text(if trim_next { rest.trim_start() } else { rest }.to_owned()));
    Ok(out)
}

/// Where the closing braces are; those in a string do not count.
fn action_end(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    let (mut at, mut quote) = (0, None);
    while at < bytes.len() {
        match (quote, bytes[at]) {
            (Some(b'"'), b'\\') => at += 1,
            (Some(open), b) if b == open => quote = None,
            (None, b @ (b'"' | b'`')) => quote = Some(b),
            (None, b'}') if bytes.get(at + 1) == Some(&b'}') => return Some(at),
            _ => {}
        }
        at += 1;
    }
    None
}

struct Parser<'a> {
    pieces: &'a [Piece],
    at: usize,
}

impl Parser<'_> {
    /// Nodes up to `else`, `end` or the end of the template, and which of them it was.
    fn block(&mut self, depth: usize) -> Result<(Vec<Node>, Option<String>), TemplateError> {
        if depth > MAX_DEPTH {
            return Err(TemplateError::Parse("nested too deeply".into()));
        }
        let mut nodes = Vec::new();
        while let Some(piece) = self.pieces.get(self.at) {
            self.at += 1;
            let action = match piece {
                Piece::Text(text) => {
                    if !text.is_empty() {
                        nodes.push(Node::Text(text.clone()));
                    }
                    continue;
                }
                Piece::Action(action) => action.as_str(),
            };
            let (word, rest) = action.split_once(char::is_whitespace).unwrap_or((action, ""));
            match word {
                "end" | "else" => return Ok((nodes, Some(action.to_owned()))),
                "if" => {
                    let (yes, no) = self.branches(depth)?;
                    nodes.push(Node::If(pipeline(rest)?, yes, no));
                }
                "with" => {
                    let (yes, no) = self.branches(depth)?;
                    nodes.push(Node::With(pipeline(rest)?, yes, no));
                }
                "range" => {
                    let (names, over) = rest.split_once(":=").unwrap_or(("", rest));
                    let mut names: Vec<String> = names
                        .split(',')
                        .map(|name| name.trim().to_owned())
                        .filter(|name| !name.is_empty())
                        .collect();
                    let value = names.pop();
                    let key = names.pop();
                    let (body, otherwise) = self.branches(depth)?;
                    nodes.push(Node::Range { key, value, over: pipeline(over)?, body, otherwise });
                }
                _ => match action.split_once(":=").or_else(|| action.split_once('=')) {
                    Some((name, value)) if action.starts_with('$') => {
                        nodes.push(Node::Set(name.trim().to_owned(), pipeline(value)?));
                    }
                    _ => nodes.push(Node::Print(pipeline(action)?)),
                },
            }
        }
        Ok((nodes, None))
    }

    fn branches(&mut self, depth: usize) -> Result<(Vec<Node>, Vec<Node>), TemplateError> {
        let unclosed = || TemplateError::Parse("unexpected EOF".into());
        let (yes, end) = self.block(depth + 1)?;
        let end = end.ok_or_else(unclosed)?;
        let Some(rest) = end.strip_prefix("else") else { return Ok((yes, Vec::new())) };
        if let Some(condition) = rest.trim().strip_prefix("if ") {
            let (then, otherwise) = self.branches(depth + 1)?;
            return Ok((yes, vec![Node::If(pipeline(condition)?, then, otherwise)]));
        }
        let (no, end) = self.block(depth + 1)?;
        match end.as_deref() {
            Some("end") => Ok((yes, no)),
            _ => Err(unclosed()),
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
enum Token {
    Term(String),
    Text(String),
    Pipe,
    Open,
    /// With the fields that follow it.
    Close(String),
}

fn tokens(text: &str) -> Result<Vec<Token>, TemplateError> {
    let mut out = Vec::new();
    let mut chars = text.chars().peekable();
    while let Some(&c) = chars.peek() {
        match c {
            _ if c.is_whitespace() => {
                chars.next();
            }
            '|' => {
                chars.next();
                out.push(Token::Pipe);
            }
            '(' => {
                chars.next();
                out.push(Token::Open);
            }
            ')' => {
                chars.next();
                let mut fields = String::new();
                while let Some(c) = chars.next_if(|c| c.is_alphanumeric() || matches!(c, '.' | '_')) {
                    fields.push(c);
                }
                out.push(Token::Close(fields));
            }
            '"' => {
                chars.next();
                let mut value = String::new();
                loop {
                    match chars.next() {
                        None => return Err(TemplateError::Parse("unterminated quoted string".into())),
                        Some('"') => break,
                        Some('\\') => match chars.next() {
                            Some('n') => value.push('\n'),
                            Some('t') => value.push('\t'),
                            Some(other) => value.push(other),
                            None => {}
                        },
                        Some(other) => value.push(other),
                    }
                }
                out.push(Token::Text(value));
            }
            '`' => {
                chars.next();
                let value: String = chars.by_ref().take_while(|c| *c != '`').collect();
                out.push(Token::Text(value));
            }
            _ => {
                let mut word = String::new();
                while let Some(c) =
                    chars.next_if(|c| !c.is_whitespace() && !matches!(c, '|' | '(' | ')' | '"'))
                {
                    word.push(c);
                }
                out.push(Token::Term(word));
            }
        }
    }
    Ok(out)
}

fn pipeline(text: &str) -> Result<Pipeline, TemplateError> {
    let tokens = tokens(text)?;
    let mut at = 0;
    let parsed = commands(&tokens, &mut at, 0)?;
    if at < tokens.len() {
        return Err(TemplateError::Parse(format!("unexpected right paren in {text:?}")));
    }
    if parsed.iter().any(Vec::is_empty) {
        return Err(TemplateError::Parse("missing value for command".into()));
    }
    Ok(parsed)
}

fn commands(tokens: &[Token], at: &mut usize, depth: usize) -> Result<Pipeline, TemplateError> {
    if depth > MAX_DEPTH {
        return Err(TemplateError::Parse("nested too deeply".into()));
    }
    let mut all = vec![Vec::new()];
    while let Some(token) = tokens.get(*at) {
        let current = all.last_mut().ok_or_else(|| TemplateError::Parse("empty command".into()))?;
        match token {
            Token::Pipe => all.push(Vec::new()),
            Token::Open => {
                *at += 1;
                let inner = commands(tokens, at, depth + 1)?;
                match tokens.get(*at) {
                    Some(Token::Close(fields)) => current.push(Term::Group(inner, field_names(fields))),
                    _ => return Err(TemplateError::Parse("unclosed left paren".into())),
                }
            }
            Token::Close(_) => return Ok(all),
            Token::Text(text) => current.push(Term::Literal(Value::String(text.clone()))),
            Token::Term(word) => current.push(term(word)?),
        }
        *at += 1;
    }
    Ok(all)
}

fn field_names(text: &str) -> Vec<String> {
    text.split('.').filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

fn term(word: &str) -> Result<Term, TemplateError> {
    if let Some(fields) = word.strip_prefix('.') {
        return Ok(Term::Field(field_names(fields)));
    }
    if word.starts_with('$') {
        let (name, fields) = word.split_once('.').unwrap_or((word, ""));
        return Ok(Term::Variable(name.to_owned(), field_names(fields)));
    }
    if let Ok(number) = word.parse::<i64>() {
        return Ok(Term::Literal(number.into()));
    }
    match word {
        "true" => Ok(Term::Literal(true.into())),
        "false" => Ok(Term::Literal(false.into())),
        "nil" => Ok(Term::Literal(Value::Null)),
        _ if FUNCTIONS.contains(&word) => Ok(Term::Word(word.to_owned())),
        _ => Err(TemplateError::Parse(format!("function {word:?} not defined"))),
    }
}

struct Scope<'a> {
    root: &'a Value,
    variables: BTreeMap<String, Value>,
}

fn walk(mut value: Value, fields: &[String], shown: &str) -> Result<Value, TemplateError> {
    for field in fields {
        value = match &mut value {
            Value::Object(map) => {
                map.remove(field).ok_or_else(|| fail(shown, format!("map has no entry for key {field:?}")))?
            }
            Value::Null => return Err(fail(shown, format!("nil data; no entry for key {field:?}"))),
            _ => return Err(fail(shown, format!("can't evaluate field {field}"))),
        };
    }
    Ok(value)
}

impl Scope<'_> {
    fn run(&mut self, nodes: &[Node], dot: &Value, out: &mut String) -> Result<(), TemplateError> {
        for node in nodes {
            if out.len() > MAX_OUTPUT {
                return Err(fail("", "the output is too long"));
            }
            match node {
                Node::Text(text) => out.push_str(text),
                Node::Print(pipeline) => print(&self.evaluate(pipeline, dot)?, out),
                Node::If(condition, yes, no) => {
                    let chosen = if truth(&self.evaluate(condition, dot)?) { yes } else { no };
                    self.run(chosen, dot, out)?;
                }
                Node::With(value, yes, no) => {
                    let value = self.evaluate(value, dot)?;
                    if truth(&value) { self.run(yes, &value, out)? } else { self.run(no, dot, out)? }
                }
                Node::Set(name, value) => {
                    let value = self.evaluate(value, dot)?;
                    self.variables.insert(name.clone(), value);
                }
                Node::Range { key, value, over, body, otherwise } => {
                    let items: Vec<(Value, Value)> = match self.evaluate(over, dot)? {
                        Value::Array(list) => {
                            list.into_iter().enumerate().map(|(index, item)| (index.into(), item)).collect()
                        }
                        Value::Object(map) => map.into_iter().map(|(key, item)| (key.into(), item)).collect(),
                        Value::Null => Vec::new(),
                        other => return Err(fail("range", format!("range can't iterate over {other}"))),
                    };
                    if items.is_empty() {
                        self.run(otherwise, dot, out)?;
                    }
                    for (index, item) in items {
                        if let Some(name) = key {
                            self.variables.insert(name.clone(), index);
                        }
                        if let Some(name) = value {
                            self.variables.insert(name.clone(), item.clone());
                        }
                        self.run(body, &item, out)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn evaluate(&self, pipeline: &[Vec<Term>], dot: &Value) -> Result<Value, TemplateError> {
        let mut last: Option<Value> = None;
        for command in pipeline {
            last = Some(self.command(command, last, dot)?);
        }
        Ok(last.unwrap_or(Value::Null))
    }

    fn command(&self, command: &[Term], piped: Option<Value>, dot: &Value) -> Result<Value, TemplateError> {
        let Some((first, rest)) = command.split_first() else { return Ok(piped.unwrap_or(Value::Null)) };
        let mut arguments = rest.iter().map(|term| self.term(term, dot)).collect::<Result<Vec<_>, _>>()?;
        arguments.extend(piped);
        match first {
            Term::Word(name) => function(name, &arguments),
            // The one method that takes an argument.
            Term::Field(fields) if fields.as_slice() == ["Label"] => {
                let key = arguments.first().map(printed).unwrap_or_default();
                Ok(dot.get("__labels").and_then(|labels| labels.get(&key)).cloned().unwrap_or("".into()))
            }
            _ if !arguments.is_empty() => Err(fail("", "can't give argument to non-function")),
            term => self.term(term, dot),
        }
    }

    fn term(&self, term: &Term, dot: &Value) -> Result<Value, TemplateError> {
        match term {
            Term::Literal(value) => Ok(value.clone()),
            Term::Word(name) => function(name, &[]),
            Term::Field(fields) => walk(dot.clone(), fields, &format!(".{}", fields.join("."))),
            Term::Variable(name, fields) => {
                let value = match name.as_str() {
                    "$" => self.root.clone(),
                    name => self
                        .variables
                        .get(name)
                        .cloned()
                        .ok_or_else(|| TemplateError::Parse(format!("undefined variable {name:?}")))?,
                };
                walk(value, fields, name)
            }
            Term::Group(inner, fields) => walk(self.evaluate(inner, dot)?, fields, "(…)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn templates() {
        let data = json!({
            "ID": "abc", "State": {"Running": true, "ExitCode": 3}, "Name": "/web",
            "Ports": {"80/tcp": [{"HostPort": "8080"}]}, "Mounts": [{"D": "/a"}, {"D": "/b"}], "Empty": [],
            "__labels": {"k": "v"}, "Nothing": null,
        });
        for (template, want) in [
            ("{{.ID}}", "abc"),
            ("{{ .State.ExitCode }}", "3"),
            ("{{.ID}}: {{.Name}}", "abc: /web"),
            ("{{json .State}}", r#"{"ExitCode":3,"Running":true}"#),
            ("{{.State.Running}}", "true"),
            ("{{if .State.Running}}yes{{else}}no{{end}}", "yes"),
            ("{{if not .State.Running}}yes{{else if eq .ID \"abc\"}}abc{{else}}no{{end}}", "abc"),
            ("{{range .Mounts}}{{.D}} {{end}}", "/a /b "),
            ("{{range $i, $m := .Mounts}}{{$i}}={{$m.D}};{{end}}", "0=/a;1=/b;"),
            ("{{range .Empty}}x{{else}}none{{end}}", "none"),
            ("{{(index (index .Ports \"80/tcp\") 0).HostPort}}", "8080"),
            ("{{range $p, $c := .Ports}}{{$p}} -> {{(index $c 0).HostPort}}{{end}}", "80/tcp -> 8080"),
            ("{{.Name | upper | printf \"%s!\"}}", "/WEB!"),
            ("{{len .Mounts}}", "2"),
            ("{{join (split \"a,b\" \",\") \"-\"}}", "a-b"),
            ("{{.Label \"k\"}}{{.Label \"x\"}}", "v"),
            ("{{- .ID -}} x", "abcx"),
            ("{{println .ID}}", "abc\n"),
            ("{{.Nothing}}", "<no value>"),
            ("{{.Mounts}}", "[map[D:/a] map[D:/b]]"),
            ("{{with .State}}{{.ExitCode}}{{$.ID}}{{end}}", "3abc"),
            ("{{/* nothing */}}a{{\"}}\"}}b", "a}}b"),
            ("{{$x := .ID}}{{$x}}", "abc"),
            ("plain", "plain"),
        ] {
            let parsed = Template::parse(template).unwrap_or_else(|error| panic!("{template}: {error}"));
            assert_eq!(parsed.render(&data).as_deref(), Ok(want), "{template}");
        }
        let error = Template::parse("{{.Foo.Bar}}").unwrap().render(&data).unwrap_err();
        assert!(error.to_string().contains("map has no entry for key \"Foo\""), "{error}");
        for bad in
            ["{{.ID", "{{nope .ID}}", "{{if .ID}}", "{{end}}", "{{(.ID}}", "{{}}", "{{.ID | }}", "{{\"a}}"]
        {
            assert!(Template::parse(bad).is_err(), "{bad}");
        }
        let deep = "{{if .ID}}".repeat(1000);
        assert!(Template::parse(&deep).is_err());
        let deep = format!("{{{{{}.ID}}}}", "(".repeat(5000));
        assert!(Template::parse(&deep).is_err());
    }
}
