package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"time"
)

// crew are worker processes, and what they report.
type crew struct {
	ctx     context.Context
	end     context.CancelFunc
	workers []*member
	reports chan report
}

type member struct {
	cmd   *exec.Cmd
	tell  *json.Encoder
	ended chan struct{}
}

// hire starts n processes, which end by dismiss.
func hire(ctx context.Context, n int) (*crew, error) {
	c := &crew{reports: make(chan report)}
	c.ctx, c.end = context.WithCancel(ctx)
	for i := range n {
		if err := c.start(i); err != nil {
			c.dismiss()
			return nil, err
		}
	}
	return c, nil
}

func (c *crew) start(process int) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	m := &member{cmd: exec.Command(self), ended: make(chan struct{})}
	m.cmd.Env = append(os.Environ(), role+"=1")
	m.cmd.Stderr = os.Stderr
	in, err1 := m.cmd.StdinPipe()
	out, err2 := m.cmd.StdoutPipe()
	if err := errors.Join(err1, err2, m.cmd.Start()); err != nil {
		return err
	}
	m.tell = json.NewEncoder(in)
	c.workers = append(c.workers, m)
	go func() {
		defer close(m.ended)
		reports := json.NewDecoder(out)
		for {
			var r report
			if reports.Decode(&r) != nil {
				_ = m.cmd.Wait()
				return
			}
			for i := range r.Holds {
				r.Holds[i].Process = process
			}
			select {
			case c.reports <- r:
			case <-c.ctx.Done():
			}
		}
	}()
	return nil
}

// dismiss kills them as SIGKILL does, and returns when they have ended.
func (c *crew) dismiss() {
	c.end()
	for _, m := range c.workers {
		_ = m.cmd.Process.Kill()
	}
	for _, m := range c.workers {
		<-m.ended
	}
}

// begin gives the first processes an order each, and returns when they have
// begun.
func (c *crew) begin(orders ...order) error {
	for i, o := range orders {
		if err := c.workers[i].tell.Encode(o); err != nil {
			return err
		}
		if _, err := c.next("ready"); err != nil {
			return err
		}
	}
	return nil
}

var errQuiet = errors.New("the workers tell nothing")

// hear returns the next report that comes within d.
func (c *crew) hear(d time.Duration) (r report, err error) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case r = <-c.reports:
		if r.Err != "" {
			err = fmt.Errorf("a worker: %s", r.Err)
		}
	case <-t.C:
		err = errQuiet
	case <-c.ctx.Done():
		err = c.ctx.Err()
	}
	return r, err
}

// next returns the next report of a kind.
func (c *crew) next(what string) (report, error) {
	for {
		if r, err := c.hear(patience); err != nil || r.What == what {
			return r, err
		}
	}
}

// until returns when count holds were told or d has passed.
func (c *crew) until(d time.Duration, count int64) error {
	for end := time.Now().Add(d); count > 0; {
		r, err := c.hear(time.Until(end))
		if errors.Is(err, errQuiet) {
			return nil
		}
		if err != nil {
			return err
		}
		count -= r.More
	}
	return nil
}

// stop ends the work of the first n processes and returns their holds, in the
// order in which the key was had.
func (c *crew) stop(n int) (all []hold, err error) {
	for _, m := range c.workers[:n] {
		if err := m.tell.Encode(order{Op: "stop"}); err != nil {
			return nil, err
		}
	}
	for range n {
		r, err := c.next("done")
		if err != nil {
			return nil, err
		}
		all = append(all, r.Holds...)
	}
	slices.SortFunc(all, func(a, b hold) int { return cmp.Compare(a.Got, b.Got) })
	return all, nil
}
