package main

import (
	"encoding/gob"
	"fmt"
	"io"
	"os/exec"
	"time"
)

// crew are worker processes.
type crew []*hand

type hand struct {
	cmd *exec.Cmd
	in  io.Closer
	out *gob.Decoder
	ask *gob.Encoder
}

// hire starts n of them, which dismiss ends.
func hire(n int) (c crew, err error) {
	for range n {
		cmd, in, out, err := another("worker")
		if err != nil {
			c.dismiss()
			return nil, err
		}
		c = append(c, &hand{cmd, in, gob.NewDecoder(out), gob.NewEncoder(in)})
	}
	return c, nil
}

func (c crew) dismiss() {
	for _, h := range c {
		h.in.Close()
		_ = h.cmd.Process.Kill()
		_ = h.cmd.Wait()
	}
}

// tell gives an order each to the first workers, and returns their reports.
func (c crew) tell(orders ...order) ([]report, error) {
	for i, o := range orders {
		if err := c[i].ask.Encode(o); err != nil {
			return nil, err
		}
	}
	reports := make([]report, len(orders))
	for i := range orders {
		kill := time.AfterFunc(patience, func() { c[i].cmd.Process.Kill() })
		err := c[i].out.Decode(&reports[i])
		kill.Stop()
		if err != nil {
			return nil, fmt.Errorf("a worker is gone: %w", err)
		}
		if e := reports[i].Err; e != "" {
			return nil, fmt.Errorf("a worker: %s", e)
		}
	}
	return reports, nil
}

// same is the same order for n workers.
func same(o order, n int) []order {
	orders := make([]order, n)
	for i := range orders {
		orders[i] = o
	}
	return orders
}
