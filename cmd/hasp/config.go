package main

import (
	"bytes"
	"errors"
	"io"
	"os"
	"regexp"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/cmd/hasp/internal/text"
)

// maxConfig is larger than any configuration. The file may be endless, such as
// /dev/zero.
const maxConfig = 1 << 20

// readConfig reads a YAML file and refuses unknown fields. Its errors show no
// value of the file, because any value may be a password.
func readConfig(file string) (hasp.Config, error) {
	var c hasp.Config
	err := decodeConfig(file, &c)
	if err == nil {
		err = registered(c)
	}
	if err != nil {
		var path *os.PathError
		if errors.As(err, &path) { // it repeats the name, unquoted
			err = path.Err
		}
		err = usagef("--config %s: %w", text.Quote(file), err)
	}
	return c, err
}

func decodeConfig(file string, c *hasp.Config) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxConfig+1))
	if err != nil {
		return err
	}
	if len(b) > maxConfig {
		return errors.New("the file is larger than any configuration")
	}

	d := yaml.NewDecoder(bytes.NewReader(b))
	d.KnownFields(true)
	if err := d.Decode(c); err != nil {
		return yamlError(err)
	}
	if err := d.Decode(new(any)); !errors.Is(err, io.EOF) {
		return errors.New("want one YAML document")
	}
	return nil
}

// Parts of the yaml package's errors. It quotes the beginning of a value that it
// cannot decode. It quotes the whole of an unknown tag or anchor, which is also
// a value that begins with an unquoted ! or *.
var (
	yamlValue    = regexp.MustCompile("(?s)(cannot (?:unmarshal|decode)) (!.*?) `.*` (into|as)")
	yamlTags     = regexp.MustCompile(`^!!(map|seq|str|int|float|bool|null|timestamp|binary|merge)$`)
	yamlAlias    = regexp.MustCompile(`unknown anchor '.*' referenced`)
	yamlMismatch = regexp.MustCompile(`cannot (?:unmarshal|decode) (.+) (?:into|as a) (.+)`)
	yamlUnknown  = regexp.MustCompile(`field (.+) not found in type \S+`)
	yamlType     = strings.NewReplacer("!!map", "a mapping", "!!seq", "a list", "!!str", "a string", "!!int", "a number",
		"!!bool", "a boolean", "!!null", "nothing", "hasp.Config", "strategy, nodes and params", "hasp.Params", "params: {NAME: VALUE}",
		"[]string", "a list of strings", "want string", "want a string")
)

// yamlError returns err without the values in it, and in terms of YAML rather
// than of Go.
func yamlError(err error) error {
	if errors.Is(err, io.EOF) {
		return errors.New("the file is empty; want strategy, nodes and params")
	}
	texts := []string{strings.TrimPrefix(err.Error(), "yaml: ")}
	var te *yaml.TypeError
	if errors.As(err, &te) {
		texts = te.Errors
	}
	for i, t := range texts {
		t = yamlValue.ReplaceAllStringFunc(t, func(all string) string {
			part := yamlValue.FindStringSubmatch(all)
			if !yamlTags.MatchString(part[2]) {
				part[2] = "a value that begins with !"
			}
			return strings.Join(part[1:], " ")
		})
		t = yamlMismatch.ReplaceAllString(t, "want $2, got $1")
		t = yamlAlias.ReplaceAllString(t, "a value that begins with * must be quoted")
		t = yamlUnknown.ReplaceAllString(t, `unknown field "$1" (want strategy, nodes, params)`)
		texts[i] = yamlType.Replace(t)
	}
	return errors.New(strings.Join(texts, "; "))
}
