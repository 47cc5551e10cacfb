//! From tokens to the syntax tree.
//!
//! Recursion is bounded as upstream bounds it: each rule of the grammar may be open [`MAX_DEPTH`] times, and so deep
//! may operators and selections nest in the tree.

mod recovery;

use std::sync::Arc;

use crate::ast::{Ast, Element, Entry, Expr, ExprKind, Field, Id, Literal};
use crate::lexer::{self, Kind, Token};
use crate::literal;
use crate::macros::{Expansion, Macros};
use crate::source::{Issue, Location, Source};
use recovery::{
    EXPECTED_ARGUMENT, EXPECTED_ELEMENT, EXPECTED_ENTRY, EXPECTED_EXPRESSION, EXPECTED_FIELD, EXPECTED_INDEX,
    begins_expression,
};

const MAX_DEPTH: usize = 250;
const MAX_CODE_POINTS: usize = 100_000;
/// Most nodes that macros may make out of an expression. `optMap` copies its receiver: nested ones grow quickly.
const MAX_NODES: usize = 400_000;

/// Words that no identifier may be.
pub(crate) const RESERVED: &[&str] = &[
    "as",
    "break",
    "const",
    "continue",
    "else",
    "false",
    "for",
    "function",
    "if",
    "import",
    "in",
    "let",
    "loop",
    "package",
    "namespace",
    "null",
    "return",
    "true",
    "var",
    "void",
    "while",
];

/// True if `name` can stand for a variable: letters, digits and underscores, no digit first, and no reserved word.
pub fn is_identifier(name: &str) -> bool {
    let start = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
    start && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') && !RESERVED.contains(&name)
}

/// The parts of the grammar that an environment switches on.
#[derive(Debug, Clone, Default)]
pub(crate) struct Syntax {
    pub macros: Macros,
    pub optional: bool,
    pub escaped_identifiers: bool,
}

pub(crate) fn parse(source: &Source, syntax: &Syntax) -> Result<Ast, Vec<Issue>> {
    let size = source.text.len();
    if size > MAX_CODE_POINTS {
        let message =
            format!("expression code point size exceeds limit: size: {size}, limit {MAX_CODE_POINTS}");
        return Err(vec![source.issue(Location::NONE, message)]);
    }
    let (tokens, unrecognized) = lexer::tokens(source);
    let mut issues: Vec<Issue> = unrecognized
        .iter()
        .map(|text| {
            let quoted = quote(&source.slice(text.start, text.end));
            let message = format!("Syntax error: token recognition error at: '{quoted}'");
            source.issue(source.location(text.start), message)
        })
        .collect();
    let mut parser = Parser {
        source,
        syntax,
        tokens,
        at: 0,
        tree: Builder::default(),
        issues: Vec::new(),
        depth: [0; 5],
        closers: Vec::new(),
    };
    let root = parser.start();
    issues.append(&mut parser.issues);
    match root {
        Ok(root) if issues.is_empty() => Ok(Ast { root, positions: parser.tree.positions }),
        _ => Err(issues),
    }
}

/// Levels to which the parser may have to go down in `source`, without looking closely: brackets, and conditionals.
pub(crate) fn nesting(source: &Source) -> usize {
    let (mut open, mut deepest, mut conditionals) = (0_usize, 0, 0_usize);
    for c in &source.text {
        match c {
            '(' | '[' | '{' => open += 1,
            ')' | ']' | '}' => open = open.saturating_sub(1),
            '?' => conditionals += 1,
            _ => {}
        }
        deepest = deepest.max(open);
    }
    // The parser stops at this depth.
    (deepest + conditionals).min(MAX_DEPTH + 1)
}

/// Text as upstream's messages quote it.
fn quote(text: &str) -> String {
    text.replace('\n', "\\n").replace('\r', "\\r").replace('\t', "\\t")
}

/// Makes nodes and remembers their places.
#[derive(Debug, Default)]
pub(crate) struct Builder {
    pub positions: Vec<u32>,
}

impl Builder {
    pub fn id(&mut self, offset: usize) -> Id {
        self.positions.push(offset as u32);
        (self.positions.len() - 1) as Id
    }

    pub fn node(&mut self, offset: usize, kind: ExprKind) -> Expr {
        Expr { id: self.id(offset), kind }
    }

    pub fn position(&self, id: Id) -> usize {
        self.positions[id as usize] as usize
    }

    pub fn is_full(&self) -> bool {
        self.positions.len() > MAX_NODES
    }
}

/// A syntax error was reported; the rest of the text is not read.
struct Stop;

type Parsed<T> = Result<T, Stop>;

/// The rules that upstream counts.
#[derive(Clone, Copy)]
enum Rule {
    Expr,
    Relation,
    Calc,
    Member,
    /// Operators and selections of any rule, as nested in the tree.
    Tree,
}

struct Parser<'s> {
    source: &'s Source,
    syntax: &'s Syntax,
    tokens: Vec<Token>,
    at: usize,
    tree: Builder,
    issues: Vec<Issue>,
    depth: [usize; 5],
    /// The symbols that close the brackets that are open.
    closers: Vec<&'static str>,
}

impl Parser<'_> {
    fn start(&mut self) -> Parsed<Expr> {
        let root = self.expr()?;
        if self.kind() != Kind::End {
            return Err(self.unexpected("<EOF>", Kind::End));
        }
        Ok(root)
    }

    fn token(&self) -> Token {
        self.tokens[self.at]
    }

    fn kind(&self) -> Kind {
        self.token().kind
    }

    fn advance(&mut self) -> Token {
        let token = self.token();
        if token.kind != Kind::End {
            self.at += 1;
        }
        token
    }

    fn is(&self, symbol: &str) -> bool {
        matches!(self.kind(), Kind::Symbol(found) if found == symbol)
    }

    fn take(&mut self, symbol: &str) -> Option<Token> {
        self.is(symbol).then(|| self.advance())
    }

    fn expect(&mut self, symbol: &'static str) -> Parsed<Token> {
        self.take(symbol).ok_or_else(|| self.unexpected(&format!("'{symbol}'"), Kind::Symbol(symbol)))
    }

    fn text(&self, token: Token) -> String {
        self.source.slice(token.start, token.end)
    }

    fn report(&mut self, offset: usize, message: impl Into<String>) {
        let location = self.source.location(offset);
        self.issues.push(self.source.issue(location, message));
    }

    fn enter(&mut self, rule: Rule) -> Parsed<()> {
        self.depth[rule as usize] += 1;
        if self.depth[rule as usize] <= MAX_DEPTH {
            return Ok(());
        }
        let message = match rule {
            Rule::Tree => "max recursion depth exceeded".to_owned(),
            _ => format!("expression recursion limit exceeded: {MAX_DEPTH}"),
        };
        self.issues.push(self.source.issue(Location::NONE, message));
        Err(Stop)
    }

    fn leave(&mut self, rule: Rule, count: usize) {
        self.depth[rule as usize] -= count;
    }

    fn expr(&mut self) -> Parsed<Expr> {
        self.enter(Rule::Expr)?;
        let condition = self.logical("||")?;
        let expr = match self.take("?") {
            None => condition,
            Some(op) => {
                self.enter(Rule::Tree)?;
                let id = self.tree.id(op.start);
                let yes = self.logical("||")?;
                self.colon()?;
                let no = self.expr()?;
                self.leave(Rule::Tree, 1);
                self.global_call(id, "_?_:_", vec![condition, yes, no])
            }
        };
        self.leave(Rule::Expr, 1);
        Ok(expr)
    }

    /// Terms joined by `||` or, below it, by `&&`. They become a balanced tree.
    fn logical(&mut self, operator: &'static str) -> Parsed<Expr> {
        let (function, is_or) = if operator == "||" { ("_||_", true) } else { ("_&&_", false) };
        let term = |parser: &mut Self| if is_or { parser.logical("&&") } else { parser.relation() };
        let mut terms = vec![term(self)?];
        let mut ops = Vec::new();
        while let Some(op) = self.take(operator) {
            terms.push(term(self)?);
            ops.push(self.tree.id(op.start));
        }
        let mut terms: Vec<Option<Expr>> = terms.into_iter().map(Some).collect();
        Ok(balance(&mut terms, &ops, 0, ops.len(), &function.into()))
    }

    fn relation(&mut self) -> Parsed<Expr> {
        self.enter(Rule::Relation)?;
        let mut tree = 0;
        let mut left = self.calc(0)?;
        loop {
            let function = match self.kind() {
                Kind::Symbol("<") => "_<_",
                Kind::Symbol("<=") => "_<=_",
                Kind::Symbol(">=") => "_>=_",
                Kind::Symbol(">") => "_>_",
                Kind::Symbol("==") => "_==_",
                Kind::Symbol("!=") => "_!=_",
                Kind::Symbol("in") => "@in",
                _ => break,
            };
            self.enter(Rule::Tree)?;
            tree += 1;
            let op = self.advance();
            let id = self.tree.id(op.start);
            let right = self.calc(0)?;
            left = self.global_call(id, function, vec![left, right]);
        }
        self.leave(Rule::Relation, 1);
        self.leave(Rule::Tree, tree);
        Ok(left)
    }

    /// Sums (`level` 0) and products (`level` 1).
    fn calc(&mut self, level: usize) -> Parsed<Expr> {
        self.enter(Rule::Calc)?;
        let mut tree = 0;
        let mut left = self.unary()?;
        loop {
            let (function, binds) = match self.kind() {
                Kind::Symbol("*") => ("_*_", 1),
                Kind::Symbol("/") => ("_/_", 1),
                Kind::Symbol("%") => ("_%_", 1),
                Kind::Symbol("+") => ("_+_", 0),
                Kind::Symbol("-") => ("_-_", 0),
                _ => break,
            };
            if binds < level {
                break;
            }
            self.enter(Rule::Tree)?;
            tree += 1;
            let op = self.advance();
            let id = self.tree.id(op.start);
            let right = if binds == 1 { self.calc(2)? } else { self.calc(1)? };
            left = self.global_call(id, function, vec![left, right]);
        }
        self.leave(Rule::Calc, 1);
        self.leave(Rule::Tree, tree);
        Ok(left)
    }

    fn unary(&mut self) -> Parsed<Expr> {
        let first = self.token();
        let (symbol, function) = match first.kind {
            Kind::Symbol("!") => ("!", "!_"),
            Kind::Symbol("-") => ("-", "-_"),
            _ => return self.member(None),
        };
        let mut count = 0;
        while self.is(symbol) {
            // A single minus belongs to the number that follows it.
            let next = self.tokens[(self.at + 1).min(self.tokens.len() - 1)].kind;
            if count == 0 && symbol == "-" && matches!(next, Kind::Int | Kind::Float) {
                break;
            }
            self.advance();
            count += 1;
        }
        if self.kind() == Kind::End && count > 0 {
            // As upstream, which decides on the end of the text in the middle of a rule.
            if symbol == "!" {
                return Err(self.refuse(EXPECTED_EXPRESSION, true));
            }
            let end = self.token();
            self.report(end.start, format!("Syntax error: no viable alternative at input '{symbol}'"));
        }
        let sign = if symbol == "-" { self.take("-") } else { None };
        if count % 2 == 0 {
            return self.member(sign);
        }
        let id = self.tree.id(first.start);
        let operand = self.member(sign)?;
        Ok(self.global_call(id, function, vec![operand]))
    }

    fn member(&mut self, sign: Option<Token>) -> Parsed<Expr> {
        self.enter(Rule::Member)?;
        let mut tree = 0;
        let mut expr = self.primary(sign)?;
        loop {
            if let Some(dot) = self.take(".") {
                expr = self.selection(expr, dot)?;
            } else if let Some(open) = self.take("[") {
                let optional = self.take("?");
                if optional.is_some() && !self.syntax.optional {
                    self.report(open.start, "unsupported syntax '[?'");
                }
                let id = self.tree.id(open.start);
                self.closers.push("]");
                if optional.is_none() && self.kind() == Kind::End {
                    return Err(self.refuse(EXPECTED_INDEX, false));
                }
                let index = self.expr()?;
                self.close()?;
                let function = if optional.is_some() { "_[?_]" } else { "_[_]" };
                expr = self.global_call(id, function, vec![expr, index]);
            } else {
                break;
            }
            self.enter(Rule::Tree)?;
            tree += 1;
        }
        self.leave(Rule::Member, 1);
        self.leave(Rule::Tree, tree);
        Ok(expr)
    }

    /// A field or a call, after the dot.
    fn selection(&mut self, operand: Expr, dot: Token) -> Parsed<Expr> {
        let optional = self.take("?");
        let name = self.token();
        let field: Arc<str> = match name.kind {
            Kind::Ident => self.text(name).into(),
            Kind::EscapedIdent => {
                if !self.syntax.escaped_identifiers {
                    self.report(name.start, "unsupported syntax: '`'");
                }
                self.source.slice(name.start + 1, name.end - 1).into()
            }
            _ if optional.is_some() => {
                let stop = self.unexpected("{IDENTIFIER, ESC_IDENTIFIER}", Kind::Ident);
                self.report(name.start, "unsupported ident kind");
                return Err(stop);
            }
            _ => return Err(self.no_name(dot)),
        };
        self.advance();
        if optional.is_some() {
            if !self.syntax.optional {
                self.report(dot.start, "unsupported syntax '.?'");
            }
            let field = self.tree.node(name.start, ExprKind::Literal(Literal::String(field)));
            let id = self.tree.id(dot.start);
            return Ok(call(id, "_?._", vec![operand, field]));
        }
        if name.kind == Kind::Ident
            && let Some(open) = self.take("(")
        {
            let id = self.tree.id(open.start);
            let args = self.arguments()?;
            return self.macro_or_call(id, field, Some(operand), args);
        }
        Ok(self
            .tree
            .node(dot.start, ExprKind::Select { operand: Box::new(operand), field, test_only: false }))
    }

    fn arguments(&mut self) -> Parsed<Vec<Expr>> {
        let mut args = Vec::new();
        if self.take(")").is_some() {
            return Ok(args);
        }
        let next_fits =
            self.next_kind().is_some_and(begins_expression) || self.next_kind() == Some(Kind::Symbol(")"));
        if !begins_expression(self.kind()) {
            let stop = self.refuse(EXPECTED_ARGUMENT, next_fits);
            if !next_fits {
                return Err(stop);
            }
            self.advance();
            if self.take(")").is_some() {
                return Ok(args);
            }
        }
        self.closers.push(")");
        loop {
            args.push(self.expr()?);
            if self.take(",").is_none() {
                self.close()?;
                return Ok(args);
            }
        }
    }

    fn primary(&mut self, sign: Option<Token>) -> Parsed<Expr> {
        let token = self.token();
        if let Some(literal) = self.literal(sign) {
            return Ok(literal);
        }
        if self.take("(").is_some() {
            self.closers.push(")");
            let expr = self.expr()?;
            self.close()?;
            return Ok(expr);
        }
        if self.take("[").is_some() {
            return self.list(token);
        }
        if self.take("{").is_some() {
            return self.map(token);
        }
        let leading = self.take(".");
        let name = self.token();
        if name.kind != Kind::Ident {
            if let Some(dot) = leading {
                return Err(self.no_name(dot));
            }
            let next_fits = self.next_kind().is_some_and(begins_expression);
            let stop = self.refuse(EXPECTED_EXPRESSION, next_fits);
            if !next_fits {
                return Err(stop);
            }
            // As upstream: one token too many is passed over.
            self.advance();
            return self.primary(sign);
        }
        if let Some(object) = self.object(leading.is_some())? {
            return Ok(object);
        }
        self.advance();
        let text = self.text(name);
        let start = leading.unwrap_or(name).start;
        if RESERVED.contains(&text.as_str()) {
            self.report(start, format!("reserved identifier: {text}"));
        }
        let full: Arc<str> = if leading.is_some() { format!(".{text}").into() } else { text.into() };
        if let Some(open) = self.take("(") {
            let id = self.tree.id(open.start);
            let args = self.arguments()?;
            return self.macro_or_call(id, full, None, args);
        }
        Ok(self.tree.node(name.start, ExprKind::Ident(full)))
    }

    fn list(&mut self, open: Token) -> Parsed<Expr> {
        let id = self.tree.id(open.start);
        let mut elements = Vec::new();
        self.closers.push("]");
        self.check_entries_begin("]", EXPECTED_ELEMENT)?;
        while !self.is("]") {
            if let (true, Some(_)) = (elements.is_empty(), self.take(",")) {
                break;
            }
            let optional = self.optional_mark();
            elements.push(Element { value: self.expr()?, optional });
            if self.take(",").is_none() {
                self.check_entries_end("]")?;
                break;
            }
            if !self.begins_entry() {
                break;
            }
        }
        self.close()?;
        Ok(Expr { id, kind: ExprKind::List(elements) })
    }

    fn map(&mut self, open: Token) -> Parsed<Expr> {
        let id = self.tree.id(open.start);
        let mut entries = Vec::new();
        self.closers.push("}");
        self.check_entries_begin("}", EXPECTED_ENTRY)?;
        while !self.is("}") {
            if let (true, Some(_)) = (entries.is_empty(), self.take(",")) {
                break;
            }
            let optional = self.optional_mark();
            let key = self.expr()?;
            self.colon()?;
            entries.push(Entry { key, value: self.expr()?, optional });
            if self.take(",").is_none() {
                self.check_entries_end("}")?;
                break;
            }
            if !self.begins_entry() {
                break;
            }
        }
        self.close()?;
        Ok(Expr { id, kind: ExprKind::Map(entries) })
    }

    fn optional_mark(&mut self) -> bool {
        let Some(mark) = self.take("?") else { return false };
        if !self.syntax.optional {
            self.report(mark.start, "unsupported syntax '?'");
        }
        true
    }

    /// An object, if a name and a brace follow: `a.b.C{...}`.
    fn object(&mut self, leading_dot: bool) -> Parsed<Option<Expr>> {
        let mut end = self.at + 1;
        while matches!(self.tokens.get(end).map(|t| t.kind), Some(Kind::Symbol(".")))
            && matches!(self.tokens.get(end + 1).map(|t| t.kind), Some(Kind::Ident))
        {
            end += 2;
        }
        if !matches!(self.tokens.get(end).map(|t| t.kind), Some(Kind::Symbol("{"))) {
            return Ok(None);
        }
        let mut name = if leading_dot { String::from(".") } else { String::new() };
        while self.at < end {
            let token = self.advance();
            name.push_str(&self.text(token));
        }
        let open = self.advance();
        let id = self.tree.id(open.start);
        let mut fields = Vec::new();
        self.closers.push("}");
        while !self.is("}") {
            if let (true, Some(_)) = (fields.is_empty(), self.take(",")) {
                break;
            }
            let optional = self.optional_mark();
            let token = self.token();
            let field = match token.kind {
                Kind::Ident => self.text(token),
                Kind::EscapedIdent => {
                    if !self.syntax.escaped_identifiers {
                        self.report(token.start, "unsupported syntax: '`'");
                    }
                    self.source.slice(token.start + 1, token.end - 1)
                }
                _ if fields.is_empty() && !optional => {
                    return Err(self.unexpected(EXPECTED_FIELD, Kind::Ident));
                }
                _ => return Err(self.unexpected("{IDENTIFIER, ESC_IDENTIFIER}", Kind::Ident)),
            };
            self.advance();
            let colon = self.colon()?;
            let id = self.tree.id(colon.start);
            fields.push(Field { id, name: field.into(), value: self.expr()?, optional });
            if self.take(",").is_none() {
                self.check_entries_end("}")?;
                break;
            }
            if !matches!(self.kind(), Kind::Ident | Kind::EscapedIdent) && !self.is("?") {
                break;
            }
        }
        self.close()?;
        Ok(Some(Expr { id, kind: ExprKind::Struct { name: name.into(), fields } }))
    }

    fn literal(&mut self, sign: Option<Token>) -> Option<Expr> {
        let token = self.token();
        let start = sign.unwrap_or(token).start;
        let text = match token.kind {
            Kind::Symbol(_) | Kind::Ident | Kind::EscapedIdent | Kind::End => return None,
            _ => self.text(self.token()),
        };
        self.advance();
        let value = match token.kind {
            Kind::True => Ok(Literal::Bool(true)),
            Kind::False => Ok(Literal::Bool(false)),
            Kind::Null => Ok(Literal::Null),
            Kind::Int => literal::int(&text, sign.is_some()).map(Literal::Int),
            Kind::Uint => literal::uint(&text).map(Literal::Uint),
            Kind::Float => literal::double(&text, sign.is_some()).map(Literal::Double),
            Kind::Bytes => literal::unescape_bytes(&text[1..]).map(|bytes| Literal::Bytes(bytes.into())),
            _ => literal::unescape(&text).map(|text| Literal::String(text.into())),
        };
        let value = value.unwrap_or_else(|problem| {
            self.report(start, problem.to_string());
            Literal::Null
        });
        Some(self.tree.node(start, ExprKind::Literal(value)))
    }

    fn global_call(&mut self, id: Id, function: &str, args: Vec<Expr>) -> Expr {
        call(id, function, args)
    }

    fn macro_or_call(
        &mut self,
        id: Id,
        function: Arc<str>,
        target: Option<Expr>,
        args: Vec<Expr>,
    ) -> Parsed<Expr> {
        Ok(match self.syntax.macros.expand(&mut self.tree, id, &function, target, args) {
            Expansion::None(target, args) => {
                Expr { id, kind: ExprKind::Call { target: target.map(Box::new), function, args } }
            }
            // The next expansion could copy this one: stop while it is small.
            Expansion::Expr(_) if self.tree.is_full() => {
                let message = "expression expands to too many nodes";
                self.issues.push(self.source.issue(Location::NONE, message));
                return Err(Stop);
            }
            Expansion::Expr(expr) => expr,
            Expansion::Error { offset, message } => {
                self.report(offset, message);
                self.tree.node(offset, ExprKind::Literal(Literal::Null))
            }
        })
    }
}

fn call(id: Id, function: &str, args: Vec<Expr>) -> Expr {
    Expr { id, kind: ExprKind::Call { target: None, function: function.into(), args } }
}

/// The balanced tree of `terms[low..=high]`, joined by `ops[low..high]`.
fn balance(terms: &mut [Option<Expr>], ops: &[Id], low: usize, high: usize, function: &Arc<str>) -> Expr {
    if low == high {
        return terms[low].take().unwrap_or(Expr { id: 0, kind: ExprKind::Literal(Literal::Null) });
    }
    // As upstream: of two operators the left one is the root.
    let middle = (low + high).div_ceil(2);
    let middle = if high - low == 1 { low + 1 } else { middle };
    let left = balance(terms, ops, low, middle - 1, function);
    let right = balance(terms, ops, middle, high, function);
    Expr {
        id: ops[middle - 1],
        kind: ExprKind::Call { target: None, function: function.clone(), args: vec![left, right] },
    }
}
