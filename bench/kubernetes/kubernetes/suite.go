//go:build suite

// Package suite names for `go mod tidy` what is built as a test: Kubernetes' end-to-end tests.
package suite

import _ "k8s.io/kubernetes/test/e2e"
