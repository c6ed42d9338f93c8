package etcdlock

import (
	"context"
	"sync"

	"google.golang.org/grpc"
)

// stream sends requests to a member, and receives answers. It stays open as long as the member is in
// use, or until its auth token has expired. It is opened on a goroutine of its own: if a call opened
// it, the end of the call would end it.
type stream[Q, R any] struct {
	end context.CancelFunc // ends the stream

	mu   sync.Mutex    // guards out
	out  []*Q          // the requests that are not sent yet
	more chan struct{} // signals that out has grown; has room for one signal
}

// opener is the method of a gRPC client that opens a stream.
type opener[Q, R any] func(context.Context, ...grpc.CallOption) (grpc.BidiStreamingClient[Q, R], error)

// openStream opens a stream to m. The stream calls answer for each answer. At its end it calls
// ended with the reason, unless the driver is closed.
func openStream[Q, R any](
	m *member, open opener[Q, R], answer func(*R), ended func(error),
) *stream[Q, R] {
	ctx, end := context.WithCancel(m.client.Ctx())
	s := &stream[Q, R]{end: end, more: make(chan struct{}, 1)}
	m.cluster.spawn(func() { ended(s.run(ctx, open, answer)) })
	return s
}

// send sends a request. It never blocks. If the stream has ended, nothing is sent.
func (s *stream[Q, R]) send(q *Q) {
	s.mu.Lock()
	s.out = append(s.out, q)
	s.mu.Unlock()
	select {
	case s.more <- struct{}{}:
	default:
	}
}

func (s *stream[Q, R]) run(ctx context.Context, open opener[Q, R], answer func(*R)) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	defer s.end()
	conn, err := open(ctx)
	if err != nil {
		return err
	}
	wg.Go(func() { s.write(ctx, conn) })
	for {
		r, err := conn.Recv()
		if err != nil {
			return err
		}
		answer(r)
	}
}

// The method write sends the requests. If Send fails, Recv returns the reason.
func (s *stream[Q, R]) write(ctx context.Context, conn grpc.BidiStreamingClient[Q, R]) {
	for {
		select {
		case <-s.more:
		case <-ctx.Done():
			return
		}
		s.mu.Lock()
		out := s.out
		s.out = nil
		s.mu.Unlock()
		for _, q := range out {
			if conn.Send(q) != nil {
				return
			}
		}
	}
}
