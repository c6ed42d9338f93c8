package redistest

import (
	"fmt"
	"testing"
)

// Lab takes the place of a test, for programs that start servers.
type Lab struct {
	testing.TB // nil: this package calls only the methods below
	cleanups   []func()
}

// labError is the value that Fatal of a Lab panics with.
type labError struct{ error }

func (l *Lab) Helper()                   {}
func (l *Lab) Cleanup(f func())          { l.cleanups = append(l.cleanups, f) }
func (l *Lab) Fatal(args ...any)         { panic(labError{fmt.Errorf("%s", fmt.Sprint(args...))}) }
func (l *Lab) Fatalf(f string, a ...any) { panic(labError{fmt.Errorf(f, a...)}) }
func (l *Lab) Skip(args ...any)          { l.Fatal(args...) }

// Close runs the functions that Cleanup was given, the last one first. It ends
// all servers.
func (l *Lab) Close() {
	for len(l.cleanups) > 0 {
		last := len(l.cleanups) - 1
		f := l.cleanups[last]
		l.cleanups = l.cleanups[:last]
		f()
	}
}

// Do runs f. If f, or this package on its behalf, calls Fatal or Skip, Do
// returns the error that it was given.
func (l *Lab) Do(f func() error) (err error) {
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
