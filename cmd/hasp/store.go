package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/conformance"
)

// defaultURL needs no server: files in the user's state directory.
const defaultURL = "filelock://"

// storeFlags say where the locks are kept.
type storeFlags struct {
	url    string
	file   string
	secret []string // what redact takes out; known once config has run
}

func (s *storeFlags) register(root *cobra.Command) {
	f := root.PersistentFlags()
	f.StringVar(&s.url, "url", "", `where the locks are kept, such as "spinlock+redis://localhost:6379/0?ttl=10s" (default "`+defaultURL+`")`)
	f.StringVar(&s.file, "config", "", "YAML file that says where, with the fields strategy, nodes and params")
	must(root.MarkPersistentFlagFilename("config", "yaml", "yml"))
	must(root.RegisterFlagCompletionFunc("url", func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		var urls []string
		for _, s := range known() {
			urls = append(urls, s.URL)
		}
		return urls, cobra.ShellCompDirectiveNoSpace | cobra.ShellCompDirectiveNoFileComp
	}))
}

// must is for errors that only a slip in this program can cause.
func must(err error) {
	if err != nil {
		panic(err)
	}
}

// given reports whether the user named a store, in whatever way.
func (s *storeFlags) given() bool {
	_, set := os.LookupEnv("HASP_URL")
	return s.url != "" || s.file != "" || set
}

// config returns where the locks are kept. It warns about a password that
// every user of the host can read.
func (a *app) config(cmd *cobra.Command) (hasp.Config, error) {
	s := &a.store
	if err := exclusive(cmd, "url", "config"); err != nil {
		return hasp.Config{}, err
	}
	for _, name := range []string{"url", "config"} {
		if f := cmd.Flag(name); f.Changed && f.Value.String() == "" {
			return hasp.Config{}, usagef("--%s is empty", name)
		}
	}
	raw := s.url
	switch {
	case s.file != "":
		c, err := readConfig(s.file)
		s.learn(c)
		return c, err
	case raw == "":
		var set bool
		raw, set = os.LookupEnv("HASP_URL")
		switch {
		case !set:
			raw = defaultURL
		case raw == "":
			// A variable that was lost on its way, perhaps. Files of this host would
			// exclude no other host.
			return hasp.Config{}, usagef("HASP_URL is empty: give it a URL, or unset it for %s", defaultURL)
		}
	}
	c, err := hasp.ParseURL(raw)
	s.learn(c)
	if err != nil {
		return c, err
	}
	if s.url != "" && len(s.secret) > 0 && !conformance.Child() {
		a.complain("warning: --url holds a password, which other users of this host can read in the process list; HASP_URL or --config hides it")
	}
	return c, registered(c)
}

// registered refuses a strategy that this program does not have. The library
// would suggest an import.
func registered(c hasp.Config) error {
	all := hasp.Strategies()
	switch {
	case slices.Contains(all, c.Strategy):
		return nil
	case c.Strategy == "":
		return usagef("no strategy given (want one of %s)", strings.Join(all, ", "))
	case strings.ContainsAny(c.Strategy, "@:/"): // a URL, perhaps, and then with a password
		return usagef("the name of the strategy is none (want one of %s); a URL goes into nodes", strings.Join(all, ", "))
	}
	if c.Strategy == "unix" || strings.HasPrefix(c.Strategy, "redis") {
		var urls []string
		for _, s := range known() {
			if strings.Contains(s.URL, "+") {
				urls = append(urls, s.Name+"+"+c.Strategy+"://…")
			}
		}
		return usagef("%s is a transport, which follows the strategy: want %s", quote(c.Strategy), strings.Join(urls, ", "))
	}
	return usagef("unknown strategy %s (want one of %s)", quote(c.Strategy), strings.Join(all, ", "))
}

// exclusive refuses two flags that were both given.
func exclusive(cmd *cobra.Command, one, other string) error {
	if cmd.Flag(one).Changed && cmd.Flag(other).Changed {
		return usagef("--%s and --%s cannot both be given", one, other)
	}
	return nil
}

// open opens the store that the flags name.
func (a *app) open(ctx context.Context, cmd *cobra.Command, o *hasp.Options) (*hasp.Client, error) {
	c, err := a.config(cmd)
	if err != nil {
		return nil, err
	}
	client, err := c.Open(ctx, o)
	if err == nil && c.Strategy == "memlock" && cmd.Name() == "run" {
		a.complain("warning: memlock keeps locks inside this process and excludes no other; filelock:// does")
	}
	return client, err
}

// withClient runs f with a Client on the store that the flags name, under a
// context that SIGINT and SIGTERM end.
func (a *app) withClient(cmd *cobra.Command, doing string, f func(context.Context, *hasp.Client) error) error {
	ctx, stop := interruptible(cmd.Context())
	defer stop()
	client, err := a.open(ctx, cmd, &hasp.Options{Owner: owner(doing)})
	if err != nil {
		return causeOf(ctx, err)
	}
	defer client.Close()
	return causeOf(ctx, f(ctx, client))
}

// maxConfig is more than any configuration has.
const maxConfig = 1 << 20

// readSome reads a file, which may be one without an end.
func readSome(file string) ([]byte, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxConfig+1))
	if err == nil && len(b) > maxConfig {
		err = errors.New("more than a configuration can be")
	}
	return b, err
}

// readConfig reads a YAML file, whose every field must be known.
func readConfig(file string) (hasp.Config, error) {
	b, err := readSome(file)
	if err != nil {
		var path *os.PathError
		if errors.As(err, &path) {
			err = path.Err
		}
		return hasp.Config{}, usagef("--config %s: %w", quote(file), err)
	}
	var c hasp.Config
	d := yaml.NewDecoder(bytes.NewReader(b))
	d.KnownFields(true)
	if err := d.Decode(&c); err != nil {
		return hasp.Config{}, usagef("--config %s: %s", quote(file), yamlError(err))
	}
	if err := d.Decode(new(any)); !errors.Is(err, io.EOF) {
		return hasp.Config{}, usagef("--config %s: want one YAML document", quote(file))
	}
	if err := registered(c); err != nil {
		return c, usagef("--config %s: %w", quote(file), err)
	}
	return c, nil
}

// yaml quotes the beginning of a value it cannot take, which may be that of
// a password, and all of one that begins with an asterisk or an exclamation
// mark, and names fields in terms of Go.
var (
	yamlValue   = regexp.MustCompile("(?s)(cannot (?:unmarshal|decode)) (!.*?) `.*` (into|as)")
	yamlTags    = regexp.MustCompile(`^!!(map|seq|str|int|float|bool|null|timestamp|binary|merge)$`)
	yamlAlias   = regexp.MustCompile(`unknown anchor '.*' referenced`)
	yamlUnknown = regexp.MustCompile(`field (.+) not found in type \S+`)
	yamlType    = strings.NewReplacer("!!map", "a mapping", "!!seq", "a list", "!!str", "a string", "!!int", "a number",
		"!!bool", "a boolean", "!!null", "nothing", "hasp.Config", "the configuration", "hasp.Params", "params: NAME: VALUE",
		"[]string", "a list of strings", "cannot unmarshal", "cannot take", "cannot decode", "cannot take")
)

func yamlError(err error) string {
	if errors.Is(err, io.EOF) {
		return "the file is empty; want strategy, nodes and params"
	}
	texts := []string{strings.TrimPrefix(err.Error(), "yaml: ")}
	var te *yaml.TypeError
	if errors.As(err, &te) {
		texts = te.Errors
	}
	for i, text := range texts {
		texts[i] = yamlValue.ReplaceAllStringFunc(text, func(all string) string {
			part := yamlValue.FindStringSubmatch(all)
			if !yamlTags.MatchString(part[2]) {
				part[2] = "what begins with !"
			}
			return strings.Join(part[1:], " ")
		})
	}
	text := strings.Join(texts, "; ")
	text = yamlAlias.ReplaceAllString(text, "a value that begins with * must be quoted")
	text = yamlUnknown.ReplaceAllString(text, `unknown field "$1" (want strategy, nodes, params)`)
	return yamlType.Replace(text)
}

// learn remembers the passwords in c.
func (s *storeFlags) learn(c hasp.Config) {
	for _, node := range c.Nodes {
		_, rest, ok := strings.Cut(node, "://")
		at := strings.LastIndex(rest, "@")
		if !ok || at < 0 {
			continue
		}
		if _, pw, ok := strings.Cut(rest[:at], ":"); ok && pw != "" {
			s.secret = append(s.secret, pw)
			if clear, err := url.PathUnescape(pw); err == nil && clear != pw {
				s.secret = append(s.secret, clear)
			}
		}
	}
	for name, value := range c.Params {
		if strings.Contains(name, "password") && value != "" {
			s.secret = append(s.secret, value)
		}
	}
}

// redact takes the store's passwords out of text. The library's errors have
// none; what a server or a system call says is not in its hands.
func (s *storeFlags) redact(text string) string {
	for _, pw := range s.secret {
		if len(pw) < 4 { // it would be found in the middle of words
			text = strings.ReplaceAll(text, ":"+pw+"@", ":xxxxx@")
		} else {
			text = strings.ReplaceAll(text, pw, "xxxxx")
		}
	}
	return text
}

// owner is the label of this process for people who look into the store:
// host/pid/doing.
func owner(doing string) string {
	host, err := os.Hostname()
	if err != nil {
		host = "localhost"
	}
	return fmt.Sprintf("%s/%d/%s", host, os.Getpid(), doing)
}

// program is the name of a command without its directory.
func program(path string) string { return filepath.Base(path) }
