package cli

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/cli/text"
)

// readConfig reads a YAML file and refuses unknown fields. Its errors show no
// value of the file, because any value may be a password.
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
	if err := d.Decode(new(any)); !errors.Is(err, io.EOF) {
		return c, errors.New("want one YAML document")
	}
	return c, registered(c)
}

// wantConfig is the form of a configuration.
const wantConfig = `want "strategy: NAME", "nodes: [URL, …]" and "params: {NAME: VALUE, …}"`

var unknownField = regexp.MustCompile(`field (.+) not found in type`)

// yamlError returns err without the values that package yaml quotes, and without
// its names of Go types.
func yamlError(err error) error {
	var te *yaml.TypeError
	switch {
	case errors.Is(err, io.EOF):
		return errors.New("the file is empty; " + wantConfig)
	case errors.As(err, &te):
		line, what, _ := strings.Cut(te.Errors[0], ": ")
		if m := unknownField.FindStringSubmatch(what); m != nil {
			return fmt.Errorf("%s: unknown field %q (want strategy, nodes, params)", line, m[1])
		}
		if strings.HasPrefix(what, "mapping key") {
			return errors.New(te.Errors[0])
		}
		return errors.New(line + ": " + wantConfig)
	case strings.Contains(err.Error(), "anchor '"), strings.Contains(err.Error(), "`"): // its name, or the value of a tag
		return errors.New("a value that begins with * or ! must be quoted")
	}
	return errors.New(strings.TrimPrefix(err.Error(), "yaml: "))
}
