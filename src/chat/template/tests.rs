use serde_json::{Value, json};

use super::*;

fn render_with(template: &ChatTemplate, messages: &[Value], tools: Option<&[Value]>, extra: Value) -> Result<String> {
    let extra = extra.as_object().unwrap();
    let now = 1_767_312_000; // 2 January 2026
    template.render(Inputs { messages, tools, add_generation_prompt: true, extra, now })
}

fn render(source: &str) -> Result<String> {
    let messages = [json!({"role": "user", "content": " Hi <b> "}), json!({"role": "assistant", "content": "Yes"})];
    let tools =
        [json!({"type": "function", "function": {"name": "z", "parameters": {"b": 1, "a": [true, null, "é"]}}})];
    render_with(&ChatTemplate::new(source)?, &messages, Some(&tools), json!({"bos_token": "<s>"}))
}

#[test]
fn blocks_are_trimmed_as_in_transformers() {
    let source = "{% for m in messages %}\n  {% if true %}\n<{{ m.role }}>\n  {% endif %}\n{% endfor %}\nend\n";
    assert_eq!(render(source).unwrap(), "<user>\n<assistant>\nend");
    assert_eq!(render("a\n  {%+ if true %}\n x\n{%- endif -%}\n  b").unwrap(), "a\n   xb");
}

#[test]
fn python_methods_and_functions_are_there() {
    for (source, expected) in [
        ("{{ messages[0].content.strip() }}", "Hi <b>"),
        ("{{ ' a'.lstrip() + 'b '.rstrip() + 'xx-'.strip('x') }}", "ab-"),
        ("{{ 'a</think>b'.split('</think>')[-1] }}", "b"),
        ("{{ 'abc'.startswith('ab') and not 'abc'.endswith('b') }}", "True"),
        ("{{ messages[::-1][0].role }}", "assistant"),
        ("{% for k, v in tools[0].function.parameters.items() %}{{ k }};{% endfor %}", "b;a;"),
        ("{% for k, v in tools[0].function.parameters|items %}{{ k }};{% endfor %}", "b;a;"),
        ("{{ messages[0].get('name', 'nobody') }}", "nobody"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
        ("{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m(1) }}", "[1]"),
        ("{% for m in messages %}{% if loop.last %}{{ loop.previtem.role }}{% break %}{% endif %}{% endfor %}", "user"),
        ("{{ missing }}{{ none }}{{ true }}{{ 1.0 }} {{ true|string + 'ish' }}", "NoneTrue1.0 Trueish"),
        ("{{ bos_token }}{{ strftime_now('%d %b %Y') }}", "<s>02 Jan 2026"),
        ("{{ add_generation_prompt and tools is not none and messages is not mapping }}", "True"),
        ("{{ none is iterable or 1 is iterable }}{{ 'a' is iterable and 'a' is sequence }}", "FalseTrue"),
        ("{{ {} is sequence and [] is sequence and [] is not mapping and none is not sequence }}", "True"),
        ("a{%- generation -%} b {%- endgeneration %}\nc{% generation %}d{% endgeneration %}", "abcd"),
    ] {
        assert_eq!(render(source).unwrap(), expected, "{source}");
    }
}

#[test]
fn json_is_written_as_python_writes_it() {
    assert_eq!(
        render("{{ tools[0].function | tojson }} {{ messages[0].content | tojson }}").unwrap(),
        r#"{"name": "z", "parameters": {"b": 1, "a": [true, null, "é"]}} " Hi <b> ""#
    );
    assert_eq!(render("{{ 'é🏝' | tojson(ensure_ascii=true) }}").unwrap(), r#""\u00e9\ud83c\udfdd""#);
    assert_eq!(render("{{ {'b': [], 'a': 1} | tojson(indent=2) }}").unwrap(), "{\n  \"b\": [],\n  \"a\": 1\n}");
    assert_eq!(render("{{ {'b': 2, 'a': 1} | tojson(sort_keys=true) }}").unwrap(), r#"{"a": 1, "b": 2}"#);
}

#[test]
fn a_template_can_refuse_with_its_own_words() {
    let error = render("{{ raise_exception('Roles must alternate.') }}").unwrap_err();
    assert_eq!(error.code(), "template");
    assert!(error.to_string().contains("Roles must alternate."), "{error}");
}

#[test]
fn mistakes_are_typed_errors_with_their_line() {
    for source in ["a\n{% if %}", "a\n{{ none.x.y }}", "a\n{{ nothing() }}", "a\n{{ strftime_now('%Q') }}"] {
        let error = render(source).unwrap_err();
        assert_eq!(error.code(), "template");
        assert!(error.to_string().contains(":2)"), "{error}");
    }
}

#[test]
fn templates_that_do_not_end_or_grow_without_bound_are_stopped() {
    for source in [
        "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
        "{% set n = namespace(s='x') %}{% for a in range(64) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ] {
        assert_eq!(render(source).unwrap_err().code(), "template");
    }
}

#[test]
fn of_several_templates_the_one_for_tools_renders_tools() {
    let both = ChatTemplate::named([("default", "plain"), ("tool_use", "with tools")]).unwrap();
    let messages = [json!({"role": "user", "content": "Hi"})];
    let tools = [json!({"type": "function"})];
    assert_eq!(render_with(&both, &messages, None, json!({})).unwrap(), "plain");
    assert_eq!(render_with(&both, &messages, Some(&tools), json!({})).unwrap(), "with tools");
    let other = ChatTemplate::named([("rag", "x")]).unwrap();
    let error = render_with(&other, &messages, None, json!({})).unwrap_err();
    assert!(error.to_string().contains("`default`") && error.to_string().contains("rag"), "{error}");
}

#[test]
fn variables_of_the_request_do_not_replace_the_conversation() {
    let template = ChatTemplate::new("{{ messages[0].content }}{{ enable_thinking }}").unwrap();
    let messages = [json!({"role": "user", "content": "Hi"})];
    let extra = json!({"messages": [], "enable_thinking": false});
    assert_eq!(render_with(&template, &messages, None, extra).unwrap(), "HiFalse");
}
