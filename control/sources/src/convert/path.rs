//! Paths of fields inside an object.

use std::fmt;

/// The location of a field in its object, such as `spec.ingress[0].from[1].ipBlock.cidr`.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct FieldPath(Vec<PathElement>);

#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum PathElement {
    /// To a field, or to the value of a map's key.
    Field(String),
    /// To an item of a list, from 0.
    Index(usize),
}

impl FieldPath {
    pub fn elements(&self) -> &[PathElement] {
        &self.0
    }

    /// The path of this field when its object is a field of another.
    pub(crate) fn inside(self, name: &str) -> Self {
        std::iter::once(PathElement::Field(name.to_owned())).chain(self.0).collect()
    }

    /// The path relative to the field of this name; unchanged if it starts elsewhere.
    pub(crate) fn without(mut self, name: &str) -> Self {
        if matches!(self.0.first(), Some(PathElement::Field(first)) if first == name) {
            self.0.remove(0);
        }
        self
    }

    /// Whether it is the object itself.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromIterator<PathElement> for FieldPath {
    fn from_iter<I: IntoIterator<Item = PathElement>>(steps: I) -> Self {
        Self(steps.into_iter().collect())
    }
}

impl fmt::Display for FieldPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, step) in self.0.iter().enumerate() {
            match step {
                PathElement::Index(index) => write!(f, "[{index}]")?,
                // A label's key contains dots and slashes: put it in brackets, as the API's messages do.
                PathElement::Field(name) if name.contains(['.', '/']) => write!(f, "[{name}]")?,
                PathElement::Field(name) => write!(f, "{}{name}", if i == 0 { "" } else { "." })?,
            }
        }
        Ok(())
    }
}

/// A field path under construction: lives on the stack, and is allocated only for an error.
#[derive(Clone, Copy, Debug)]
pub struct FieldPathRef<'a> {
    parent: Option<&'a FieldPathRef<'a>>,
    step: ElementRef<'a>,
}

#[derive(Clone, Copy, Debug)]
enum ElementRef<'a> {
    Object,
    Field(&'a str),
    Index(usize),
}

impl<'a> FieldPathRef<'a> {
    pub const OBJECT: FieldPathRef<'static> = FieldPathRef { parent: None, step: ElementRef::Object };

    /// A field, or the value of a map's key.
    pub fn field(&'a self, name: &'a str) -> FieldPathRef<'a> {
        FieldPathRef { parent: Some(self), step: ElementRef::Field(name) }
    }

    pub fn index(&'a self, index: usize) -> FieldPathRef<'a> {
        FieldPathRef { parent: Some(self), step: ElementRef::Index(index) }
    }

    pub fn path(&self) -> FieldPath {
        let mut path = self.parent.map(FieldPathRef::path).unwrap_or_default();
        match self.step {
            ElementRef::Object => {}
            ElementRef::Field(name) => path.0.push(PathElement::Field(name.to_owned())),
            ElementRef::Index(index) => path.0.push(PathElement::Index(index)),
        }
        path
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_path_displays_as_in_api_messages() {
        let at = FieldPathRef::OBJECT;
        assert_eq!(at.path().to_string(), "");
        let spec = at.field("spec");
        let ingress = spec.field("ingress");
        let rule = ingress.index(0);
        assert_eq!(rule.field("ports").path().to_string(), "spec.ingress[0].ports");
        let labels = at.field("labels");
        assert_eq!(labels.field("app.kubernetes.io/name").path().to_string(), "labels[app.kubernetes.io/name]");
    }
}
