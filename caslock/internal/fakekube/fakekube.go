// Package fakekube is a fake of a Kubernetes API server, for tests. It keeps Leases of the namespace
// default in memory, with the semantics of uid and resourceVersion: one counter for all objects,
// which begins again if the data is lost, and a conflict for a write of an old version. "make kube"
// runs the suite and the election of client-go on a real API server.
package fakekube

import (
	"crypto/rand"
	"encoding/json"
	"maps"
	"net"
	"net/http"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/hasplock/hasp/internal/await"
)

// Server is the fake. Its data survives Stop.
type Server struct {
	Addr string // set by the first Start

	mu       sync.Mutex // guards the fields below
	revision int
	objects  map[string]object
	http     *http.Server
}

// New returns a server without data, whose ServeHTTP needs no Start.
func New() *Server { return &Server{Addr: "127.0.0.1:0", objects: map[string]object{}} }

// Serve starts a server that ends with the test.
func Serve(t testing.TB) *Server {
	t.Helper()
	s := New()
	await.Must(t, s.Start(true))
	t.Cleanup(s.Stop)
	return s
}

// Start starts the server. If data is false, the server has lost its data.
func (s *Server) Start(data bool) error {
	l, err := net.Listen("tcp", s.Addr)
	if err != nil {
		return err
	}
	if !data {
		s.objects = map[string]object{}
		s.revision = 0
	}
	s.Addr = l.Addr().String()
	s.http = &http.Server{Handler: s}
	go s.http.Serve(l)
	return nil
}

// Stop ends all connections.
func (s *Server) Stop() { _ = s.http.Close() }

// object is an object of the API in JSON.
type object = map[string]any

// metadata returns the metadata of an object, or nil.
func metadata(o object) object {
	m, _ := o["metadata"].(object)
	return m
}

// merge returns target after a JSON merge patch (RFC 7386).
func merge(target, patch object) object {
	merged := object{}
	maps.Copy(merged, target)
	for name, value := range patch {
		inner, isObject := value.(object)
		old, _ := merged[name].(object)
		switch {
		case value == nil:
			delete(merged, name)
		case isObject:
			merged[name] = merge(old, inner)
		default:
			merged[name] = value
		}
	}
	return merged
}

// answer sends an object.
func answer(w http.ResponseWriter, code int, o object) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(o)
}

// refuse sends a Status, which names the reason and a field.
func refuse(w http.ResponseWriter, code int, reason, field string) {
	answer(w, code, object{
		"kind":       "Status",
		"apiVersion": "v1",
		"status":     "Failure",
		"code":       code,
		"reason":     reason,
		"message":    reason,
		"details":    object{"causes": []object{{"field": field}}},
	})
}

// ServeHTTP serves get, list, create, patch and delete.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var in object
	_ = json.NewDecoder(r.Body).Decode(&in) // a get and a list have no body

	name := path.Base(r.URL.Path)
	isList := name == "leases" && r.Method == http.MethodGet
	if name == "leases" {
		name, _ = metadata(in)["name"].(string)
	}
	old := s.objects[name]
	expected := metadata(in)
	if options, ok := in["preconditions"].(object); ok {
		expected = options
	}
	differs := func(field string) bool {
		return expected[field] != nil && expected[field] != metadata(old)[field]
	}

	isDelete := r.Method == http.MethodDelete
	isPost := r.Method == http.MethodPost
	switch {
	case !strings.Contains(r.URL.Path, "/namespaces/default/"):
		refuse(w, http.StatusNotFound, "NotFound", "")
	case isList:
		s.list(w, r)
	case isPost && old != nil:
		refuse(w, http.StatusConflict, "AlreadyExists", "")
	case !isPost && old == nil:
		refuse(w, http.StatusNotFound, "NotFound", "")
	case r.Method == http.MethodGet:
		answer(w, http.StatusOK, old)
	case !isPost && differs("resourceVersion"), isDelete && differs("uid"):
		refuse(w, http.StatusConflict, "Conflict", "")
	case !isPost && differs("uid"):
		refuse(w, http.StatusUnprocessableEntity, "Invalid", "metadata.uid")
	case isDelete:
		delete(s.objects, name)
		answer(w, http.StatusOK, object{"kind": "Status", "status": "Success"})
	default:
		answer(w, http.StatusOK, s.write(name, old, in))
	}
}

// write creates an object, or patches the old one.
func (s *Server) write(name string, old, in object) object {
	s.revision++
	uid := metadata(old)["uid"]
	if old == nil {
		uid = rand.Text()
	}
	o := merge(old, in)
	metadata(o)["resourceVersion"] = strconv.Itoa(s.revision)
	metadata(o)["uid"] = uid
	s.objects[name] = o
	return o
}

// list sends a page of the objects that have the label, in the order of their names.
func (s *Server) list(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	label, _, _ := strings.Cut(query.Get("labelSelector"), "=")
	limit, _ := strconv.Atoi(query.Get("limit"))
	items := []object{}
	next := ""
	for _, name := range slices.Sorted(maps.Keys(s.objects)) {
		labels, _ := metadata(s.objects[name])["labels"].(object)
		if name <= query.Get("continue") || labels[label] == nil {
			continue
		}
		items = append(items, s.objects[name])
		if len(items) == limit {
			next = name
			break
		}
	}
	answer(w, http.StatusOK, object{
		"kind":       "LeaseList",
		"apiVersion": "coordination.k8s.io/v1",
		"metadata":   object{"resourceVersion": strconv.Itoa(s.revision), "continue": next},
		"items":      items,
	})
}
