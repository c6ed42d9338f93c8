package acceptance

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/hasplock/hasp"
)

func list(ctx context.Context, c *hasp.Client, prefix string) ([]string, error) {
	keys := map[string]bool{}
	for e, err := range c.List(ctx, prefix) {
		if err != nil {
			return nil, err
		}
		keys[e.Key] = true
	}
	return slices.Sorted(maps.Keys(keys)), nil
}

// lists is the use of a place that makes a list.
func lists(ctx context.Context, url, name string, _ time.Duration) error {
	c, err := hasp.Open(ctx, url, nil)
	if err != nil {
		return err
	}
	defer c.Close()
	l, err := c.TryLock(ctx, name, hasp.WithoutRenewal())
	if err != nil {
		return err
	}
	keys, err := list(ctx, c, "")
	if err == nil && !slices.Contains(keys, name) {
		err = fmt.Errorf("not listed, among %q", strings.Join(keys, " "))
	}
	return errors.Join(err, l.Unlock(context.WithoutCancel(ctx)))
}
