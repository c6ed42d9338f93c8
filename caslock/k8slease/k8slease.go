// Package k8slease lets caslock keep locks in the Lease objects of a Kubernetes namespace.
//
// A key that is a valid name of a Lease is kept in the Lease of that name, and excludes the leader
// election of client-go on that Lease. So a program can move from client-go to hasp, or back, while
// it runs. The Lease of any other key is named hasp- and a hash. A Lease that hasp has written is
// deleted when its key has been free for an hour.
//
// The spec has the form that client-go reads, and an annotation has the record of caslock. The
// store has no clock: see package caslock for TryLock. Waiters poll; for many, set
// hasp.Options.Backoff to seconds. The account needs get, list, create, patch and delete on leases
// of coordination.k8s.io.
package k8slease

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/caslock"
)

// Store is the Leases of a namespace. It is safe for concurrent use.
type Store struct {
	client *http.Client
	url    string // of the namespace's Leases
}

// New returns a store in a namespace of the API server at the URL server, such as https://10.0.0.1.
// The argument client adds the credentials: rest.HTTPClientFor of client-go creates such a client.
func New(client *http.Client, server, namespace string) *Store {
	group := strings.TrimSuffix(server, "/") + "/apis/coordination.k8s.io/v1"
	return &Store{
		client: client,
		url:    group + "/namespaces/" + url.PathEscape(namespace) + "/leases",
	}
}

// Limits says that calls end promptly.
func (s *Store) Limits() (backend.Reach, backend.Cancellation) {
	return backend.Network, backend.CancelPrompt
}

const (
	// recordName names an annotation, which has the value that the driver has written. It also
	// names a label, which is "true".
	recordName = "hasplock.github.io/record"

	// specName names an annotation, which has the id of the record's spec. See the method entry.
	specName = "hasplock.github.io/wrote"
)

// lease is what a Store reads of a Lease or a LeaseList.
type lease struct {
	Metadata struct {
		ResourceVersion, Continue string
		Annotations               map[string]string
	}
	Spec struct {
		HolderIdentity, RenewTime string
		LeaseDurationSeconds      int
	}
	Items []lease
}

var plain = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)

// name returns the name of the Lease of key. A key that begins with hasp- is hashed too.
func name(key string) string {
	if len(key) <= 253 && plain.MatchString(key) && !strings.HasPrefix(key, "hasp-") {
		return key
	}
	return fmt.Sprintf("hasp-%x", sha256.Sum256([]byte(key)))
}

// request is one request to the API server.
type request struct {
	method string
	path   string // after the URL of the Leases
	format string // of the body: application/ and this
	body   any    // nil means no body
}

// call sends a request once. If a get finds no Lease, l is empty.
func (s *Store) call(ctx context.Context, q request) (l lease, err error) {
	var body []byte
	if q.body != nil {
		body, _ = json.Marshal(q.body) // no error, because each field can be encoded
	}
	r, err := http.NewRequestWithContext(ctx, q.method, s.url+q.path, bytes.NewReader(body))
	if err != nil {
		return l, err
	}
	r.GetBody = nil // otherwise net/http might send the request again
	r.Header.Set("Content-Type", "application/"+q.format)

	resp, err := s.client.Do(r)
	if err != nil {
		return l, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return l, err
	}

	missing := resp.StatusCode == http.StatusNotFound
	switch {
	case missing && q.method == http.MethodGet:
		return l, nil
	case missing && q.method != http.MethodPost:
		return l, caslock.ErrConflict
	case resp.StatusCode == http.StatusConflict: // also says that a POST found the Lease
		return l, caslock.ErrConflict
	case resp.StatusCode/100 != 2:
		return l, fmt.Errorf("k8slease: %s %s: %s: %.300s", q.method, q.path, resp.Status, text)
	}
	err = json.Unmarshal(text, &l)
	return l, err
}

// entry returns the entry of a Lease. A spec that was not written together with the record is
// another program's: client-go changes the spec and keeps annotations.
func (l *lease) entry(key string) caslock.Entry {
	e := caslock.Entry{
		Value:   []byte(l.Metadata.Annotations[recordName]),
		Version: l.Metadata.ResourceVersion,
	}
	holder := l.Spec.HolderIdentity
	if id := l.Spec.RenewTime + " " + holder; id != l.Metadata.Annotations[specName] {
		ttl := time.Duration(l.Spec.LeaseDurationSeconds) * time.Second
		e.Value = caslock.Foreign(key, e.Value, id, holder, ttl)
	}
	return e
}

// Get reads the Lease of key from the API server's quorum.
func (s *Store) Get(ctx context.Context, key string) (caslock.Entry, error) {
	l, err := s.call(ctx, request{method: http.MethodGet, path: "/" + name(key), format: "json"})
	return l.entry(key), err
}

// Put keeps what others have written into a Lease, also the spec of a leader. In client-go, a term
// begins with the first sight of a spec, so no two specs may look alike. But client-go cuts
// renewTime to whole seconds. So leaseTransitions has the microseconds.
func (s *Store) Put(ctx context.Context, key string, value []byte, version string) (string, error) {
	annotations := map[string]string{recordName: string(value)}
	body := map[string]any{
		"apiVersion": "coordination.k8s.io/v1",
		"kind":       "Lease",
		"metadata": map[string]any{
			"name":            name(key),
			"resourceVersion": version,
			"labels":          map[string]string{recordName: "true"},
			"annotations":     annotations,
		},
	}

	if owner, ttl, ours := caslock.Holder(value); ours {
		now := time.Now().UTC()
		renewTime := now.Format("2006-01-02T15:04:05.000000Z")
		spec := map[string]any{
			"holderIdentity":       nil,
			"renewTime":            renewTime,
			"leaseTransitions":     now.Nanosecond() / 1000,
			"leaseDurationSeconds": min(ttl/time.Second+1, math.MaxInt32),
		}
		holder := ""
		if ttl > 0 {
			// This is never the identity of a client-go program.
			holder = "hasp/" + strings.ToValidUTF8(owner, "?")
			spec["holderIdentity"] = holder
		}
		body["spec"] = spec
		annotations[specName] = renewTime + " " + holder
	}

	q := request{http.MethodPatch, "/" + name(key), "merge-patch+json", body}
	if version == "" {
		q = request{http.MethodPost, "", "json", body}
	}
	l, err := s.call(ctx, q)
	return l.Metadata.ResourceVersion, err
}

// Delete deletes the Lease of key if it has this version.
func (s *Store) Delete(ctx context.Context, key, version string) error {
	preconditions := map[string]string{"resourceVersion": version}
	_, err := s.call(ctx, request{
		method: http.MethodDelete,
		path:   "/" + name(key),
		format: "json",
		body:   map[string]any{"preconditions": preconditions},
	})
	return err
}

// Scan lists the Leases that the driver has written, whatever their names.
func (s *Store) Scan(ctx context.Context, position string, n int) (es []caslock.Entry, next string, err error) {
	query := url.Values{
		"labelSelector": {recordName + "=true"},
		"limit":         {fmt.Sprint(n)},
		"continue":      {position},
	}
	q := request{method: http.MethodGet, path: "?" + query.Encode(), format: "json"}
	list, err := s.call(ctx, q)
	for _, l := range list.Items {
		es = append(es, l.entry("")) // without holds of other programs, whose keys are not known
	}
	return es, list.Metadata.Continue, err
}
