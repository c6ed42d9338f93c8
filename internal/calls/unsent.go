package calls

// Unsent is the error of an Acquire that failed before it sent anything that could take the key.
// The token is not in the store then, so the engine has nothing to release. After an outage, the
// releases of many callers would keep a slow store busy that has just recovered.
type Unsent struct{ Err error }

func (u *Unsent) Error() string { return u.Err.Error() }

// Unwrap returns u.Err.
func (u *Unsent) Unwrap() error { return u.Err }

// TakeUnsent returns err and false, or the error in an Unsent and true.
func TakeUnsent(err error) (inner error, unsent bool) {
	if u, ok := err.(*Unsent); ok {
		return u.Err, true
	}
	return err, false
}
