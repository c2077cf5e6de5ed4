//! Values as YAML with comments.
//!
//! Written here because a serializer has no place for a comment above an entry, and the evidence of a rule is in comments.
//! Reading what is written gives the same value: block style, and every string that YAML could take for something else in
//! double quotes, as JSON writes it (YAML 1.2 section 1.3: JSON is YAML).

use std::collections::BTreeMap;

use serde_json::Value;

/// Comments by the JSON pointer (RFC 6901, without escapes: no key that has a comment contains `/` or `~`) of the entry
/// above which they stand.
pub(super) type Comments = BTreeMap<String, Vec<String>>;

/// The order in which Kubernetes' documentation writes the fields of an object; others follow by their name.
const ORDER: [&str; 18] = [
    "apiVersion",
    "kind",
    "metadata",
    "spec",
    "namespace",
    "name",
    "namespaceSelector",
    "podSelector",
    "policyTypes",
    "ingress",
    "egress",
    "from",
    "to",
    "cidr",
    "key",
    "operator",
    "protocol",
    "port",
];
/// Fields that hold keys of users, which are in the order of their names.
const OF_USERS: [&str; 3] = ["matchLabels", "labels", "annotations"];

/// A document, with its separator before it.
pub(super) fn document(value: &Value, comments: &Comments) -> String {
    let mut writer = Writer { text: "---\n".to_owned(), comments };
    writer.comments("", 0);
    writer.value(value, "", 0, false);
    writer.text
}

struct Writer<'a> {
    text: String,
    comments: &'a Comments,
}

impl Writer<'_> {
    /// A value at this depth. `is_open` says that a line has been begun, behind `- ` or `key:`.
    fn value(&mut self, value: &Value, at: &str, depth: usize, is_open: bool) {
        match value {
            Value::Object(fields) if !fields.is_empty() => {
                let mut fields: Vec<(&String, &Value)> = fields.iter().collect();
                let is_of_users = at.rsplit('/').next().is_some_and(|field| OF_USERS.contains(&field));
                fields.sort_by_key(|(key, _)| (if is_of_users { 0 } else { rank(key) }, *key));
                for (place, (key, value)) in fields.into_iter().enumerate() {
                    let at = format!("{at}/{key}");
                    // The first entry of an item stands behind its dash; the item has its comments.
                    if place > 0 || !is_open {
                        self.comments(&at, depth);
                        self.indent(depth);
                    }
                    self.text += &format!("{}:", scalar(key));
                    self.field(value, &at, depth);
                }
            }
            Value::Array(items) if !items.is_empty() => {
                for (index, item) in items.iter().enumerate() {
                    let at = format!("{at}/{index}");
                    if index > 0 || !is_open {
                        self.comments(&at, depth);
                        self.indent(depth);
                    }
                    self.text += "- ";
                    self.value(item, &at, depth + 1, true);
                }
            }
            other => self.text += &format!("{}\n", single(other)),
        }
    }

    /// The text behind `key:`.
    fn field(&mut self, value: &Value, at: &str, depth: usize) {
        let is_block = match value {
            Value::Object(fields) => !fields.is_empty(),
            Value::Array(items) => !items.is_empty(),
            _ => false,
        };
        self.text += if is_block { "\n" } else { " " };
        self.value(value, at, depth + 1, false);
    }

    fn comments(&mut self, at: &str, depth: usize) {
        for line in self.comments.get(at).into_iter().flatten() {
            self.indent(depth);
            let line: String = line.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
            self.text += &format!("# {line}\n");
        }
    }

    fn indent(&mut self, depth: usize) {
        self.text.extend(std::iter::repeat_n("  ", depth));
    }
}

fn rank(key: &str) -> usize {
    ORDER.iter().position(|known| *known == key).unwrap_or(ORDER.len())
}

/// A value that fits one line: a scalar, `{}` or `[]`.
fn single(value: &Value) -> String {
    match value {
        Value::String(text) => scalar(text),
        other => other.to_string(),
    }
}

/// A string, quoted unless no version of YAML takes it for something else.
fn scalar(text: &str) -> String {
    const WORDS: [&str; 9] = ["true", "false", "null", "yes", "no", "on", "off", "y", "n"];
    let is_word = |c: char| c.is_ascii_alphanumeric() || "_./-".contains(c);
    let starts = |is: fn(&char) -> bool| text.chars().next().as_ref().is_some_and(is);
    let is_plain = text.chars().all(is_word)
        // A block of addresses begins with a digit, and is no number or date.
        && (starts(char::is_ascii_alphabetic) || starts(char::is_ascii_digit) && text.contains('/'))
        && !WORDS.contains(&text.to_ascii_lowercase().as_str());
    if is_plain { text.to_owned() } else { quoted(text) }
}

/// As JSON writes it, and escaped what is no printable character of YAML (1.2 section 5.1) but may stand in JSON.
fn quoted(text: &str) -> String {
    let is_unprintable = |c: char| c.is_control() || matches!(c, '\u{feff}' | '\u{fffe}' | '\u{ffff}');
    let json = Value::from(text).to_string();
    let escaped = |c: char| if is_unprintable(c) { format!("\\u{:04x}", u32::from(c)) } else { c.to_string() };
    json.chars().map(escaped).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use penstock_sources::convert::FieldPath;
    use penstock_sources::manifest::{Options, read_text};
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_written_is_read_as_the_same_value() {
        let strings = [
            "",
            "a",
            "true",
            "No",
            "null",
            "~",
            "1",
            "1.5",
            "1e3",
            "0x1f",
            "2026-01-01",
            "12:30:45",
            "-",
            "- a",
            "#",
            "a #b",
            "a: b",
            "\"",
            "'",
            "\\",
            "é",
            "10.0.0.0/8",
            "fd00::/8",
            ".inf",
            "=",
            "<<",
            "a,b",
            "[a]",
            "{a}",
            "*a",
            "&a",
            "!a",
            "|",
            ">",
            "%",
            "@",
            "`",
            " a ",
            "a\tb",
            "a\u{7f}b",
            "\u{85}",
            "\u{9f}",
            "\u{feff}",
            "\u{2028}",
        ];
        let labels: serde_json::Map<String, Value> =
            strings.iter().enumerate().map(|(number, text)| (format!("k{number}"), Value::from(*text))).collect();
        let value = json!({
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": { "name": "a", "annotations": labels, "finalizers": strings.to_vec() },
            "spec": { "nested": [[], {}, [[1, "2"]], null, true],
                "true": { "1.5": [{ "b": 1, "a": [{ "c": {} }] }, { "from": [], "to": { "x": 1 } }] } },
        });
        let comments = Comments::from([
            (String::new(), vec!["an object".to_owned()]),
            ("/metadata/name".to_owned(), vec!["its name".to_owned(), "two\nlines".to_owned()]),
            ("/metadata/finalizers/1".to_owned(), vec!["an item".to_owned()]),
        ]);
        let text = document(&value, &comments);
        let read =
            read_text(Path::new("written"), &text, &Options::default()).unwrap_or_else(|e| panic!("{e}\n{text}"));
        assert_eq!(read.documents[0].value(&FieldPath::default()), Some(value), "{text}");
        assert!(text.starts_with("---\n# an object\napiVersion: v1\n"), "{text}");
        assert!(text.contains("  # its name\n  # two lines\n  name: a\n"), "{text}");
        assert!(text.contains("\n    # an item\n    - a\n"), "{text}");
    }
}
