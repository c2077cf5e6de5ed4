//! Policy tables as the packet path reads them: identities, rule bits and one lookup a side.

/// Identities, tables and endpoints of one snapshot.
#[derive(Clone, Debug, Default)]
pub struct PolicySet {}
