package etcdlock

import (
	"context"
	"errors"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/credentials"
)

// tokenTime is for one request for a token. etcd makes passwords slow to check.
const tokenTime = 10 * time.Second

// auth adds the token of a user to each call. The etcd client can do that as well, but
// against etcd 3.4 its renewal of a token that has expired fails: it sends that token.
type auth struct {
	user, password string

	mu    sync.Mutex // guards all below
	token string
	busy  chan struct{} // closed when the request for a token ends; nil if there is none
	err   error         // of that request
	ended time.Time     // when that request ended
	rest  time.Duration // from ended on, before the next request
}

// GetRequestMetadata implements credentials.PerRPCCredentials.
func (a *auth) GetRequestMetadata(ctx context.Context, _ ...string) (map[string]string, error) {
	token := a.current()
	if info, _ := credentials.RequestInfoFromContext(ctx); token == "" || info.Method == pb.Auth_Authenticate_FullMethodName {
		return nil, nil
	}
	return map[string]string{rpctypes.TokenFieldNameGRPC: token}, nil
}

// RequireTransportSecurity implements credentials.PerRPCCredentials.
func (a *auth) RequireTransportSecurity() bool { return false }

func (a *auth) current() string {
	if a == nil {
		return ""
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.token
}

// isStale reports whether etcd has refused a call because of its token. The call has
// changed nothing.
func isStale(err error) bool {
	known := rpctypes.Error(err)
	return errors.Is(known, rpctypes.ErrInvalidAuthToken) || errors.Is(known, rpctypes.ErrAuthOldRevision) || errors.Is(known, rpctypes.ErrUserEmpty)
}

// renew gets a token that is not old. Only one request is under way at a time, for all its
// callers. So it does not end with one of them.
func (a *auth) renew(ctx context.Context, m *member, old string) error {
	a.mu.Lock()
	if a.token != old {
		a.mu.Unlock()
		return nil
	}
	busy := a.busy
	if busy == nil && time.Since(a.ended) < a.rest {
		defer a.mu.Unlock()
		return a.err
	}
	if busy == nil {
		busy = make(chan struct{})
		if !m.c.spawn(func() { a.request(m, busy) }) {
			a.mu.Unlock()
			return errClosed
		}
		a.busy = busy
	}
	a.mu.Unlock()

	select {
	case <-busy:
	case <-ctx.Done():
		return ctx.Err()
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.err
}

// request asks for a token, and closes busy.
func (a *auth) request(m *member, busy chan struct{}) {
	ctx, cancel := context.WithTimeout(m.ctx, tokenTime)
	defer cancel()
	m.asked()
	r, err := pb.NewAuthClient(m.conn).Authenticate(ctx, &pb.AuthenticateRequest{Name: a.user, Password: a.password})
	m.done(isAnswer(err))

	a.mu.Lock()
	defer a.mu.Unlock()
	a.busy, a.err, a.ended, a.rest = nil, err, time.Now(), longer(a.rest)
	if err == nil {
		a.token, a.rest = r.Token, 0
	}
	close(busy)
}
