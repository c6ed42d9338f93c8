package k8slease

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/caslock"
	"github.com/hasplock/hasp/caslock/internal/adapter"
)

// api sends requests for the Leases of a namespace to an API server.
type api struct {
	client    *http.Client
	url       string // of the namespace's Leases
	host      string // for errors
	namespace string
}

// request is one request to the API server.
type request struct {
	verb string // the right that the request needs
	path string // after the URL of the Leases
	body any    // nil means no body
}

// methods maps the verbs to methods of HTTP.
var methods = map[string]string{
	"get":    http.MethodGet,
	"list":   http.MethodGet,
	"create": http.MethodPost,
	"patch":  http.MethodPatch,
	"delete": http.MethodDelete,
}

// verbs are the rights that a server must grant.
const verbs = "get, list, create, patch and delete"

// answer is what the API server answers: an object, or the reason of a refusal.
type answer struct {
	lease
	Message string
	Details struct{ Causes []cause }
}

// cause names a field that the API server has refused.
type cause struct{ Field string }

// call sends a request, and returns the Lease or the LeaseList in the answer. If a get finds no
// Lease, the result is empty, and err is nil. A server that is overloaded answers 429 and has done
// nothing. So after a 429, and only then, call sends the request again, after the pause that the
// server asks for. If ctx would end during the pause, call returns the error of the 429.
func (s *api) call(ctx context.Context, q request) (lease, error) {
	for {
		a, pause, err := s.send(ctx, &q)
		isOverloaded := pause > 0
		if !isOverloaded {
			return a.lease, err
		}

		end, hasEnd := ctx.Deadline()
		if hasEnd && time.Until(end) <= pause {
			return a.lease, err // at once, because the request cannot be sent again in time
		}
		select {
		case <-ctx.Done():
			return a.lease, err
		case <-time.After(pause):
		}
	}
}

// send sends a request once. If the server is overloaded and has done nothing, pause is the
// positive time after which the request may be sent again, and err says that.
func (s *api) send(ctx context.Context, q *request) (a answer, pause time.Duration, err error) {
	if s.host == "" || s.namespace == "" {
		return a, 0, adapter.Invalid("want a server https://HOST:PORT, and a namespace")
	}
	var body io.Reader
	if q.body != nil {
		text, _ := json.Marshal(q.body) // no error, because each field can be encoded
		body = bytes.NewReader(text)
	}
	r, err := http.NewRequestWithContext(ctx, methods[q.verb], s.url+q.path, body)
	if err != nil {
		return a, 0, err
	}
	r.GetBody = nil // otherwise net/http might send the request again
	r.Header.Set("Accept", "application/json")
	r.Header.Set("Content-Type", "application/json")
	if q.verb == "patch" {
		r.Header.Set("Content-Type", "application/merge-patch+json")
	}

	resp, err := s.client.Do(r)
	if err != nil {
		return a, 0, s.noAnswer(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return a, 0, err
	}

	isJSON := json.Unmarshal(text, &a) == nil
	if resp.StatusCode == http.StatusTooManyRequests {
		// Without a number of seconds, pause for one.
		seconds, _ := strconv.Atoi(resp.Header.Get("Retry-After"))
		pause = time.Duration(max(seconds, 1)) * time.Second
		if !isJSON {
			a.Message = string(text) // of the server's flow control, which answers in plain text
		}
	} else if !isJSON {
		return a, 0, s.errorf("%s: the answer is no JSON: that is no API server, or a proxy "+
			"before it has answered: check the address, and https:// or http://", resp.Status)
	}

	return a, pause, s.refusal(q, resp.StatusCode, &a)
}

// errorf returns an error of one line that names the server.
func (s *api) errorf(format string, args ...any) error {
	return fmt.Errorf("kubernetes at %s: "+format, append([]any{s.host}, args...)...)
}

// noAnswer explains the error of a request that got no answer. The server may have carried it out.
func (s *api) noAnswer(err error) error {
	var outer *url.Error
	if errors.As(err, &outer) {
		err = outer.Err // without the long URL
	}

	hint := adapter.Hint(err, "ca=FILE, or in the kubeconfig", "kube+http://")
	return adapter.Explain("kubernetes at "+s.host+": ", err, hint)
}

// refusal returns the error that says why the server has not carried out a request, and what to do
// about it. It returns nil if the server has carried out the request, or if a get finds no Lease.
func (s *api) refusal(q *request, code int, a *answer) error {
	message := fmt.Sprintf("%d: %.300s", code, strings.Join(strings.Fields(a.Message), " "))

	switch {
	case code/100 == 2, code == http.StatusNotFound && q.verb == "get":
		return nil
	case isConflict(q, code, a):
		return caslock.ErrConflict
	}

	switch code {
	case http.StatusUnprocessableEntity, http.StatusRequestEntityTooLarge:
		return fmt.Errorf("%w: %w", backend.ErrInvalid, s.errorf("%s: use a shorter owner, "+
			"or fewer shared holds of a key", message))
	case http.StatusUnauthorized:
		return s.errorf("%s: the token or the certificate is missing, wrong or expired: "+
			"check token_file or the kubeconfig: kubectl auth whoami", message)
	case http.StatusForbidden:
		if strings.Contains(a.Message, "being terminated") {
			return s.errorf("%s: choose a namespace that is not being deleted", message)
		}
		return s.errorf("%s: the account lacks the verb %s: bind it to a Role with %s on leases of "+
			"coordination.k8s.io in the namespace %s", message, q.verb, verbs, s.namespace)
	case http.StatusNotFound:
		return s.errorf("%s: check the namespace %s: kubectl get namespace %[3]s", message, s.namespace)
	case http.StatusGone:
		return s.errorf("%s: the list took too long: list again", message)
	case http.StatusUnsupportedMediaType, http.StatusMethodNotAllowed:
		return s.errorf("%s: it does not know %s of Leases in JSON: use Kubernetes 1.14 or later",
			message, q.verb)
	case http.StatusTooManyRequests:
		return s.errorf("%s: it is overloaded: add poll=5s to the URL, or give "+
			"the account a PriorityLevelConfiguration", message)
	}

	return s.errorf("%s", message)
}

// isConflict reports whether the server has refused a write because the Lease has another version,
// or does not exist, or, for a create, exists. A Lease with the same name and the same
// resourceVersion may have another uid, which the server refuses to change.
func isConflict(q *request, code int, a *answer) bool {
	switch code {
	case http.StatusConflict: // also says that a POST found the Lease
		return true
	case http.StatusNotFound:
		return q.verb == "patch" || q.verb == "delete"
	case http.StatusUnprocessableEntity:
		return slices.Contains(a.Details.Causes, cause{"metadata.uid"})
	}
	return false
}
