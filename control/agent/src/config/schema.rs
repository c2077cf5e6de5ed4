//! The JSON schema of the configuration file, from the types that read it.

use penstock_dataplane::conntrack::Timeouts;
use schemars::generate::SchemaSettings;
use schemars::transform::RecursiveTransform;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::{Value, json};

use super::{Config, TimeSpan};

/// The schema, in the draft that editors of TOML know.
pub fn schema() -> Schema {
    let tidy: fn(&mut Schema) = tidy;
    let settings = SchemaSettings::draft07().with(|settings| settings.inline_subschemas = true);
    settings.with_transform(RecursiveTransform(tidy)).into_generator().into_root_schema_for::<Config>()
}

/// Removes what TOML does not have (null), integer formats of Rust, and line breaks of the source.
fn tidy(schema: &mut Schema) {
    if let Some(Value::Array(types)) = schema.get_mut("type") {
        types.retain(|name| name != "null");
        if let [one] = types.as_slice() {
            *schema.ensure_object().get_mut("type").expect("it was found") = one.clone();
        }
    }
    if schema.get("default") == Some(&Value::Null) {
        schema.remove("default");
    }
    if matches!(schema.get("format"), Some(Value::String(format)) if format.starts_with("uint")) {
        schema.remove("format");
    }
    if let Some(Value::String(text)) = schema.get_mut("description") {
        *text = text.replace('\n', " ");
    }
}

/// Exactly one of the keys that name a source.
pub(super) fn exactly_one_source(schema: &mut Schema) {
    let choices = json!([
        { "required": ["manifests"] },
        { "required": ["kubeconfig"] },
        { "required": ["in_cluster"], "properties": { "in_cluster": { "const": true } } },
    ]);
    schema.insert("oneOf".to_owned(), choices);
}

/// A key for each timeout, with its default.
pub(super) fn timeouts(generator: &mut SchemaGenerator) -> Schema {
    let properties = Timeouts::default().iter().map(|(name, time)| {
        let mut schema = TimeSpan::json_schema(generator);
        schema.insert("default".to_owned(), json!(TimeSpan::from(time).to_string()));
        (name.to_owned(), schema.to_value())
    });
    let properties: serde_json::Map<String, Value> = properties.collect();
    json_schema!({ "type": "object", "properties": properties, "additionalProperties": false })
}
