package main

import (
	"context"
	"errors"
	"time"
)

// quorum sends only the commands of a lock on five nodes. It asks all nodes at
// once and returns after three answers. Unlock releases late grants.
type quorum struct{ nodes []locker }

type quorumLock struct {
	acquired []chan held // one for each node: its grant, or nil
}

func openQuorum(ctx context.Context, s stores, term time.Duration) (locker, error) {
	q := &quorum{}
	for _, url := range s.Five {
		l, err := openBare(false, 0)(ctx, stores{One: url}, term)
		if err != nil {
			q.close()
			return nil, err
		}
		q.nodes = append(q.nodes, l)
	}
	return q, nil
}

func (q *quorum) lock(ctx context.Context, key string) (held, error) {
	l := &quorumLock{make([]chan held, len(q.nodes))}
	answers := make(chan error, len(q.nodes))
	for i, node := range q.nodes {
		acquired := make(chan held, 1)
		l.acquired[i] = acquired
		go func() {
			ctx, cancel := bounded(ctx)
			defer cancel()
			h, err := node.lock(ctx, key)
			acquired <- h
			answers <- err
		}()
	}
	if err := most(answers, len(q.nodes)); err != nil {
		_ = l.Unlock(ctx)
		return nil, err
	}
	return l, nil
}

func (l *quorumLock) Unlock(ctx context.Context) error {
	answers := make(chan error, len(l.acquired))
	for _, acquired := range l.acquired {
		go func() {
			ctx, cancel := bounded(ctx)
			defer cancel()
			h := <-acquired // a release must not overtake its own acquire
			if h == nil {
				answers <- errTaken
				return
			}
			answers <- h.Unlock(ctx)
		}()
	}
	return most(answers, len(l.acquired))
}

// most returns when more than half of n have succeeded, or no longer can.
func most(answers <-chan error, n int) error {
	var yes int
	var no []error
	for {
		if err := <-answers; err == nil {
			yes++
		} else {
			no = append(no, err)
		}
		switch {
		case yes > n/2:
			return nil
		case len(no) >= n-n/2:
			return errors.Join(no...)
		}
	}
}

// bounded returns a context for calls that outlive their caller.
func bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
}

func (q *quorum) close() {
	for _, n := range q.nodes {
		n.close()
	}
}
