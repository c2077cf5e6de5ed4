//! Objects from manifest files.

mod tree;
