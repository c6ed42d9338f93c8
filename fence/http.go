package fence

import (
	"errors"
	"net/http"
	"strconv"
)

// Header is the name of the header that carries a fence: in a request, the caller's fence, and in
// an answer 412, the largest fence that the resource has seen.
const Header = "Fence"

// Handler calls the handler next with the fence of the request in its context, for the guard of the
// resource. It answers 428 if the request has no fence, and 400 if the fence is not a number above
// zero. Pass the guard's error to [Refuse], which answers 412 if the fence is stale.
func Handler(next http.Handler) http.Handler {
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

		next.ServeHTTP(w, r.WithContext(With(r.Context(), f)))
	})
}

// Refuse writes the answer 412 with the fence that was seen, and returns true, if err is a
// [*StaleError]. Otherwise it writes nothing, and returns false.
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
		return base.RoundTrip(r) // without a fence
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

	// Without the header, seen is 0, so Compare returns nil, and the 412 is returned as an answer.
	seen, _ := strconv.ParseUint(resp.Header.Get(Header), 10, 64)
	if err := Compare(r.URL.Host+r.URL.Path, f, seen); err != nil {
		resp.Body.Close()
		return nil, err
	}
	return resp, nil
}
