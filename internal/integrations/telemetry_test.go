//go:build unix

package integrations

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/promql/parser"
	"go.yaml.in/yaml/v3"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/await"
)

// scrape fetches /metrics as Prometheus 3 does by default, which also accepts names with dots.
func scrape(t *testing.T, url string) map[string]*dto.MetricFamily {
	t.Helper()
	req := await.Value(http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil))
	req.Header.Set("Accept", "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.9,text/plain;version=0.0.4;q=0.8")
	resp := await.Value(http.DefaultClient.Do(req))
	defer resp.Body.Close()
	p := expfmt.NewTextParser(model.UTF8Validation)
	families := await.Value(p.TextToMetricFamilies(resp.Body))
	return families
}

// series has the time series of a scrape: for the name of a series and the name of a label, the
// label's values. A histogram makes series of three names.
type series map[string]map[string][]string

func seriesOf(families map[string]*dto.MetricFamily) series {
	all := series{}
	for name, f := range families {
		names := []string{name}
		if f.GetType() == dto.MetricType_HISTOGRAM {
			names = []string{name + "_bucket", name + "_count", name + "_sum"}
		}
		for _, n := range names {
			all[n] = map[string][]string{"job": {"app"}, "instance": {"host"}} // by Prometheus
			if strings.HasSuffix(n, "_bucket") {
				all[n]["le"] = []string{"+Inf"}
			}
			for _, m := range f.Metric {
				for _, l := range m.Label {
					all[n][l.GetName()] = append(all[n][l.GetName()], l.GetValue())
				}
			}
		}
	}
	return all
}

// serve runs the code of docs/telemetry.md in Clients that lock, wait, time out, lose a lease and
// fail. It sets the global provider of meters, and returns a scrape.
func serve(t *testing.T) map[string]*dto.MetricFamily {
	t.Helper()
	provider, handler, err := serveMetrics()
	must(t, err)
	t.Cleanup(func() { provider.Shutdown(context.Background()) })
	srv := httptest.NewServer(handler)
	t.Cleanup(srv.Close)

	url := store(t)
	for _, open := range []func(context.Context, string) (*hasp.Client, error){
		openObserved, openWithAll,
	} {
		c := await.Value(open(t.Context(), url))
		defer c.Close()
		l := await.Value(c.Lock(t.Context(), "invoices/2024-06"))
		if _, err = c.Lock(t.Context(), "invoices/2024-06", hasp.WithMaxWait(0)); !errors.Is(err, hasp.ErrHeld) {
			t.Fatal(err)
		}
		if _, err = c.TryLock(t.Context(), "invoices/2024-06"); !errors.Is(err, hasp.ErrHeld) {
			t.Fatal(err)
		}
		must(t, l.Unlock(t.Context()))

		l = await.Value(c.Lock(t.Context(), "invoices/2024-07"))
		must(t, c.Break(t.Context(), "invoices/2024-07"))
		if err := l.Unlock(t.Context()); !errors.Is(err, hasp.ErrLost) {
			t.Fatal(err)
		}
		must(t, c.Close()) // until the loss is reported
	}
	return scrape(t, srv.URL)
}

func TestTelemetry(t *testing.T) {
	families := serve(t)
	have := seriesOf(families)
	rules := alerts(t)
	t.Run("Dashboard", func(t *testing.T) { checkDashboard(t, have) })
	t.Run("Alerts", func(t *testing.T) {
		for _, rule := range rules {
			checkQuery(t, "alert "+rule.Alert, rule.Expr, have)
			if rule.Annotations["summary"] == "" || rule.Labels["severity"] == "" {
				t.Errorf("alert %s has no summary or no severity", rule.Alert)
			}
		}
	})

	// The page lists each instrument, each alert and each type of error.
	t.Run("Page", func(t *testing.T) {
		page := await.Value(os.ReadFile("../../docs/telemetry.md"))
		var listed []string
		for _, name := range errorTypes {
			listed = append(listed, "`"+name+"`")
		}
		for name := range families {
			if strings.HasPrefix(name, "hasp_") {
				listed = append(listed, "`"+name+"`")
			}
		}
		for _, rule := range rules {
			listed = append(listed, "| `"+rule.Alert+"` |")
		}
		for _, name := range listed {
			if !strings.Contains(string(page), name) {
				t.Errorf("the page does not list %s", name)
			}
		}
	})
}

// checkQuery parses a query and returns the names of its metrics. It checks that the scrape has
// each of its metrics and labels.
func checkQuery(t *testing.T, where, query string, have series) (names []string) {
	t.Helper()
	// Replace these variables, as Grafana does.
	query = strings.NewReplacer("$__rate_interval", "5m", "$job", ".+").Replace(query)
	expr, err := parser.NewParser(parser.Options{}).ParseExpr(query)
	if err != nil {
		t.Errorf("%s: %q: %v", where, query, err)
		return nil
	}
	var used []string // the labels in "by (…)" and "on (…)"
	parser.Inspect(expr, func(node parser.Node, _ []parser.Node) error {
		switch n := node.(type) {
		case *parser.VectorSelector:
			names = append(names, n.Name)
			if have[n.Name] == nil {
				t.Errorf("%s: %q: there is no metric %s", where, query, n.Name)
				return nil
			}
			for _, m := range n.LabelMatchers {
				values, ok := have[n.Name][m.Name]
				if ok && m.Name == "error_type" {
					values = append([]string{""}, errorTypes...)
				}
				if m.Name != model.MetricNameLabel && !slices.ContainsFunc(values, m.Matches) {
					t.Errorf("%s: %v matches none of %v", where, m, values)
				}
			}
		case *parser.AggregateExpr:
			used = append(used, n.Grouping...)
		case *parser.BinaryExpr:
			if n.VectorMatching != nil {
				used = append(used, n.VectorMatching.MatchingLabels...)
			}
		}
		return nil
	})
	if len(names) == 0 {
		t.Errorf("%s: %q has no metric", where, query)
	}
	for _, l := range used {
		for _, n := range names {
			if have[n] != nil && have[n][l] == nil {
				t.Errorf("%s: %q: %s has no label %s", where, query, n, l)
			}
		}
	}
	return names
}

// errorTypes are all values of error.type that the documentation of otelhasp lists. A scrape has
// only some of them.
var errorTypes = []string{"unavailable", "closed", "invalid", "unsupported", "canceled", "held",
	"deadline_exceeded", "lost"}

// checkDashboard checks each query of the dashboard. Together the queries must use every
// instrument.
func checkDashboard(t *testing.T, have series) {
	file := await.Value(os.ReadFile("../../docs/grafana-dashboard.json"))
	var board struct {
		Title  string
		UID    string
		Panels []struct {
			ID          int
			Title       string
			Description string
			GridPos     struct{ X, Y, W, H int }
			Targets     []struct{ Expr, RefID string }
		}
		Templating struct {
			List []struct{ Name, Type, Query string }
		}
	}
	must(t, json.Unmarshal(file, &board))
	var used []string
	ids := map[int]bool{}
	for _, p := range board.Panels {
		hasPlace := p.GridPos.H > 0 && p.GridPos.X+p.GridPos.W <= 24
		hasText := p.Title != "" && p.Description != ""
		if !hasText || len(p.Targets) == 0 || ids[p.ID] || !hasPlace {
			t.Errorf("panel %q: it must have a title, a description, a query, an ID of its own and a place", p.Title)
		}
		ids[p.ID] = true
		for _, target := range p.Targets {
			used = append(used, checkQuery(t, "panel "+p.Title, target.Expr, have)...)
		}
	}
	values := regexp.MustCompile(`^label_values\((\w+), ?(\w+)\)$`)
	for _, v := range board.Templating.List {
		if v.Type != "query" {
			continue
		}
		m := values.FindStringSubmatch(v.Query)
		if m == nil || have[m[1]][m[2]] == nil {
			t.Errorf("variable %s: %q", v.Name, v.Query)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(have)) {
		if strings.HasPrefix(name, "hasp_") && !strings.HasSuffix(name, "_sum") && !slices.Contains(used, name) {
			t.Errorf("no panel shows %s", name)
		}
	}
}

type rule struct {
	Alert       string
	Expr        string
	For         model.Duration
	Labels      map[string]string
	Annotations map[string]string
}

// alerts returns the alerting rules in docs/telemetry.md.
func alerts(t *testing.T) []rule {
	t.Helper()
	page := await.Value(os.ReadFile("../../docs/telemetry.md"))
	blocks := regexp.MustCompile("(?ms)^```yml\n(.*?)^```$").FindAllStringSubmatch(string(page), -1)
	if len(blocks) != 1 {
		t.Fatalf("%d blocks of rules, want one", len(blocks))
	}
	var file struct {
		Groups []struct {
			Name  string
			Rules []rule
		}
	}
	d := yaml.NewDecoder(strings.NewReader(blocks[0][1]))
	d.KnownFields(true)
	must(t, d.Decode(&file))
	if len(file.Groups) != 1 || len(file.Groups[0].Rules) < 5 {
		t.Fatalf("got %+v", file)
	}
	return file.Groups[0].Rules
}
