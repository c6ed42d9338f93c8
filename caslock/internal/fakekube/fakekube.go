// Package fakekube is a fake of a Kubernetes API server, for tests. It keeps Leases of the namespace
// default in memory, with the semantics of uid and resourceVersion: one counter for all objects,
// which begins again if the data is lost, a conflict for a write of an old version, and an update
// without a version that always succeeds. "make kube" runs the same tests on a real API server.
package fakekube

import (
	"crypto/rand"
	"encoding/json"
	"io"
	"maps"
	"net"
	"net/http"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// Server is the fake. Its data survives Stop.
type Server struct {
	Addr string // set by the first Start, unless it is set before

	mu       sync.Mutex // guards the fields below
	revision int
	objects  map[string]map[string]any
	http     *http.Server
}

// Start starts the server. If data is false, the server has lost its data.
func (s *Server) Start(data bool) error {
	if s.Addr == "" {
		s.Addr = "127.0.0.1:0"
	}
	l, err := net.Listen("tcp", s.Addr)
	if err != nil {
		return err
	}
	if !data || s.objects == nil {
		s.objects = map[string]map[string]any{}
		s.revision = 0
	}
	s.Addr, s.http = l.Addr().String(), &http.Server{Handler: s}
	go s.http.Serve(l)
	return nil
}

// Stop ends all connections.
func (s *Server) Stop() error { return s.http.Close() }

// field returns a field of an object's metadata, or nil.
func field(object map[string]any, name string) any {
	meta, _ := object["metadata"].(map[string]any)
	return meta[name]
}

// merge returns target after a JSON merge patch (RFC 7386).
func merge(target, patch map[string]any) map[string]any {
	merged := maps.Clone(target)
	if merged == nil {
		merged = map[string]any{}
	}
	for name, value := range patch {
		inner, isObject := value.(map[string]any)
		switch old, _ := merged[name].(map[string]any); {
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

// ServeHTTP serves get, list, create, update, patch and delete.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var in map[string]any
	if body, err := io.ReadAll(r.Body); err != nil || len(body) > 0 && json.Unmarshal(body, &in) != nil {
		w.WriteHeader(http.StatusUnsupportedMediaType) // the fake has no protobuf
		return
	}
	name := path.Base(r.URL.Path)
	if name == "leases" {
		name = ""
		if meta, ok := in["metadata"].(map[string]any); ok {
			name, _ = meta["name"].(string)
		}
	}
	old := s.objects[name]
	expected := field(in, "resourceVersion")
	uid := field(in, "uid")
	if options, ok := in["preconditions"].(map[string]any); ok {
		expected = options["resourceVersion"]
		uid = options["uid"]
	}

	w.Header().Set("Content-Type", "application/json")
	answer := func(code int, object any) {
		w.WriteHeader(code)
		json.NewEncoder(w).Encode(object)
	}
	refuse := func(code int, reason string) {
		status := map[string]any{
			"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code,
			"message": reason,
		}
		if reason == "Invalid" {
			cause := map[string]string{"field": "metadata.uid"}
			status["details"] = map[string]any{"causes": []any{cause}}
		}
		answer(code, status)
	}
	switch {
	case !strings.Contains(r.URL.Path, "/namespaces/default/"):
		refuse(http.StatusNotFound, "NotFound")
	case r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, "/leases"):
		s.list(answer, r)
	case r.Method == http.MethodPost && old != nil:
		refuse(http.StatusConflict, "AlreadyExists")
	case r.Method != http.MethodPost && old == nil:
		refuse(http.StatusNotFound, "NotFound")
	case r.Method == http.MethodGet:
		answer(http.StatusOK, old)
	case old != nil && expected != nil && expected != field(old, "resourceVersion"):
		refuse(http.StatusConflict, "Conflict")
	case old != nil && uid != nil && uid != field(old, "uid") && r.Method == http.MethodDelete:
		refuse(http.StatusConflict, "Conflict")
	case old != nil && uid != nil && uid != field(old, "uid"):
		refuse(http.StatusUnprocessableEntity, "Invalid") // a patch or a put may not change the uid
	case r.Method == http.MethodDelete:
		delete(s.objects, name)
		answer(http.StatusOK, map[string]any{"kind": "Status", "apiVersion": "v1", "status": "Success"})
	default:
		s.revision++
		newUID := any(rand.Text())
		if old != nil {
			newUID = field(old, "uid")
		}
		if r.Method != http.MethodPatch {
			old = nil // replaces the object
		}
		object := merge(old, in)
		meta := object["metadata"].(map[string]any)
		meta["resourceVersion"] = strconv.Itoa(s.revision)
		meta["uid"] = newUID
		s.objects[name] = object
		answer(map[bool]int{true: http.StatusCreated, false: http.StatusOK}[r.Method == http.MethodPost], object)
	}
}

// list sends a page of the objects that have the label, in the order of their names.
func (s *Server) list(answer func(int, any), r *http.Request) {
	query := r.URL.Query()
	label, _, _ := strings.Cut(query.Get("labelSelector"), "=")
	limit, _ := strconv.Atoi(query.Get("limit"))
	items, meta := []any{}, map[string]any{"resourceVersion": strconv.Itoa(s.revision)}
	for _, name := range slices.Sorted(maps.Keys(s.objects)) {
		labels, _ := s.objects[name]["metadata"].(map[string]any)["labels"].(map[string]any)
		if name <= query.Get("continue") || labels[label] == nil {
			continue
		}
		if items = append(items, s.objects[name]); len(items) == limit {
			meta["continue"] = name
			break
		}
	}
	answer(http.StatusOK, map[string]any{"kind": "LeaseList", "apiVersion": "coordination.k8s.io/v1", "metadata": meta, "items": items})
}
