//go:build suite

// Package suite names for `go mod tidy` what the conformance suite of ClusterNetworkPolicy, which is built as a test, imports.
package suite

import (
	_ "sigs.k8s.io/controller-runtime/pkg/client/config"
	_ "sigs.k8s.io/network-policy-api/conformance"
	_ "sigs.k8s.io/network-policy-api/conformance/tests"
)
