package otelhasp_test

import (
	"context"
	"fmt"
	"log"
	"strings"

	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/memlock"
	"github.com/hasplock/hasp/otelhasp"
)

// This program counts holds by the class of their key. A real program has an exporter instead of
// the ManualReader, and sets the global provider.
func ExampleObserve() {
	ctx := context.Background()
	reader := sdkmetric.NewManualReader()
	provider := sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader))
	defer provider.Shutdown(ctx)

	class := func(key string) string {
		before, _, _ := strings.Cut(key, "/")
		return before
	}
	c, err := memlock.New(&hasp.Options{
		Observe: otelhasp.Observe(nil, otelhasp.WithMeterProvider(provider), otelhasp.WithKey(class)),
	})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	for _, key := range []string{"invoices/2024-06", "invoices/2024-07", "ledger"} {
		err := hasp.Do(ctx, c, key, func(context.Context, *hasp.Lease) error { return nil })
		if err != nil {
			fmt.Println(err)
			return
		}
	}

	var metrics metricdata.ResourceMetrics
	if err := reader.Collect(ctx, &metrics); err != nil {
		fmt.Println(err)
		return
	}
	for _, m := range metrics.ScopeMetrics[0].Metrics {
		if m.Name == "hasp.client.lock.use_time" {
			for _, p := range m.Data.(metricdata.Histogram[float64]).DataPoints {
				key, _ := p.Attributes.Value("hasp.key")
				fmt.Println(key.AsString(), p.Count)
			}
		}
	}
	// Unordered output:
	// invoices 2
	// ledger 1
}
