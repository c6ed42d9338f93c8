//go:build !race

package hasp_test

const raceEnabled = false
