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

// series has the time series of a scrape: for the name of a series and the name of a label, the
// label's values. A histogram makes series of three names.
type series map[string]map[string][]string

// scrape fetches /metrics. It does not accept names with dots.
func scrape(t *testing.T, url string) series {
	t.Helper()
	resp := await.Value(http.Get(url))
	defer resp.Body.Close()
	p := expfmt.NewTextParser(model.UTF8Validation)
	all := series{}
	for name, f := range await.Value(p.TextToMetricFamilies(resp.Body)) {
		labels := map[string][]string{"job": {"app"}, "instance": {"host"}} // by Prometheus
		for _, m := range f.Metric {
			for _, l := range m.Label {
				labels[l.GetName()] = append(labels[l.GetName()], l.GetValue())
			}
		}

		if f.GetType() != dto.MetricType_HISTOGRAM {
			all[name] = labels
			continue
		}
		all[name+"_count"] = labels
		all[name+"_sum"] = labels
		all[name+"_bucket"] = maps.Clone(labels)
		all[name+"_bucket"]["le"] = []string{"+Inf"}
	}
	return all
}

// serve runs the code of docs/telemetry.md in Clients that lock, wait, time out, lose a lease and
// fail. It sets the global provider of meters, and returns a scrape.
func serve(t *testing.T) series {
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
	have := serve(t)
	page := string(await.Value(os.ReadFile("../../docs/telemetry.md")))
	list := func(name string) {
		if !strings.Contains(page, name) {
			t.Errorf("the page does not list %s", name)
		}
	}
	for _, name := range errorTypes {
		list("`" + name + "`")
	}

	for _, rule := range alerts(t, page) {
		checkQuery(t, "alert "+rule.Alert, rule.Expr, have)
		list("| `" + rule.Alert + "` |")
		if rule.Annotations["summary"] == "" || rule.Labels["severity"] == "" {
			t.Errorf("alert %s has no summary or no severity", rule.Alert)
		}
	}

	shown := checkDashboard(t, have)
	for name := range have {
		instrument, isSum := strings.CutSuffix(name, "_sum")
		switch {
		case !strings.HasPrefix(name, "hasp_"):
		case isSum: // a histogram
			list("`" + instrument + "`")
		case !slices.Contains(shown, name):
			t.Errorf("no panel shows %s", name)
		case !strings.HasSuffix(name, "_bucket"):
			list("`" + strings.TrimSuffix(name, "_count")) // of a histogram, or a part of the name
		}
	}
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

// checkDashboard checks each query of the dashboard, and returns the metrics that they use.
func checkDashboard(t *testing.T, have series) (used []string) {
	file := await.Value(os.ReadFile("../../docs/grafana-dashboard.json"))
	var board struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
		Templating struct {
			List []struct{ Name, Type, Query string }
		}
	}
	must(t, json.Unmarshal(file, &board))
	for _, p := range board.Panels {
		for _, target := range p.Targets {
			used = append(used, checkQuery(t, "panel "+p.Title, target.Expr, have)...)
		}
	}

	values := regexp.MustCompile(`^label_values\((\w+), ?(\w+)\)$`)
	for _, v := range board.Templating.List {
		if v.Type == "query" {
			count := values.ReplaceAllString(v.Query, "count by ($2) ($1)")
			checkQuery(t, "variable "+v.Name, count, have)
		}
	}
	return used
}

type rule struct {
	Alert       string
	Expr        string
	For         model.Duration
	Labels      map[string]string
	Annotations map[string]string
}

// alerts returns the alerting rules of the page.
func alerts(t *testing.T, page string) []rule {
	t.Helper()
	block := regexp.MustCompile("(?ms)^```yml\n(.*?)^```$").FindStringSubmatch(page)
	var file struct {
		Groups []struct {
			Name  string
			Rules []rule
		}
	}
	d := yaml.NewDecoder(strings.NewReader(block[1]))
	d.KnownFields(true)
	must(t, d.Decode(&file))
	if len(file.Groups) != 1 || len(file.Groups[0].Rules) < 5 {
		t.Fatalf("got %+v", file)
	}
	return file.Groups[0].Rules
}
