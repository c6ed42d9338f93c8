package k8slease

import (
	"context"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"strings"

	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/transport"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/caslock"
	"github.com/hasplock/hasp/caslock/internal/adapter"
)

const form = "kube:///NAMESPACE, kube://HOST:PORT/NAMESPACE or kube+http://HOST:PORT/NAMESPACE"

// hostParams are the parameters of kube://HOST:PORT/NAMESPACE.
var hostParams = []string{"token_file", "ca", "cert", "key", "server_name"}

func init() { hasp.Register("kube", open, append([]string{"context"}, hostParams...)...) }

// ownStore is a Store whose idle connections are closed with the driver.
type ownStore struct{ *Store }

// Close closes the idle connections.
func (o ownStore) Close() error {
	utilnet.CloseIdleConnectionsFor(o.api.client.Transport)
	return nil
}

// The function open returns a driver for a kube:// URL.
func open(ctx context.Context, c hasp.Config) (backend.Driver, error) {
	node, err := adapter.Node(c, form)
	if err != nil {
		return nil, err
	}
	server, namespace, err := parse(node)
	if err != nil {
		return nil, err
	}

	conf, err := config(server, c.Params)
	if err != nil {
		return nil, err
	}
	s, err := connect(conf, namespace)
	if err != nil {
		return nil, err
	}
	if err := checkRights(ctx, s); err != nil {
		return nil, err
	}
	return caslock.NewDriver(ctx, ownStore{s})
}

// label matches the names that Kubernetes allows for a namespace.
var label = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)

// parse returns the URL of the API server and the namespace that a node names. A node is
//   - /NAMESPACE for kube:///NAMESPACE, and then server is "";
//   - HOST:PORT/NAMESPACE for kube://HOST:PORT/NAMESPACE;
//   - http://HOST:PORT/NAMESPACE for kube+http://HOST:PORT/NAMESPACE.
//
// Errors do not repeat the host, because there may be a password before it.
func parse(node string) (server, namespace string, err error) {
	scheme, rest, hasScheme := strings.Cut(node, "://")
	if !hasScheme {
		scheme = "https"
		rest = node
	}
	host, namespace, _ := strings.Cut(rest, "/")
	namespace = strings.TrimSuffix(namespace, "/")

	switch {
	case scheme != "http" && scheme != "https":
		return "", "", adapter.Invalid("node: want %s", form)
	case strings.Contains(host, "@"):
		return "", "", adapter.Invalid("node: the API server takes no user and password: " +
			"write the token into a file, and add token_file=FILE")
	case namespace == "":
		return "", "", adapter.Invalid("node: no namespace: want %s", form)
	case !label.MatchString(namespace):
		return "", "", adapter.Invalid("node: the namespace %q has no valid name: want %s",
			namespace, form)
	case host == "" && !hasScheme:
		return "", namespace, nil
	}

	u, err := url.Parse(scheme + "://" + host)
	if err != nil || u.Hostname() == "" {
		return "", "", adapter.Invalid("node: a host or a port is wrong: want %s", form)
	}
	return u.String(), namespace, nil
}

// config returns the settings for a server. If server is "", a kubeconfig or the pod names it. The
// parameters in hostParams are only for a server with TLS, and context is only for a kubeconfig.
func config(server string, params map[string]string) (*rest.Config, error) {
	for _, name := range hostParams {
		if params[name] != "" && !strings.HasPrefix(server, "https:") {
			return nil, adapter.Invalid("parameter %s: that is for kube://HOST:PORT/NAMESPACE", name)
		}
	}

	if server == "" {
		return defaultConfig(params["context"])
	}
	if params["context"] != "" {
		return nil, adapter.Invalid("parameter context: that is for kube:///NAMESPACE")
	}

	files := adapter.Params{Values: params}
	conf := &rest.Config{
		Host:            server,
		BearerTokenFile: files.File("token_file"),
		TLSClientConfig: rest.TLSClientConfig{
			CAFile:     files.File("ca"),
			CertFile:   files.File("cert"),
			KeyFile:    files.File("key"),
			ServerName: params["server_name"],
		},
	}
	return conf, files.Err
}

// defaultConfig returns the settings of a context of the kubeconfig, or of the pod.
func defaultConfig(contextName string) (*rest.Config, error) {
	conf, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(
		clientcmd.NewDefaultClientConfigLoadingRules(),
		&clientcmd.ConfigOverrides{CurrentContext: contextName},
	).ClientConfig()
	switch {
	case clientcmd.IsEmptyConfig(err): // there is neither a kubeconfig nor a service account
		return nil, adapter.Invalid("no kubeconfig at KUBECONFIG=%s, and this is no pod with a service "+
			"account: set KUBECONFIG, or use kube://HOST:PORT/NAMESPACE?token_file=FILE&ca=FILE",
			os.Getenv("KUBECONFIG"))
	case err != nil:
		text := strings.Join(strings.Fields(err.Error()), " ")
		return nil, adapter.Invalid(
			"kubeconfig: %s: check KUBECONFIG, and kubectl config get-contexts", text)
	}

	return conf, nil
}

// connect returns a Store with the credentials of conf. It sends nothing, and changes conf.
func connect(conf *rest.Config, namespace string) (*Store, error) {
	conf.UserAgent = "hasp"

	// In HTTP/2, all calls share a connection. If it dies in silence, client-go needs 45 seconds to
	// find out, and all terms end. In HTTP/1.1, a call that times out closes its connection, and the
	// next call makes a new one.
	conf.NextProtos = []string{"http/1.1"}

	// client-go reads the file every minute. This wrapper also reads it after an answer 401.
	if file := conf.BearerTokenFile; file != "" {
		conf.BearerToken = ""
		conf.BearerTokenFile = ""
		tokens := transport.NewCachedFileTokenSource(file)
		conf.Wrap(transport.ResettableTokenSourceWrapTransport(tokens))
	}

	// client-go shares the connections of all settings that it can compare, and it cannot compare
	// functions. A driver needs its own connections: a shared one may have died in silence before.
	if conf.Proxy == nil {
		conf.Proxy = http.ProxyFromEnvironment // the default
	}

	client, err := rest.HTTPClientFor(conf)
	if err != nil {
		return nil, adapter.Invalid("ca, cert or key, here or in the kubeconfig: %v", err)
	}
	u, _, err := rest.DefaultServerUrlFor(conf)
	if err != nil {
		return nil, adapter.Invalid("%v", err)
	}
	return New(client, u.String(), namespace), nil
}

// checkRights returns an error if the account lacks the right get or list. The probe of caslock
// does not find that out.
func checkRights(ctx context.Context, s *Store) error {
	if _, err := s.Get(ctx, "hasp-probe"); err != nil {
		return err
	}
	_, _, err := s.Scan(ctx, "", 1)
	return err
}
