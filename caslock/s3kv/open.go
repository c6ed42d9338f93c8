package s3kv

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"strings"

	"github.com/aws/aws-sdk-go-v2/aws"
	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
	"github.com/aws/aws-sdk-go-v2/config"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/smithy-go/logging"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/caslock"
	"github.com/hasplock/hasp/caslock/internal/adapter"
)

func init() {
	hasp.Register("s3", open, "region", "endpoint", "use_path_style", "profile", "clock")
}

// settings is what a Config says.
type settings struct {
	bucket    string
	prefix    string // of the objects' names: "", or text that ends with a slash
	region    string // "" means the region of the environment
	endpoint  string // "" means Amazon S3
	profile   string // "" means the profile of the environment
	pathStyle bool   // the bucket is in the path of a URL, and not in its host
	clock     bool   // see Store
}

// ownStore is a Store whose idle connections are closed with the driver.
type ownStore struct {
	*Store
	transport *http.Transport
}

// Close closes the idle connections. No call is in flight then.
func (o ownStore) Close() error {
	o.transport.CloseIdleConnections()
	return nil
}

// The function open returns a driver for an s3:// URL.
func open(ctx context.Context, c hasp.Config) (backend.Driver, error) {
	set, err := parse(c)
	if err != nil {
		return nil, err
	}
	client, transport, err := set.newClient(ctx)
	if err != nil {
		return nil, err
	}

	store, err := New(client, set.bucket, set.prefix, set.clock)
	if err != nil {
		return nil, err
	}
	d, err := caslock.NewDriver(ctx, ownStore{store, transport})
	if err != nil {
		transport.CloseIdleConnections()
		return nil, diagnose(set, err)
	}
	return d, nil
}

// parse returns the settings of c. Its node is BUCKET or BUCKET/PREFIX, with or without s3://.
func parse(c hasp.Config) (*settings, error) {
	const form = "s3://bucket/prefix?region=…"
	node, err := adapter.Node(c, form)
	if err != nil {
		return nil, err
	}
	node = strings.TrimPrefix(node, "s3://")

	if strings.Contains(node, "@") || strings.Contains(node, "://") {
		// The error does not repeat the node, which may contain a password.
		return nil, adapter.Invalid("node: want %s; credentials belong into AWS_ACCESS_KEY_ID and "+
			"AWS_SECRET_ACCESS_KEY, and a host into the parameter endpoint", form)
	}

	s := &settings{region: c.Params["region"], profile: c.Params["profile"]}
	s.bucket, s.prefix, _ = strings.Cut(node, "/")
	if s.bucket == "" {
		return nil, adapter.Invalid("node: no bucket: want %s", form)
	}
	s.prefix = strings.Trim(s.prefix, "/")
	if s.prefix != "" {
		s.prefix += "/"
	}

	if text, ok := c.Params["endpoint"]; ok {
		u, err := url.Parse(text)
		isWeb := err == nil && (u.Scheme == "http" || u.Scheme == "https")
		if !isWeb || u.Host == "" || u.User != nil {
			return nil, adapter.Invalid("parameter endpoint: want a URL such as https://host:9000")
		}
		s.endpoint = text
	}

	params := adapter.Params{Values: c.Params}
	s.pathStyle = params.Bool("use_path_style", s.endpoint != "")
	s.clock = params.Bool("clock", false)
	return s, params.Err
}

// newClient returns a client with the credentials of the environment, and the transport that the
// client alone uses. Its errors are for users: wrong settings are backend.ErrInvalid.
func (s *settings) newClient(ctx context.Context) (*s3.Client, *http.Transport, error) {
	conf, err := config.LoadDefaultConfig(ctx,
		config.WithLogger(logging.Nop{}), config.WithRegion(s.region), config.WithSharedConfigProfile(s.profile))
	if err != nil {
		return nil, nil, adapter.Invalid(
			"%w: check AWS_PROFILE, AWS_CA_BUNDLE and the files in ~/.aws", err)
	}
	if conf.Region == "" && s.endpoint == "" {
		return nil, nil, adapter.Invalid("no region: set the parameter region, or AWS_REGION")
	}
	if conf.Region == "" {
		conf.Region = "us-east-1" // the SDK sends no request without a region
	}

	// Ask for the credentials first, because otherwise each call would report that there are none,
	// after it has asked the metadata service of the machine.
	if _, err := conf.Credentials.Retrieve(ctx); err != nil {
		return nil, nil, fmt.Errorf("%w (no credentials: set AWS_ACCESS_KEY_ID and "+
			"AWS_SECRET_ACCESS_KEY, or the parameter profile)", err)
	}

	base, ok := conf.HTTPClient.(*awshttp.BuildableClient) // with the certificates of AWS_CA_BUNDLE
	if !ok {
		base = awshttp.NewBuildableClient()
	}
	transport := base.GetTransport()         // a copy, so ownStore may close its connections
	transport.MaxIdleConnsPerHost = scanners // keep the connections of a Scan for the next one
	conf.HTTPClient = &http.Client{
		Transport: transport,
		// A redirect leads to another region. Report it, so that the user corrects the region.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}

	return s3.NewFromConfig(conf, func(o *s3.Options) {
		o.UsePathStyle = s.pathStyle

		// Servers other than Amazon's may not know the checksums of newer versions of the SDK.
		o.RequestChecksumCalculation = aws.RequestChecksumCalculationWhenRequired
		o.ResponseChecksumValidation = aws.ResponseChecksumValidationWhenRequired
		if s.endpoint != "" {
			o.BaseEndpoint = &s.endpoint
		}
	}), transport, nil
}
