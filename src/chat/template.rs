//! The model's own chat template, rendered the way `transformers` does: Jinja with `trim_blocks` and `lstrip_blocks`,
//! Python's string methods, and a few functions of its own.

use std::fmt::Write;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, ValueKind};
use minijinja::{Environment, ErrorKind, Output, State, Value, escape_formatter};
use serde::Serialize;
use serde_json::Map;

use crate::error::{Error, Result};

/// What one rendering may spend: an instruction costs one, 64 bytes of text as well. Long conversations with tools take
/// some ten thousands.
const FUEL: u64 = 2_000_000;

/// A compiled chat template. Some models have several, by name.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    env: Environment<'static>,
    source: String,
}

/// What a template renders.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// Objects with at least `role` and `content`.
    pub messages: &'a [serde_json::Value],
    /// JSON schemas of the functions the model may call.
    pub tools: Option<&'a [serde_json::Value]>,
    /// Whether to end with the opening of the assistant's turn.
    pub add_generation_prompt: bool,
    /// Further variables: `bos_token`, `eos_token`, and options of the model's own such as `enable_thinking`.
    pub extra: &'a Map<String, serde_json::Value>,
    /// Seconds since 1970, for templates that print the date.
    pub now: i64,
}

impl ChatTemplate {
    /// Compiles a template. [`Error::Template`] says where it is wrong.
    pub fn new(source: &str) -> Result<ChatTemplate> {
        Self::named([("default", source)])
    }

    /// Compiles templates by name. `tool_use` renders requests with tools, `default` all others.
    pub fn named<'a>(templates: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<ChatTemplate> {
        let mut env = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        env.set_syntax(syntax.expect("the default delimiters are valid"));
        env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        env.set_formatter(python_print);
        env.set_fuel(Some(FUEL));
        env.add_filter("tojson", to_json);
        env.add_filter("string", |value: &Value| python_name(value).map_or_else(|| value.to_string(), str::to_owned));
        env.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
        env.add_test("sequence", |value: &Value| {
            matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String | ValueKind::Undefined)
        });
        env.add_function("raise_exception", |message: String| -> Result<Value, minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
        });
        let mut all = String::new();
        for (name, source) in templates {
            all.push_str(source);
            env.add_template_owned(name.to_owned(), without_generation_tags(source)).map_err(failed)?;
        }
        Ok(ChatTemplate { env, source: all })
    }

    /// Whether a template's source has this text in it: what it does not name, it cannot treat specially.
    pub fn mentions(&self, text: &str) -> bool {
        self.source.contains(text)
    }

    /// The prompt. [`Error::Template`] if the template refuses the messages, fails, or does not end.
    pub fn render(&self, inputs: Inputs<'_>) -> Result<String> {
        let name =
            if inputs.tools.is_some() && self.env.get_template("tool_use").is_ok() { "tool_use" } else { "default" };
        let template = self.env.get_template(name).map_err(|_| {
            let names: Vec<_> = self.env.templates().map(|(name, _)| name).collect();
            Error::Template(format!("none is called `{name}`, there are: {}", names.join(", ")))
        })?;
        let now = inputs.now;
        let context = minijinja::context! {
            messages => Serde(inputs.messages),
            tools => Serde(inputs.tools),
            add_generation_prompt => inputs.add_generation_prompt,
            strftime_now => Value::from_function(move |format: &str| strftime(now, format)),
            ..Value::from(Serde(inputs.extra))
        };
        template.render(context).map_err(failed)
    }
}

fn failed(e: minijinja::Error) -> Error {
    match e.kind() {
        ErrorKind::OutOfFuel => Error::Template(format!("it did not end within {FUEL} steps")),
        _ => Error::Template(e.to_string()),
    }
}

/// Python's spelling of the values that MiniJinja prints otherwise.
fn python_name(value: &Value) -> Option<&'static str> {
    match value.kind() {
        ValueKind::None => Some("None"),
        ValueKind::Bool => Some(if value.is_true() { "True" } else { "False" }),
        _ => None,
    }
}

fn python_print(out: &mut Output, state: &mut State, value: &Value) -> Result<(), minijinja::Error> {
    match python_name(value) {
        Some(name) => Ok(out.write_str(name)?),
        None => escape_formatter(out, state, value),
    }
}

/// JSON as Python's `json.dumps(…, ensure_ascii=False)` writes it; the built-in filter escapes for HTML.
fn to_json(Serde(mut value): Serde<serde_json::Value>, options: Kwargs) -> Result<String, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    if options.get::<Option<bool>>("sort_keys")?.unwrap_or(false) {
        value.sort_all_objects();
    }
    let ascii = options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    options.assert_all_used()?;
    let mut out = Vec::new();
    let written = match indent {
        Some(n) => {
            let indent = " ".repeat(n.min(16));
            let pretty = serde_json::ser::PrettyFormatter::with_indent(indent.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, pretty))
        }
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, PythonJson)),
    };
    let bad = |e: &dyn std::fmt::Display| minijinja::Error::new(ErrorKind::BadSerialization, e.to_string());
    written.map_err(|e| bad(&e))?;
    let text = String::from_utf8(out).map_err(|e| bad(&e))?;
    Ok(if ascii { escape_unicode(&text) } else { text })
}

/// In JSON, only strings have characters beyond ASCII.
fn escape_unicode(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    for c in json.chars() {
        if c.is_ascii() {
            out.push(c);
        } else {
            out.extend(c.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")));
        }
    }
    out
}

/// One line, with spaces after `,` and `:`.
struct PythonJson;

impl serde_json::ser::Formatter for PythonJson {
    fn begin_array_value<W: ?Sized + std::io::Write>(&mut self, out: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(&mut self, out: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, out: &mut W) -> std::io::Result<()> {
        out.write_all(b": ")
    }
}

fn strftime(now: i64, format: &str) -> Result<String, minijinja::Error> {
    let invalid = |what| minijinja::Error::new(ErrorKind::InvalidOperation, format!("strftime_now: bad {what}"));
    let now = chrono::DateTime::from_timestamp(now, 0).ok_or_else(|| invalid("time"))?;
    let mut text = String::new();
    write!(text, "{}", now.format(format)).map_err(|_| invalid("format"))?;
    Ok(text)
}

/// `{% generation %}` marks what a training run learns from and prints nothing. It becomes `{% if true %}`, so that
/// whitespace control around it keeps its meaning.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(open) = rest.find("{%") {
        let Some(len) = rest[open..].find("%}") else { break };
        let (before, tag) = (&rest[..open], &rest[open + 2..open + len]);
        let (left, inner) = tag.split_at(tag.len() - tag.trim_start_matches(['-', '+']).len());
        let (inner, right) = inner.split_at(inner.trim_end_matches(['-', '+']).len());
        let replaced = match inner.trim() {
            "generation" => " if true ",
            "endgeneration" => " endif ",
            _ => inner,
        };
        out.extend([before, "{%", left, replaced, right, "%}"]);
        rest = &rest[open + len + 2..];
    }
    out + rest
}

#[cfg(test)]
mod tests;
