//! Finds the calls to tools in what a model writes: `<tool_call>…</tool_call>` around a JSON object (Hermes, Qwen) or
//! around `<function=…>` elements (Qwen 3.5 and the coder models).

use serde_json::{Map, Value};

use super::openai::FunctionCall;
use super::stop::held_suffix;

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

/// Splits a reply into text and calls while it is written. Whitespace around a call belongs to the call; everything
/// else outside of calls comes out unchanged, and so does a call that cannot be read.
#[derive(Debug, Clone)]
pub struct ToolParser {
    tools: Vec<Value>,
    /// Not decided yet: inside a call all of it, outside whitespace and the beginning of `<tool_call>`.
    buffer: String,
    state: State,
}

#[derive(Debug, Clone)]
enum State {
    Text,
    /// Right after a call.
    Gap,
    /// Inside, after this whitespace.
    Call(String),
}

impl ToolParser {
    /// `tools` as in the request; their schemas tell strings from numbers.
    pub fn new(tools: &[Value]) -> ToolParser {
        ToolParser { tools: tools.to_vec(), buffer: String::new(), state: State::Text }
    }

    /// Text and calls that are certain with this addition.
    pub fn push(&mut self, text: &str) -> (String, Vec<FunctionCall>) {
        self.buffer.push_str(text);
        let (mut out, mut calls) = (String::new(), Vec::new());
        loop {
            match &self.state {
                State::Call(space) => {
                    let Some(end) = self.buffer.find(CLOSE) else { break };
                    match read_call(&self.buffer[..end], &self.tools) {
                        Some(call) => {
                            calls.push(call);
                            self.state = State::Gap;
                        }
                        None => {
                            out.extend([space, OPEN, &self.buffer[..end], CLOSE]);
                            self.state = State::Text;
                        }
                    }
                    self.buffer.drain(..end + CLOSE.len());
                }
                State::Gap => {
                    let space = self.buffer.len() - self.buffer.trim_start().len();
                    self.buffer.drain(..space);
                    if self.buffer.is_empty() {
                        break;
                    }
                    self.state = State::Text;
                }
                State::Text => {
                    let Some(at) = self.buffer.find(OPEN) else {
                        let keep = held_suffix(&self.buffer, [OPEN]);
                        let sure = self.buffer[..self.buffer.len() - keep].trim_end().len();
                        out.extend(self.buffer.drain(..sure));
                        break;
                    };
                    let before = self.buffer[..at].trim_end();
                    out.push_str(before);
                    self.state = State::Call(self.buffer[before.len()..at].to_owned());
                    self.buffer.drain(..at + OPEN.len());
                }
            }
        }
        (out, calls)
    }

    /// What is left at the end: a call that was not closed counts if it can be read.
    pub fn finish(&mut self) -> (String, Option<FunctionCall>) {
        let rest = std::mem::take(&mut self.buffer);
        match std::mem::replace(&mut self.state, State::Text) {
            State::Call(space) => match read_call(&rest, &self.tools) {
                Some(call) => (String::new(), Some(call)),
                None => (space + OPEN + &rest, None),
            },
            State::Text | State::Gap => (rest, None),
        }
    }
}

fn read_call(body: &str, tools: &[Value]) -> Option<FunctionCall> {
    let body = body.trim();
    match body.strip_prefix("<function=") {
        Some(rest) => read_elements(rest, tools),
        None => {
            let call: Value = serde_json::from_str(body).ok()?;
            let arguments = match call.get("arguments") {
                Some(Value::String(text)) => text.clone(),
                Some(arguments) => arguments.to_string(),
                None => "{}".to_owned(),
            };
            Some(FunctionCall { name: call.get("name")?.as_str()?.to_owned(), arguments })
        }
    }
}

/// `NAME><parameter=KEY>VALUE</parameter>…</function>`. Values are text; one newline on each side is markup.
fn read_elements(text: &str, tools: &[Value]) -> Option<FunctionCall> {
    let (name, mut rest) = text.split_once('>')?;
    let declared = tools.iter().map(|tool| &tool["function"]).find(|function| function["name"] == name);
    let mut arguments = Map::new();
    while let Some(parameter) = rest.trim_start().strip_prefix("<parameter=") {
        let (key, value) = parameter.split_once('>')?;
        let (value, after) = value.split_once("</parameter>")?;
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        let kind = declared.map(|function| &function["parameters"]["properties"][key]["type"]);
        let is_text = kind.is_none_or(|kind| kind.is_null() || kind == "string");
        let parsed = if is_text { None } else { serde_json::from_str(value).ok() };
        arguments.insert(key.to_owned(), parsed.unwrap_or_else(|| Value::from(value)));
        rest = after;
    }
    let end = rest.trim();
    let complete = end == "</function>" || end.is_empty();
    complete.then(|| FunctionCall { name: name.to_owned(), arguments: Value::Object(arguments).to_string() })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn tools() -> Vec<Value> {
        let properties = json!({"city": {"type": "string"}, "days": {"type": "integer"}, "at": {"type": "object"}});
        let parameters = json!({"type": "object", "properties": properties});
        vec![json!({"type": "function", "function": {"name": "weather", "parameters": parameters}})]
    }

    fn parse<'a>(pieces: impl IntoIterator<Item = &'a str>) -> (String, Vec<(String, Value)>) {
        let mut parser = ToolParser::new(&tools());
        let (mut text, mut calls) = (String::new(), Vec::new());
        for piece in pieces {
            let (more, found) = parser.push(piece);
            text += &more;
            calls.extend(found);
        }
        let (more, found) = parser.finish();
        calls.extend(found);
        let calls = calls.into_iter().map(|c| (c.name, serde_json::from_str(&c.arguments).unwrap()));
        (text + &more, calls.collect())
    }

    const JSON: &str =
        "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"San José\", \"days\": 2}}\n</tool_call>";

    #[test]
    fn json_calls_are_taken_out_with_the_space_around_them() {
        let call = ("weather".to_owned(), json!({"city": "San José", "days": 2}));
        assert_eq!(parse([JSON]), (String::new(), vec![call.clone()]));
        let text = format!("Let me see.\n\n{JSON}\n{JSON}\n\nDone. ");
        assert_eq!(parse([text.as_str()]), ("Let me see.Done. ".to_owned(), vec![call.clone(), call.clone()]));
        assert_eq!(parse([JSON.trim_end_matches(CLOSE)]).1, [call], "not closed, but whole");
    }

    #[test]
    fn elements_take_their_types_from_the_schema() {
        let text = "<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n12\n</parameter>\n\
                    <parameter=at>\n{\"x\": [1]}\n</parameter>\n<parameter=new>\n1\n</parameter>\n</function>\n</tool_call>";
        let expected = json!({"city": "12", "days": 12, "at": {"x": [1]}, "new": "1"});
        assert_eq!(parse([text]), (String::new(), vec![("weather".to_owned(), expected)]));
    }

    #[test]
    fn what_is_no_call_stays_text() {
        for text in [
            "a < b <tool",
            "  <tool_call>{oops}</tool_call>  ",
            "<tool_call>[]</tool_call>",
            "x\n<tool_call>{\"name\": 3}</tool_call> y",
            "<tool_call>{\"name\": \"weather\"",
            "<tool_call><function=weather><parameter=city>Rome</tool_call>",
            "</tool_call> \n ",
        ] {
            assert_eq!(parse([text]), (text.to_owned(), vec![]));
        }
    }

    proptest! {
        #[test]
        fn the_pieces_do_not_matter(
            parts in prop::collection::vec(
                prop_oneof![Just(JSON), Just(" \n"), Just("<tool_call>"), Just("</tool_call>"), Just("é<"), Just("tool_"), Just("hi")],
                0..8,
            ),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
        ) {
            let text = parts.concat();
            let mut cuts: Vec<_> = cuts.iter().map(|c| text.floor_char_boundary(c.index(text.len() + 1))).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let pieces = cuts.windows(2).map(|w| &text[w[0]..w[1]]);
            prop_assert_eq!(parse(pieces), parse([text.as_str()]));
        }
    }
}
