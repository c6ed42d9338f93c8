package fence

import (
	"context"
	"errors"
	"net/http"
	"strconv"
)

// Header is the header with the fence of a request. In an answer 412, it has the largest fence that
// the resource has seen.
const Header = "Fence"

// Handler serves requests that have a fence. It passes them to next under gate, so that next serves
// a resource's requests one at a time, and only those whose fence is not stale. The context of the
// request has the fence, for a guard in next.
//
// A request without a fence gets the status 428, one whose fence is no number above zero 400, and a
// stale one 412, as [Refuse] writes it. If gate fails, the status is 503.
//
// A gate in memory forgets the fences when the service ends. So a service that keeps the resource
// in a database passes a nil gate: then Handler only puts the fence into the context, and next
// passes the error of its own guard to Refuse.
func Handler(gate Gate, resource func(*http.Request) string, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		values := r.Header.Values(Header)
		if len(values) == 0 {
			http.Error(w, "the header "+Header+" is missing", http.StatusPreconditionRequired)
			return
		}
		f, err := strconv.ParseUint(values[0], 10, 64)
		if err != nil || f == 0 || len(values) > 1 {
			http.Error(w, "the header "+Header+" is not one number above zero", http.StatusBadRequest)
			return
		}

		ctx := With(r.Context(), f)
		if gate == nil {
			next.ServeHTTP(w, r.WithContext(ctx))
			return
		}
		served := false
		err = gate(ctx, resource(r), func(ctx context.Context) error {
			served = true
			next.ServeHTTP(w, r.WithContext(ctx))
			return nil
		})
		if !served && !Refuse(w, err) {
			http.Error(w, "the fence cannot be checked", http.StatusServiceUnavailable)
		}
	})
}

// If err is a [*StaleError], Refuse writes the answer 412 with the fence that was seen, and returns
// true. Otherwise it writes nothing.
func Refuse(w http.ResponseWriter, err error) bool {
	var stale *StaleError
	if !errors.As(err, &stale) {
		return false
	}
	w.Header().Set(Header, strconv.FormatUint(stale.Seen, 10))
	http.Error(w, stale.Error(), http.StatusPreconditionFailed)
	return true
}

// Transport is an http.RoundTripper that sends the fence of the request's context. If the context
// has no fence ([ErrNone]), it sends the request as it is. If the service refuses the fence with
// 412, RoundTrip returns a [*StaleError], so that a caller that does not look at the status stops
// as well. A 412 without the header is returned as an answer, because it has another reason.
type Transport struct {
	Base http.RoundTripper // http.DefaultTransport if nil
}

// RoundTrip implements http.RoundTripper.
func (t Transport) RoundTrip(r *http.Request) (*http.Response, error) {
	base := t.Base
	if base == nil {
		base = http.DefaultTransport
	}
	f, err := Of(r.Context())
	switch {
	case errors.Is(err, ErrNone):
		return base.RoundTrip(r)
	case err != nil:
		if r.Body != nil {
			r.Body.Close() // a RoundTripper must close it
		}
		return nil, err
	}

	r = r.Clone(r.Context()) // a RoundTripper must not change the request
	r.Header.Set(Header, strconv.FormatUint(f, 10))
	resp, err := base.RoundTrip(r)
	if err != nil || resp.StatusCode != http.StatusPreconditionFailed {
		return resp, err
	}
	seen, _ := strconv.ParseUint(resp.Header.Get(Header), 10, 64) // 0 if there is none
	if err := Compare(r.URL.Host+r.URL.Path, f, seen); err != nil {
		resp.Body.Close()
		return nil, err
	}
	return resp, nil
}
