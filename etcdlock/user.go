package etcdlock

import (
	"context"
	"sync"
	"sync/atomic"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// user is the user of a member's calls. It fetches the auth token that gRPC adds to each call.
//
// The etcd client would do that as well, but within the deadline of the call that was refused, and
// separately for each such call and each stream. etcd takes a tenth of a second of processor time
// to check a password. So with many callers, or on a busy server, no call would get a token in
// time.
type user struct {
	name, password string

	token atomic.Pointer[string] // nil before the first check; empty if etcd has no authentication

	mu    sync.Mutex // guards the field check
	check *check     // the password check that is under way, or nil
}

// check is a password check, which several callers may wait for.
type check struct {
	done chan struct{} // closed when the check has ended; then err is set
	err  error
}

// refuses reports whether err says that etcd does not accept the token of a call, or its absence.
func (u *user) refuses(err error) bool {
	return u.name != "" &&
		is(err, rpctypes.ErrInvalidAuthToken, rpctypes.ErrAuthOldRevision, rpctypes.ErrUserEmpty)
}

// signIn waits until another token has replaced the token old, and returns nil then. For that, it
// starts a check of the password, unless one is under way. The check serves all callers, so it goes
// on if the ctx of one of them ends. If the check fails, signIn returns the check's error.
func (u *user) signIn(ctx context.Context, m *member, old *string) error {
	u.mu.Lock()
	if u.token.Load() != old {
		u.mu.Unlock()
		return nil // another caller's check has replaced it already
	}
	if u.check == nil {
		c := &check{done: make(chan struct{})}
		u.check = c
		m.cluster.spawn(func() { u.run(m.client, c) })
	}

	c := u.check
	u.mu.Unlock()

	select {
	case <-c.done:
		return c.err
	case <-ctx.Done():
		return ctx.Err()
	case <-m.client.Ctx().Done():
		return m.client.Ctx().Err()
	}
}

// run asks etcd for a token, stores it, and ends the check c. If etcd has authentication switched
// off, the token is empty, and the check succeeds.
func (u *user) run(client *clientv3.Client, c *check) {
	ctx, cancel := context.WithTimeout(client.Ctx(), signInTime)
	defer cancel()
	var token string
	r, err := client.Authenticate(ctx, u.name, u.password)
	switch {
	case err == nil:
		token = r.Token
	case is(err, rpctypes.ErrAuthNotEnabled):
		err = nil
	}

	u.mu.Lock()
	defer u.mu.Unlock()
	if err == nil {
		u.token.Store(&token)
	}
	c.err = err
	u.check = nil
	close(c.done)
}

// GetRequestMetadata returns the header of each call. It makes u a credentials.PerRPCCredentials.
func (u *user) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	token := u.token.Load()
	if token == nil || *token == "" {
		return nil, nil
	}
	return map[string]string{rpctypes.TokenFieldNameGRPC: *token}, nil
}

// RequireTransportSecurity lets users send their tokens without TLS, as the etcd client does.
func (u *user) RequireTransportSecurity() bool { return false }
