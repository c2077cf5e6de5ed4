//! The settings page's table of keys and the JSON schema, which are generated from the configuration's types.
//!
//! With `UPDATE_EXPECTED=1` in the environment both are written anew instead of compared.

use std::fs;
use std::process::Command;

use serde_json::{Map, Value};

use crate::pages::root;

const SCHEMA: &str = "configs/penstock.schema.json";
const PAGE: &str = "docs/config.md";
const HEAD: &str = "| key | default | value |\n|---|---|---|\n";

/// The output of `penstock schema`.
fn schema() -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_penstock")).arg("schema").output().unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap()
}

/// The keys of `configs/penstock.toml`, in its order: those in comments, too.
fn keys() -> Vec<String> {
    let text = fs::read_to_string(root().join("configs/penstock.toml")).unwrap();
    let (mut section, mut keys) = (String::new(), Vec::new());
    for line in text.lines() {
        if let Some(name) = line.strip_prefix('[') {
            section = format!("{}.", name.trim_end_matches(']'));
        }
        let name = line.trim_start_matches(['#', ' ']).split(" = ").next().unwrap();
        let is_key = line.contains(" = ") && name.chars().all(|c| c.is_ascii_lowercase() || c == '_');
        keys.extend(is_key.then(|| format!("{section}{name}")));
    }
    keys
}

/// The schema of each key, and whether it is required.
fn properties(schema: &Value) -> Vec<(String, &Value, bool)> {
    let required =
        |of: &Value, name: &str| of["required"].as_array().is_some_and(|all| all.iter().any(|it| it == name));
    let mut found = Vec::new();
    for (name, property) in schema["properties"].as_object().unwrap() {
        match property["properties"].as_object() {
            Some(inner) => {
                let inner = inner.iter().map(|(key, value)| (format!("{name}.{key}"), value, required(property, key)));
                found.extend(inner);
            }
            None => found.push((name.clone(), property, required(schema, name))),
        }
    }
    found
}

/// The table's row of a key.
fn row(key: &str, property: &Map<String, Value>, required: bool) -> String {
    let text = property["description"].as_str().unwrap_or_else(|| panic!("{key} has no description"));
    let (text, told) = match text.split_once(" Default: ") {
        Some((before, after)) => (before, after.trim_end_matches('.').to_owned()),
        None => (text, String::new()),
    };
    let default = match property.get("default") {
        _ if required => "required".to_owned(),
        Some(value) if told.is_empty() => format!("`{value}`"),
        _ => told,
    };
    format!("| `{key}` | {default} | {}{}{} |\n", text, range(property), choices(property))
}

/// The values that a number may have, if not all.
fn range(property: &Map<String, Value>) -> String {
    let limit = |name: &str| property.get(name).and_then(Value::as_u64);
    match (limit("minimum").filter(|&least| least > 0), limit("maximum")) {
        (Some(least), Some(most)) => format!(" From {least} to {most}."),
        (Some(least), None) => format!(" At least {least}."),
        (None, Some(most)) => format!(" At most {most}."),
        (None, None) => String::new(),
    }
}

/// The values among which one chooses, and what each means.
fn choices(property: &Map<String, Value>) -> String {
    let Some(choices) = property.get("oneOf").and_then(Value::as_array) else { return String::new() };
    let choice = |choice: &Value| {
        let text = choice["description"].as_str().unwrap_or_else(|| panic!("{choice} has no description"));
        let mut chars = text.trim_end_matches('.').chars();
        let first = chars.next().map(|c| c.to_ascii_lowercase()).into_iter();
        format!("`{}`: {}", choice["const"], first.chain(chars).collect::<String>())
    };
    format!(" {}.", choices.iter().map(choice).collect::<Vec<_>>().join("; "))
}

/// The table of all keys.
fn table(schema: &str) -> String {
    let schema: Value = serde_json::from_str(schema).unwrap();
    let mut properties = properties(&schema);
    let keys = keys();
    let place = |key: &str| {
        keys.iter().position(|known| known == key).unwrap_or_else(|| panic!("configs/penstock.toml has no {key}"))
    };
    properties.sort_by_key(|(key, ..)| place(key));
    let rows = properties.iter().map(|(key, property, required)| row(key, property.as_object().unwrap(), *required));
    rows.fold(HEAD.to_owned(), |table, row| table + &row)
}

#[test]
fn the_settings_page_and_the_schema_are_of_the_types() {
    let schema = schema();
    let page = fs::read_to_string(root().join(PAGE)).unwrap();
    let start = page.find(HEAD).expect("the page has the table");
    let end = page[start..].find("\n\n").map(|length| start + length + 1).expect("text follows the table");
    let table = table(&schema);
    if std::env::var_os("UPDATE_EXPECTED").is_some() {
        fs::write(root().join(PAGE), format!("{}{table}{}", &page[..start], &page[end..])).unwrap();
        fs::write(root().join(SCHEMA), &schema).unwrap();
        return;
    }
    for (shown, generated) in page[start..end].lines().zip(table.lines()) {
        assert_eq!(shown, generated, "{PAGE}: UPDATE_EXPECTED=1 writes it anew");
    }
    assert_eq!(&page[start..end], table, "{PAGE}: UPDATE_EXPECTED=1 writes it anew");
    let kept = fs::read_to_string(root().join(SCHEMA)).unwrap_or_default();
    assert!(kept == schema, "{SCHEMA} is not what `penstock schema` prints: UPDATE_EXPECTED=1 writes it anew");
}
