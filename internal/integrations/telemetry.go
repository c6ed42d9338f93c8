package integrations

import (
	"context"
	"net/http"
	"strings"

	client "github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/otlptranslator"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/prometheus"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/otelhasp"
)

func openObserved(ctx context.Context, url string) (*hasp.Client, error) {
	return hasp.Open(ctx, url, &hasp.Options{Observe: otelhasp.Observe(nil)})
}

// openWithAll uses every option of otelhasp, and writes losses and outages to the log.
func openWithAll(ctx context.Context, url string) (*hasp.Client, error) {
	cfg, err := hasp.ParseURL(url)
	if err != nil {
		return nil, err
	}
	class := func(key string) string { // "invoices" for "invoices/2024-06"
		before, _, _ := strings.Cut(key, "/")
		return before
	}
	return cfg.Open(ctx, &hasp.Options{Observe: otelhasp.Observe(hasp.LogEvents(nil),
		otelhasp.WithMeterProvider(otel.GetMeterProvider()),
		otelhasp.WithTracerProvider(otel.GetTracerProvider()),
		otelhasp.WithAttributes(attribute.String("hasp.strategy", cfg.Strategy)),
		otelhasp.WithKey(class),
		otelhasp.WithHoldSpans(),
	)})
}

// serveMetrics sets the global MeterProvider, and returns the handler of /metrics.
func serveMetrics() (*sdkmetric.MeterProvider, http.Handler, error) {
	registry := client.NewRegistry()
	exporter, err := prometheus.New(
		prometheus.WithRegisterer(registry),
		prometheus.WithTranslationStrategy(otlptranslator.UnderscoreEscapingWithSuffixes),
	)
	if err != nil {
		return nil, nil, err
	}
	provider := sdkmetric.NewMeterProvider(sdkmetric.WithReader(exporter))
	otel.SetMeterProvider(provider)
	return provider, promhttp.HandlerFor(registry, promhttp.HandlerOpts{}), nil // at the end: provider.Shutdown
}
