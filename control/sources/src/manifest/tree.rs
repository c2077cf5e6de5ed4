//! A document as a tree with the line numbers of its values and keys.
//!
//! The API's types have no line numbers, and an error must name one. So a document becomes this tree, the typed object is
//! deserialized from it, and a field's path finds its line here. JSON is a subset of YAML and read the same way.

use std::collections::HashSet;
use std::{fmt, iter, mem};

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};
use serde_saphyr::{Spanned, UserMessageFormatter};

use crate::convert::{FieldPath, PathElement};

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct YamlNode {
    /// Line of the value's first character, from 1; 0 if unknown.
    line: u64,
    kind: NodeValue,
}

#[derive(Clone, Debug, PartialEq)]
enum NodeValue {
    Scalar(Value),
    Sequence(Vec<YamlNode>),
    Mapping(Vec<MappingEntry>),
}

#[derive(Clone, Debug, PartialEq)]
struct MappingEntry {
    key: String,
    /// Line of the key.
    line: u64,
    value: YamlNode,
}

/// Why a text is not YAML, and where.
#[derive(Debug)]
pub(crate) struct Malformed {
    /// Line, from 1; `None` if the parser does not report it.
    pub(crate) line: Option<u64>,
    /// The mistake, in one line.
    pub(crate) message: String,
}

/// Parses all documents of a text; skips empty ones.
pub(crate) fn parse(text: &str) -> Result<Vec<YamlNode>, Malformed> {
    let Some(starts) = json_documents(text) else { return parse_yaml(text) };
    let mut nodes = Vec::new();
    for (i, &start) in starts.iter().enumerate() {
        let end = starts.get(i + 1).copied().unwrap_or(text.len());
        // Leading empty lines keep the line numbers of the file.
        let lines_before = text[..start].matches('\n').count();
        nodes.extend(parse_yaml(&format!("{}{}", "\n".repeat(lines_before), &text[start..end]))?);
    }
    Ok(nodes)
}

/// The start offsets of several JSON objects without separators, as some tools print them; YAML would need `---`. `None`
/// for any other text.
fn json_documents(text: &str) -> Option<Vec<usize>> {
    if !text.trim_start().starts_with('{') {
        return None;
    }
    let mut stream = serde_json::Deserializer::from_str(text).into_iter::<IgnoredAny>();
    let mut starts = vec![0];
    while let Some(document) = stream.next() {
        document.ok()?;
        let end = stream.byte_offset();
        starts.extend((!text[end..].trim_start().is_empty()).then_some(end));
    }
    (starts.len() > 1).then_some(starts)
}

fn parse_yaml(text: &str) -> Result<Vec<YamlNode>, Malformed> {
    // The parser's default limits are for small files. A dump of a whole cluster is larger; nesting and alias expansion
    // stay limited: what aliases repeat in a file of a few hundred bytes would keep the reader from all others for seconds.
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_events: usize::MAX,
            max_nodes: usize::MAX,
            max_documents: usize::MAX,
            max_total_scalar_bytes: usize::MAX,
            max_recorded_anchor_events: 50_000,
        },
        // `y`, `no` and `on` are strings. Where a string is needed, as in a name or a label, nothing else can be meant; where a
        // boolean is needed, they are booleans, as in YAML 1.1.
        strict_booleans: true,
        // As kubectl reads them: `0644` is a file mode, and of a field that is there twice the last one counts.
        legacy_octal_numbers: true,
        duplicate_keys: serde_saphyr::DuplicateKeyPolicy::LastWins,
        with_snippet: false,
    };
    serde_saphyr::from_multiple_with_options::<YamlNode>(text, options).map_err(|error| {
        let line = error.location().map(|location| location.line()).filter(|&line| line > 0);
        let message = error.without_snippet().render_with_formatter(&UserMessageFormatter);
        // The line is reported separately.
        let message = message.split(" at line ").next().unwrap_or_default();
        Malformed { line, message: message.split_whitespace().collect::<Vec<_>>().join(" ") }
    })
}

impl YamlNode {
    /// Line of the value's first character, from 1; 0 where it is not known.
    pub(crate) fn line(&self) -> u64 {
        self.line
    }

    pub(crate) fn get(&self, key: &str) -> Option<&YamlNode> {
        self.entry(key).map(|entry| &entry.value)
    }

    fn entry(&self, key: &str) -> Option<&MappingEntry> {
        match &self.kind {
            NodeValue::Mapping(entries) => entries.iter().rfind(|entry| entry.key == key),
            _ => None,
        }
    }

    pub(crate) fn as_str(&self) -> Option<&str> {
        match &self.kind {
            NodeValue::Scalar(Value::String(text)) => Some(text),
            _ => None,
        }
    }

    /// The items of the sequence under a mapping's key; null counts as empty. Returns the node itself if there is no
    /// sequence.
    pub(crate) fn into_items_of(mut self, key: &str) -> Result<Vec<YamlNode>, YamlNode> {
        let NodeValue::Mapping(entries) = &mut self.kind else { return Err(self) };
        let found = entries.iter_mut().rfind(|entry| entry.key == key);
        match found.map(|entry| &mut entry.value.kind) {
            Some(NodeValue::Sequence(items)) => Ok(mem::take(items)),
            Some(NodeValue::Scalar(Value::Null)) => Ok(Vec::new()),
            _ => Err(self),
        }
    }

    /// The items of a list of objects, each of which names its kind. Returns the node itself if it is something else.
    pub(crate) fn into_objects(self) -> Result<Vec<YamlNode>, YamlNode> {
        match self.kind {
            NodeValue::Sequence(items) if items.iter().all(|item| item.get("kind").is_some()) => Ok(items),
            kind => Err(Self { kind, ..self }),
        }
    }

    /// The first field of a mapping that is there twice; with `deep` also inside of fields.
    pub(crate) fn find_repeated(&self, deep: bool) -> Option<FieldPath> {
        let below = |step: PathElement, node: &YamlNode| {
            let inside = node.find_repeated(deep).filter(|_| deep)?;
            Some(iter::once(step).chain(inside.elements().iter().cloned()).collect())
        };
        match &self.kind {
            NodeValue::Scalar(_) => None,
            NodeValue::Sequence(items) => {
                items.iter().enumerate().find_map(|(i, item)| below(PathElement::Index(i), item))
            }
            NodeValue::Mapping(entries) => {
                let mut seen = HashSet::new();
                entries.iter().find_map(|MappingEntry { key, value, .. }| match seen.insert(key) {
                    true => below(PathElement::Field(key.clone()), value),
                    false => Some(iter::once(PathElement::Field(key.clone())).collect()),
                })
            }
        }
    }

    /// Whether one of its keys or values is this text.
    pub(crate) fn mentions(&self, text: &str) -> bool {
        match &self.kind {
            NodeValue::Scalar(value) => value == text,
            NodeValue::Sequence(items) => items.iter().any(|item| item.mentions(text)),
            NodeValue::Mapping(entries) => entries.iter().any(|entry| entry.key == text || entry.value.mentions(text)),
        }
    }

    /// Whether the value of `key` is a list without items.
    pub(crate) fn is_empty_list(&self, key: &str) -> bool {
        self.get(key).is_some_and(|list| matches!(&list.kind, NodeValue::Sequence(items) if items.is_empty()))
    }

    pub(crate) fn is_mapping(&self) -> bool {
        matches!(self.kind, NodeValue::Mapping(_))
    }

    /// The line of the field at a path, or of its deepest existing parent.
    pub(crate) fn line_of(&self, path: &FieldPath) -> u64 {
        let (mut node, mut line) = (self, self.line);
        for step in path.elements() {
            let found = match (step, &node.kind) {
                (PathElement::Field(name), NodeValue::Mapping(_)) => {
                    node.entry(name).map(|entry| (&entry.value, entry.line))
                }
                (PathElement::Index(index), NodeValue::Sequence(items)) => {
                    items.get(*index).map(|item| (item, item.line))
                }
                _ => None,
            };
            match found {
                Some(found) => (node, line) = found,
                None => break,
            }
        }
        line
    }

    pub(crate) fn at(&self, path: &FieldPath) -> Option<&YamlNode> {
        path.elements().iter().try_fold(self, |node, step| match (step, &node.kind) {
            (PathElement::Field(name), NodeValue::Mapping(_)) => node.get(name),
            (PathElement::Index(index), NodeValue::Sequence(items)) => items.get(*index),
            _ => None,
        })
    }

    /// The value without line numbers.
    pub(crate) fn to_value(&self) -> Value {
        match &self.kind {
            NodeValue::Scalar(value) => value.clone(),
            NodeValue::Sequence(items) => Value::Array(items.iter().map(YamlNode::to_value).collect()),
            NodeValue::Mapping(entries) => {
                let entries = entries.iter().map(|entry| (entry.key.clone(), entry.value.to_value()));
                Value::Object(entries.collect::<Map<_, _>>())
            }
        }
    }
}

impl<'de> Deserialize<'de> for YamlNode {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let spanned = Spanned::<NodeValue>::deserialize(deserializer)?;
        Ok(Self { line: spanned.referenced.line(), kind: spanned.value })
    }
}

impl<'de> Deserialize<'de> for NodeValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NodeVisitor)
    }
}

/// Below it a double holds each integer.
const MAX_EXACT: f64 = 9_007_199_254_740_992.0;

struct NodeVisitor;

impl<'de> Visitor<'de> for NodeVisitor {
    type Value = NodeValue;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a YAML or JSON value")
    }

    fn visit_unit<E>(self) -> Result<NodeValue, E> {
        Ok(NodeValue::Scalar(Value::Null))
    }

    fn visit_none<E>(self) -> Result<NodeValue, E> {
        Ok(NodeValue::Scalar(Value::Null))
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<NodeValue, D::Error> {
        NodeValue::deserialize(deserializer)
    }

    fn visit_bool<E>(self, value: bool) -> Result<NodeValue, E> {
        Ok(NodeValue::Scalar(Value::Bool(value)))
    }

    fn visit_i64<E>(self, value: i64) -> Result<NodeValue, E> {
        Ok(NodeValue::Scalar(Value::Number(value.into())))
    }

    fn visit_u64<E>(self, value: u64) -> Result<NodeValue, E> {
        Ok(NodeValue::Scalar(Value::Number(value.into())))
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<NodeValue, E> {
        // kubectl passes `80.0` and `1e3` on as 80 and 1000.
        if value.fract() == 0.0 && value.abs() < MAX_EXACT {
            return Ok(NodeValue::Scalar(Value::Number((value as i64).into())));
        }
        let number =
            Number::from_f64(value).ok_or_else(|| E::custom(format_args!("{value} is not a finite number")))?;
        Ok(NodeValue::Scalar(Value::Number(number)))
    }

    fn visit_str<E>(self, value: &str) -> Result<NodeValue, E> {
        Ok(NodeValue::Scalar(Value::String(value.to_owned())))
    }

    fn visit_string<E>(self, value: String) -> Result<NodeValue, E> {
        Ok(NodeValue::Scalar(Value::String(value)))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<NodeValue, A::Error> {
        let mut nodes = Vec::new();
        while let Some(node) = items.next_element()? {
            nodes.push(node);
        }
        Ok(NodeValue::Sequence(nodes))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<NodeValue, A::Error> {
        let mut entries = Vec::new();
        while let Some(key) = map.next_key::<Spanned<String>>()? {
            entries.push(MappingEntry { key: key.value, line: key.referenced.line(), value: map.next_value()? });
        }
        Ok(NodeValue::Mapping(entries))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn path(steps: &[&str]) -> FieldPath {
        let step = |step: &&str| match step.parse() {
            Ok(index) => PathElement::Index(index),
            Err(_) => PathElement::Field(step.to_string()),
        };
        steps.iter().map(step).collect()
    }

    #[test]
    fn every_field_has_its_line() {
        let text = "\
# a comment
a: 1
b:
  - c: x
    d:
      - {e: 1}
      -
        e: 2
  - |
    text
";
        let trees = parse(text).unwrap();
        assert_eq!(trees[0].to_value(), json!({"a": 1, "b": [{"c": "x", "d": [{"e": 1}, {"e": 2}]}, "text\n"]}));
        for (steps, line) in [
            (&[][..], 2),
            (&["a"], 2),
            (&["b"], 3),
            (&["b", "0"], 4),
            (&["b", "0", "c"], 4),
            (&["b", "0", "d"], 5),
            (&["b", "0", "d", "0", "e"], 6),
            (&["b", "0", "d", "1", "e"], 8),
            (&["b", "0", "absent", "e"], 4),
            (&["absent"], 2),
        ] {
            assert_eq!(trees[0].line_of(&path(steps)), line, "{steps:?}");
        }
    }

    #[test]
    fn documents_are_split_and_empty_ones_skipped() {
        let text = "# only a comment\n---\na: 1\n---\n# nothing\n--- \n...\n---\nb: 2\n";
        let trees = parse(text).unwrap();
        assert_eq!(trees.iter().map(YamlNode::to_value).collect::<Vec<_>>(), [json!({"a": 1}), json!({"b": 2})]);
        assert_eq!(trees[1].line(), 9);
        assert!(parse("").unwrap().is_empty());
    }

    #[test]
    fn json_parses_with_lines_escapes_and_tabs() {
        let trees = parse("{\n\t\"a\": [1,\n\t\t{\"b\": \"x\\/y \\ud83d\\ude00\"}],\n\"c\": {}\n}").unwrap();
        assert_eq!(trees[0].to_value(), json!({"a": [1, {"b": "x/y \u{1f600}"}], "c": {}}));
        assert_eq!(trees[0].line_of(&path(&["a", "1", "b"])), 3);
        assert_eq!(trees[0].line_of(&path(&["c"])), 4);
    }

    #[test]
    fn json_documents_need_no_separator() {
        let trees = parse("{\"a\": 1}\n{\n  \"b\": 2\n}{\"c\": 3}\n").unwrap();
        assert_eq!(
            trees.iter().map(YamlNode::to_value).collect::<Vec<_>>(),
            [json!({"a": 1}), json!({"b": 2}), json!({"c": 3})]
        );
        assert_eq!(trees[1].line_of(&path(&["b"])), 3);
        assert_eq!(trees[2].line(), 4);
    }

    #[test]
    fn scalars_have_the_types_that_kubectl_gives_them() {
        let trees = parse("[y, no, ON, true, ~, null, '5', 5, 1.5, 10.0.0.0/8, 2001-01-01, !!str 5, \"\"]").unwrap();
        let types = json!(["y", "no", "ON", true, null, null, "5", 5, 1.5, "10.0.0.0/8", "2001-01-01", "5", ""]);
        assert_eq!(trees[0].to_value(), types);
        let trees = parse("[0644, 0o644, '0644', 0x1F4, 80.0, 1e3, -5, 1_000, 0]").unwrap();
        assert_eq!(trees[0].to_value(), json!([420, 420, "0644", 500, 80, 1000, -5, 1000, 0]));
    }

    #[test]
    fn anchors_and_merges_are_resolved() {
        let trees = parse("a: &x {k: v}\nb:\n  <<: *x\n  l: w\nc: *x\nd:\n  k: own\n  <<: *x\n").unwrap();
        let expected = json!({"a": {"k": "v"}, "b": {"l": "w", "k": "v"}, "c": {"k": "v"}, "d": {"k": "own"}});
        assert_eq!(trees[0].to_value(), expected);
        assert_eq!(trees[0].find_repeated(true), None);
        assert_eq!(trees[0].line_of(&path(&["c", "k"])), 5);
    }

    #[test]
    fn of_a_repeated_field_the_last_counts_and_is_found() {
        let trees = parse("a: 1\nb:\n- c: 2\n  c: 3\n").unwrap();
        assert_eq!(trees[0].to_value(), json!({"a": 1, "b": [{"c": 3}]}));
        assert_eq!(trees[0].find_repeated(true), Some(path(&["b", "0", "c"])));
        assert_eq!(trees[0].line_of(&path(&["b", "0", "c"])), 4);
        assert_eq!(trees[0].find_repeated(false), None);
        assert_eq!(parse("a: 1\na: 2\n").unwrap()[0].find_repeated(false), Some(path(&["a"])));
    }

    #[test]
    fn aliases_that_multiply_are_refused_soon() {
        let first = ["a: &n0 [x, x, x, x, x, x, x, x]".to_owned()];
        let others = (1..12).map(|n| format!("{n}: &n{n} [{}]", vec![format!("*n{}", n - 1); 8].join(", ")));
        let malformed = parse(&first.into_iter().chain(others).collect::<Vec<_>>().join("\n")).unwrap_err();
        assert!(malformed.message.contains("limits breached"), "{malformed:?}");
        assert_eq!(malformed.line, Some(6), "the line at which it is given up: {malformed:?}");
    }

    #[test]
    fn invalid_yaml_is_a_one_line_error_with_its_line() {
        let deep = format!("a: {}{}", "[".repeat(100_000), "]".repeat(100_000));
        for (text, line, says) in [
            ("a: [1\nb: 2", 2, ":"),
            ("a:\n\tb: 1", 2, "tab"),
            ("a: 1\nb: .inf\n", 2, ".inf"),
            ("a: 1\n b: 2\n", 2, ""),
            ("a: *nowhere\n", 1, "unknown"),
            (&deep, 1, "recursion"),
        ] {
            let shown = &text[..text.len().min(40)];
            let malformed = parse(text).expect_err(shown);
            assert_eq!(malformed.line, Some(line), "{shown}: {malformed:?}");
            assert!(malformed.message.contains(says), "{shown}: {malformed:?}");
            assert!(!malformed.message.contains('\n') && !malformed.message.contains("line"), "{shown}: {malformed:?}");
        }
    }
}
