//go:build unix

package k8slease_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/caslock/internal/adaptertest"
	"github.com/hasplock/hasp/caslock/k8slease"
	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/kubetest"
)

// The conformance suite on a real API server with TLS, which is killed and loses its data.
func TestRealConformance(t *testing.T) {
	if !conformance.Child() {
		kubetest.Need(t)
	}
	var s *kubetest.Server
	conformance.Run(t, conformance.Harness{
		Store: func(context.Context) (string, func(), error) {
			s = kubetest.Start(t)
			// The suite's child processes know only the address, so it has the rest of the URL.
			return s.URL(s.Host, "default", s.TokenFile), func() {}, nil
		},
		Open: adaptertest.Driver,
		Link: func(context.Context, string) (*conformance.Link, error) {
			l, err := conformance.TCP(s.Host)
			if err == nil {
				l.Store = s.URL(l.Store, "default", s.TokenFile)
			}
			return l, err
		},
		Stop:  func(context.Context, string) error { s.Stop(); return nil },
		Start: func(ctx context.Context, _ string, data bool) error { return s.Start(ctx, data) },
		Kick: func(ctx context.Context, _ string) error {
			s.Stop()
			return s.Start(ctx, true)
		},
	})
}

// manifests returns the manifests of docs/kubernetes.md as JSON.
func manifests(t *testing.T) (all []string) {
	page := await.Value(os.ReadFile(filepath.FromSlash("../../docs/kubernetes.md")))
	for _, block := range regexp.MustCompile("(?ms)^```yaml\n(.*?)^```$").FindAllStringSubmatch(string(page), -1) {
		for _, text := range strings.Split(block[1], "---\n") {
			all = append(all, string(await.Value(yaml.YAMLToJSONStrict([]byte(text)))))
		}
	}
	return all
}

// object is what the tests read of a manifest.
type object struct {
	APIVersion, Kind string
	Metadata         struct{ Name, Namespace string }
	StringData       map[string]string
}

// path returns the path of the collection that the object belongs to.
func (o *object) path() string {
	group := "/apis/" + o.APIVersion
	if o.APIVersion == "v1" {
		group = "/api/v1"
	}
	return group + "/namespaces/" + o.Metadata.Namespace + "/" + strings.ToLower(o.Kind) + "s"
}

func TestManifestsOfThePage(t *testing.T) {
	kinds := map[string]int{}
	for _, text := range manifests(t) {
		var o object
		await.Must(t, json.Unmarshal([]byte(text), &o))
		kinds[o.Kind]++
		if o.Metadata.Name == "" || o.Metadata.Namespace != "jobs" {
			t.Errorf("%s without a name, or in another namespace than jobs", o.Kind)
		}
		if o.Kind == "Secret" {
			c, err := hasp.ParseURL(o.StringData["HASP_URL"])
			if err != nil || c.Strategy != "kube" || c.Nodes[0] != "/jobs" {
				t.Errorf("HASP_URL of the Secret: %v, %v", c, err)
			}
		}
	}
	for _, kind := range []string{"Role", "RoleBinding", "Secret", "Deployment", "CronJob"} {
		if kinds[kind] != 1 {
			t.Errorf("the page has %d manifests of the kind %s", kinds[kind], kind)
		}
	}
}

// The real API server accepts the manifests, without unknown fields. Before, the account of a pod
// cannot open the strategy; afterwards it can, and in no other namespace.
func TestRealManifests(t *testing.T) {
	s, ctx := kubetest.Start(t), t.Context()
	await.Value(s.Call(ctx, http.MethodPost, "/api/v1/namespaces",
		`{"metadata":{"name":"jobs"}}`))
	await.Value(s.Call(ctx, http.MethodPost, "/api/v1/namespaces/jobs/serviceaccounts",
		`{"metadata":{"name":"default"}}`)) // a controller does that in a cluster
	reply := await.Value(s.Call(ctx, http.MethodPost,
		"/api/v1/namespaces/jobs/serviceaccounts/default/token", `{"spec":{}}`))
	token := writeFile(t, "token", fmt.Sprint(reply["status"].(map[string]any)["token"]))

	jobs := s.URL(s.Host, "jobs", token)
	adaptertest.Fails(t, jobs, "403", "system:serviceaccount:jobs:default", "lacks the verb get")

	for _, text := range manifests(t) {
		var o object
		await.Must(t, json.Unmarshal([]byte(text), &o))
		_, err := s.Call(ctx, http.MethodPost, o.path()+"?fieldValidation=Strict", text)
		await.Must(t, err)
	}
	var c *hasp.Client
	await.Success(t, "the account to get its rights", func() (err error) {
		c, err = hasp.Open(ctx, jobs, nil)
		return err
	})
	defer c.Close()
	l := await.Value(c.TryLock(ctx, "report"))
	await.Must(t, l.Unlock(ctx))

	adaptertest.Fails(t, s.URL(s.Host, "default", token), "403", "namespace default")
	adaptertest.Fails(t, s.URL(s.Host, "missing", s.TokenFile), "404", "check the namespace missing")
	wrong := writeFile(t, "token", adaptertest.Secret)
	adaptertest.Fails(t, s.URL(s.Host, "jobs", wrong), "401", "expired")
}

func TestRealUID(t *testing.T) {
	s := kubetest.Start(t)
	checkUID(t, k8slease.New(s.Client(), "https://"+s.Host, "default"))
}
