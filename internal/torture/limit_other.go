//go:build !linux

package main

import "errors"

func bearLimits() {}

func limitFiles(int) (lift func() error, err error) { return nil, errors.ErrUnsupported }
