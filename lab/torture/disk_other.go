//go:build !linux

package main

import "errors"

func bearLimits() {}

var errLinux = errors.New("this fault needs Linux")

func dieOfLimits() error { return errLinux }

func limitFiles(int, uint64) (lift func() error, err error) { return nil, errLinux }

func mountSmall(string) (unmount func() error, err error) { return nil, errLinux }
