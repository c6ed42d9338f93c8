// Package k8slease lets caslock keep locks in the Lease objects of a Kubernetes namespace.
//
//	import _ "github.com/hasplock/hasp/caslock/k8slease"
//
//	c, err := hasp.Open(ctx, "kube:///namespace", nil)
//
// A URL without a host uses the current context of the files in KUBECONFIG, or of ~/.kube/config,
// or else the service account of the pod. The parameter context names another context. The URL
// kube://host:port/namespace names an API server. Its parameters are the files token_file, ca, cert
// and key, and server_name, which is the name in the server's certificate. A token's file is read
// again within a minute, and after the server has refused the token. The URL
// kube+http://host:port/namespace is for a server without TLS, such as kubectl proxy.
//
// A key that is a valid name of a Lease is kept in the Lease of that name, and excludes the leader
// election of client-go on that Lease. So a program can move from client-go to hasp, or back, while
// it runs. client-go before 0.27 counts its own LeaseDuration, whatever the Lease says. So its
// LeaseDuration must be at least hasp's TTL. The Lease of any other key is named hasp- and a hash.
// A sweep deletes the Lease of a free key: see package caslock.
//
// The spec has the form that client-go reads, and an annotation has the record of caslock. A hold
// whose Lease was deleted, or which the server lost with its data, is lost. The store has no clock:
// see package caslock for TryLock. Waiters poll: some 15 times a second, or about once with the
// parameter poll=1s. The account needs get, list, create, patch and delete on leases of
// coordination.k8s.io.
package k8slease

import (
	"cmp"
	"context"
	"crypto/sha256"
	"fmt"
	"maps"
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
type Store struct{ api api }

// New returns a store in a namespace of the API server at the URL server, such as https://10.0.0.1.
// The argument client adds the credentials: rest.HTTPClientFor of client-go creates such a client. If
// it is nil, New uses http.DefaultClient. If server or namespace is malformed, each call fails with
// backend.ErrInvalid.
func New(client *http.Client, server, namespace string) *Store {
	group := strings.TrimSuffix(server, "/") + "/apis/coordination.k8s.io/v1"
	s := api{
		client:    cmp.Or(client, http.DefaultClient),
		url:       group + "/namespaces/" + url.PathEscape(namespace) + "/leases",
		namespace: namespace,
	}

	if u, err := url.Parse(server); err == nil && u.Host != "" {
		s.host = u.Host // without a password
	}
	return &Store{s}
}

// Limits says that calls end promptly.
func (s *Store) Limits() (backend.Reach, backend.Cancellation) {
	return backend.Network, backend.CancelPrompt
}

const (
	// recordName names an annotation, which has the value that the driver has written. It also
	// names a label, which is "true".
	recordName = "hasplock.github.io/record"

	// specName names an annotation, which has the specID of the spec that was written together with
	// the record. See the method entry.
	specName = "hasplock.github.io/wrote"
)

// lease is what a Store reads of a Lease or a LeaseList.
type lease struct {
	Metadata struct {
		UID, ResourceVersion, Continue string
		Annotations                    map[string]string
	}
	Spec struct {
		HolderIdentity, RenewTime string
		LeaseDurationSeconds      int
	}
	Items []lease
}

// subdomain matches the names that Kubernetes allows for a Lease, if they have up to maxName bytes.
var subdomain = regexp.MustCompile(
	`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)

const maxName = 253

// name returns the name of the Lease of key. That is the key itself, if Kubernetes allows the name,
// so that the lock excludes the leader election of client-go on that Lease. Otherwise it is hasp-
// and a hash. A key that begins with hasp- is hashed as well, because it could look like the name
// of another key.
func name(key string) string {
	isName := len(key) <= maxName && subdomain.MatchString(key)
	if isName && !strings.HasPrefix(key, "hasp-") {
		return key
	}
	return fmt.Sprintf("hasp-%x", sha256.Sum256([]byte(key)))
}

// version returns the uid and the resourceVersion of a Lease, or "" if there is no Lease. The
// resourceVersion comes from a counter of etcd, which begins again if etcd has lost its data. The
// uid is random. So no version comes again, and a holder cannot overwrite a later Lease.
func (l *lease) version() string {
	if l.Metadata.ResourceVersion == "" {
		return ""
	}
	return l.Metadata.UID + "/" + l.Metadata.ResourceVersion
}

// preconditions returns the fields of a body that name the version which the Lease must have.
func preconditions(version string) map[string]any {
	uid, resourceVersion, _ := strings.Cut(version, "/")
	return map[string]any{"uid": uid, "resourceVersion": resourceVersion}
}

// specID identifies a spec by its renewTime and its holder, one of which changes with each renewal.
func specID(renewTime, holder string) string { return renewTime + " " + holder }

// entry returns the entry of a Lease. If another program has changed the spec since the driver
// wrote the record, that program has the hold, or has left the key free: client-go changes the spec
// and keeps annotations.
func (l *lease) entry(key string) caslock.Entry {
	e := caslock.Entry{
		Value:   []byte(l.Metadata.Annotations[recordName]),
		Version: l.version(),
	}

	holder := l.Spec.HolderIdentity
	id := specID(l.Spec.RenewTime, holder)
	if id != l.Metadata.Annotations[specName] {
		ttl := time.Duration(l.Spec.LeaseDurationSeconds) * time.Second
		e.Value = caslock.Foreign(key, e.Value, id, holder, ttl)
	}
	return e
}

// Get reads the Lease of key from the API server's quorum.
func (s *Store) Get(ctx context.Context, key string) (caslock.Entry, error) {
	l, err := s.api.call(ctx, request{verb: "get", path: "/" + name(key)})
	return l.entry(key), err
}

// Put patches the Lease of key if it has this version, or creates the Lease if version is "". A
// patch keeps the fields that it does not name. If the value has the hold of another program, Put
// leaves the spec to that program. Otherwise it writes a spec that client-go can read.
func (s *Store) Put(ctx context.Context, key string, value []byte, version string) (string, error) {
	annotations := map[string]string{recordName: string(value)}
	metadata := map[string]any{
		"name":        name(key),
		"labels":      map[string]string{recordName: "true"},
		"annotations": annotations,
	}
	if version != "" {
		maps.Copy(metadata, preconditions(version))
	}
	body := map[string]any{
		"apiVersion": "coordination.k8s.io/v1",
		"kind":       "Lease",
		"metadata":   metadata,
	}

	owner, ttl, ours := caslock.Holder(value)
	if ours {
		spec, id := newSpec(owner, ttl, time.Now().UTC())
		body["spec"] = spec
		annotations[specName] = id
	}

	q := request{verb: "patch", path: "/" + name(key), body: body}
	if version == "" {
		q = request{verb: "create", body: body}
	}
	l, err := s.api.call(ctx, q)
	return l.version(), err
}

// newSpec returns a spec that client-go can read, and its specID. If ttl is 0, the spec has no
// holder. In client-go, a term begins with the first sight of a spec, so no two specs may look
// alike. But client-go cuts renewTime to whole seconds. So leaseTransitions has the microseconds.
func newSpec(owner string, ttl time.Duration, now time.Time) (spec map[string]any, id string) {
	renewTime := now.Format("2006-01-02T15:04:05.000000Z")
	spec = map[string]any{
		"holderIdentity":       nil,
		"renewTime":            renewTime,
		"leaseTransitions":     now.Nanosecond() / 1000,
		"leaseDurationSeconds": min(ttl/time.Second+1, math.MaxInt32), // at least ttl
	}

	holder := ""
	if ttl > 0 {
		// This is never the identity of a client-go program.
		holder = "hasp/" + strings.ToValidUTF8(owner, "?")
		spec["holderIdentity"] = holder
	}
	return spec, specID(renewTime, holder)
}

// Delete deletes the Lease of key if it has this version.
func (s *Store) Delete(ctx context.Context, key, version string) error {
	options := map[string]any{"preconditions": preconditions(version)}
	_, err := s.api.call(ctx, request{verb: "delete", path: "/" + name(key), body: options})
	return err
}

// Scan lists the Leases that the driver has written, whatever their names. A position is what the
// server returns as continue.
func (s *Store) Scan(ctx context.Context, position string, n int) (es []caslock.Entry, next string, err error) {
	query := url.Values{
		"labelSelector": {recordName + "=true"},
		"limit":         {fmt.Sprint(n)},
		"continue":      {position},
	}

	list, err := s.api.call(ctx, request{verb: "list", path: "?" + query.Encode()})
	for _, l := range list.Items {
		// A Lease does not name its key, so a hold of another program gets no key, and is left out.
		es = append(es, l.entry(""))
	}
	return es, list.Metadata.Continue, err
}
