//go:build tools

// Package tools names what this module pins: the types of LeaderWorkerSet.
package tools

import (
	_ "sigs.k8s.io/lws/api/leaderworkerset/v1"
)
