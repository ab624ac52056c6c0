//go:build tools

// Package tools names the programs that this module pins.
package tools

import (
	_ "github.com/prometheus/prometheus/cmd/prometheus"
)
