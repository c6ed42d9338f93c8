package main

import (
	"fmt"
	"testing"
)

// lab stands in for a test, which package redistest starts its servers for.
type lab struct {
	testing.TB // whose methods that are not here are not called
	cleanups   []func()
}

// labError is how a lab fails.
type labError struct{ error }

func (l *lab) Helper()                   {}
func (l *lab) Cleanup(f func())          { l.cleanups = append(l.cleanups, f) }
func (l *lab) Fatal(args ...any)         { panic(labError{fmt.Errorf("%s", fmt.Sprint(args...))}) }
func (l *lab) Fatalf(f string, a ...any) { panic(labError{fmt.Errorf(f, a...)}) }
func (l *lab) Skip(args ...any)          { l.Fatal(args...) }

// leave ends what was started.
func (l *lab) leave() {
	for len(l.cleanups) > 0 {
		last := len(l.cleanups) - 1
		f := l.cleanups[last]
		l.cleanups = l.cleanups[:last]
		f()
	}
}

// within runs f and returns what the lab failed with.
func (l *lab) within(f func() error) (err error) {
	defer func() {
		switch r := recover().(type) {
		case nil:
		case labError:
			err = r.error
		default:
			panic(r)
		}
	}()
	return f()
}
