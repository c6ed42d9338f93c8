package cli

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"

	"go.yaml.in/yaml/v3"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/cli/text"
)

// readConfig reads a YAML file. It refuses unknown fields, and a strategy that is not registered.
// It returns what it has read even with an error. Its errors never show a value of the file that
// may be a password.
func readConfig(file string) (c hasp.Config, err error) {
	defer func() {
		if err != nil {
			err = usagef("--config %s: %w", text.Quote(file), err)
		}
	}()

	b, err := os.ReadFile(file)
	if err != nil {
		return c, err
	}

	d := yaml.NewDecoder(bytes.NewReader(b))
	d.KnownFields(true)
	if err := d.Decode(&c); err != nil {
		return c, yamlError(err)
	}
	if err := d.Decode(new(any)); !errors.Is(err, io.EOF) { // there is a second document
		return c, errors.New("want one YAML document")
	}
	return c, checkStrategy(c)
}

// wantConfig describes the form of a configuration.
const wantConfig = `want "strategy: NAME", "nodes: [URL, …]" and "params: {NAME: VALUE, …}", ` +
	`each once; quote a value that begins with * or !`

var (
	lineOf       = regexp.MustCompile(`line \d+`)
	unknownField = regexp.MustCompile(`field (\S+) not found in type`)
)

// yamlError returns an error with the line and the unknown field, if err names them. It drops the
// rest of err's text, which may quote values, and which contains names of Go types.
func yamlError(err error) error {
	what := wantConfig
	if m := unknownField.FindStringSubmatch(err.Error()); m != nil {
		what = fmt.Sprintf("unknown field %q (want strategy, nodes, params)", m[1])
	}
	if line := lineOf.FindString(err.Error()); line != "" {
		what = line + ": " + what
	}
	return errors.New(what)
}
