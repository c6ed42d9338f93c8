package cli

import (
	"cmp"
	"context"
	"fmt"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/internal/cli/text"
)

// defaultURL keeps locks in files in the user's state directory, so it needs no server.
const defaultURL = "filelock://"

// storeFlags say where the locks are kept.
type storeFlags struct {
	url    string
	file   string
	secret []string // the passwords that the method redact removes; the method learn adds them
}

// register adds the flags to the root command, and thereby to all commands.
func (s *storeFlags) register(root *cobra.Command) {
	f := root.PersistentFlags()
	f.StringVar(&s.url, "url", "", "where the locks are kept, such as "+
		"spinlock+redis://localhost:6379 (default: `URL` in HASP_URL, or "+defaultURL+")")
	f.StringVar(&s.file, "config", "", "read where the locks are kept from a YAML `FILE` "+
		"(/dev/stdin for stdin), "+
		"with the fields strategy, nodes and params")
	root.MarkFlagsMutuallyExclusive("url", "config")
}

// config returns where the locks are kept, and an error if this program does not have the strategy.
// It remembers the passwords in the configuration, even of one with an error, because the error's
// text may contain a password. It warns about a password in --url, because every user of the host
// can read the command line.
func (a *app) config(cmd *cobra.Command) (hasp.Config, error) {
	s := &a.store
	for _, name := range []string{"url", "config"} {
		if f := cmd.Flag(name); f.Changed && f.Value.String() == "" {
			return hasp.Config{}, usagef("--%s is empty: give it a value, or leave it out", name)
		}
	}

	if s.file != "" {
		c, err := readConfig(s.file) // also checks the strategy
		s.learn(c)
		return c, err
	}

	raw, set := os.LookupEnv("HASP_URL")
	switch {
	case s.url != "":
		raw = s.url
	case !set:
		raw = defaultURL
	case raw == "":
		// Do not use the default here. Perhaps a script has set HASP_URL from a variable that was
		// empty by mistake. With the default, the lock would exclude no program on another host.
		return hasp.Config{}, usagef("HASP_URL is empty: give it a URL, or unset it for %s",
			defaultURL)
	}

	c, err := hasp.ParseURL(raw)
	s.learn(c)
	if err != nil {
		return c, err
	}

	// Warn once. The child processes of the conformance suite have the same arguments, so they must
	// not warn again.
	if s.url != "" && len(s.secret) > 0 && !conformance.Child() {
		a.complain("warning: --url holds a password, which other users of this host can read " +
			"in the process list; put the URL into HASP_URL or a --config file")
	}
	return c, checkStrategy(c)
}

// transports matches the names that follow a strategy in a URL.
var transports = regexp.MustCompile(`^(unix|redis.*|postgres(ql)?|etcds?)$`)

// checkStrategy returns an error if this program does not have the strategy of c. The error of
// package hasp would suggest an import, which does not help users of a command.
func checkStrategy(c hasp.Config) error {
	strategies := hasp.Strategies()
	names := strings.Join(strategies, ", ")
	switch {
	case slices.Contains(strategies, c.Strategy):
		return nil
	case c.Strategy == "":
		return usagef("no strategy given (want one of %s)", names)
	case strings.ContainsAny(c.Strategy, "@:/"): // a URL, perhaps with a password: do not show it
		return usagef("strategy: want one of %s; put a URL into nodes", names)
	case transports.MatchString(c.Strategy):
		return usagef("%s is a transport: put a strategy before it, as in spinlock+redis://…, "+
			"pglock+postgres://… or etcdlock+etcd://… (want one of %s)",
			text.Quote(c.Strategy), names)
	case c.Strategy == "pglock" || c.Strategy == "etcdlock":
		return usagef("this hasp is built without %s: in the clone, "+
			"\"go -C cmd/hasp-all install .\" installs hasp-all, which has it", c.Strategy)
	}

	return usagef("unknown strategy %s (want one of %s)", text.Quote(c.Strategy), names)
}

// open opens the store that the flags name. The argument doing becomes a part of the owner. open
// prints a warning for each EventDegraded. It passes all events on to observe, which may be nil.
func (a *app) open(
	cmd *cobra.Command, doing string, observe func(context.Context, hasp.Event),
) (*hasp.Client, error) {
	c, err := a.config(cmd)
	if err != nil {
		return nil, err
	}

	a.strategy = c.Strategy
	client, err := c.Open(cmd.Context(), &hasp.Options{
		Owner: ownerOf(c, doing),
		Observe: func(ctx context.Context, e hasp.Event) {
			if e.Kind == hasp.EventDegraded {
				a.complain("warning: %s", e.Err)
			}
			if observe != nil {
				observe(ctx, e)
			}
		},
	})
	if err == nil && c.Strategy == "memlock" {
		a.complain("warning: memlock keeps locks inside this process, " +
			"where no other program sees them; use filelock://")
	}
	return client, err
}

// withClient opens the store, calls f with the Client, and closes the Client.
func (a *app) withClient(cmd *cobra.Command, f func(context.Context, *hasp.Client) error) error {
	client, err := a.open(cmd, cmd.CommandPath(), nil)
	if err != nil {
		return err
	}
	defer client.Close()
	return f(cmd.Context(), client)
}

// learn remembers the passwords in c: those in the nodes, and those in parameters. A node may have
// a password percent-encoded, and an error may contain it in either form, so learn remembers both.
func (s *storeFlags) learn(c hasp.Config) {
	for _, node := range c.Nodes {
		_, rest, ok := strings.Cut(node, "://")
		at := strings.LastIndex(rest, "@") // a password may contain @
		if !ok || at < 0 {
			continue // the node has no password
		}

		_, pw, ok := strings.Cut(rest[:at], ":")
		if !ok || pw == "" {
			continue // there is only a user
		}
		s.secret = append(s.secret, pw)
		if plain, err := url.PathUnescape(pw); err == nil && plain != pw {
			s.secret = append(s.secret, plain)
		}
	}

	for name, value := range c.Params {
		if strings.Contains(name, "password") && value != "" {
			s.secret = append(s.secret, value)
		}
	}
}

// redact removes the store's passwords from text, because an error of a server or of the operating
// system may contain them.
func (s *storeFlags) redact(text string) string {
	for _, pw := range s.secret {
		if len(pw) < 4 { // a short password also occurs inside words, so remove it only from URLs
			text = strings.ReplaceAll(text, ":"+pw+"@", ":xxxxx@")
		} else {
			text = strings.ReplaceAll(text, pw, "xxxxx")
		}
	}

	return text
}

// ownerOf returns the owner for locks: the parameter owner of c if it is set, and otherwise
// host/pid/doing.
func ownerOf(c hasp.Config, doing string) string {
	host, err := os.Hostname()
	if err != nil {
		host = "localhost"
	}
	return cmp.Or(c.Params["owner"], fmt.Sprintf("%s/%d/%s", host, os.Getpid(), doing))
}
