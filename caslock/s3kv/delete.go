package s3kv

import (
	"context"
	"crypto/rand"
	"errors"
	"strings"

	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/hasplock/hasp/caslock"
)

// isTomb reports whether e is an empty object. In a store whose DELETE is of no use, it takes the
// place of a deleted one. No record is empty. An If-Match with the ETag of a tomb is safe although
// all tombs have the same one: it means that the name is absent, as If-None-Match does.
func isTomb(e caslock.Entry) bool { return e.Version != "" && len(e.Value) == 0 }

// probePrefix begins the names that only one driver uses, once: package caslock refuses such keys.
const probePrefix = "caslock-probe-"

// Delete deletes the object of name if it has this ETag. If the store has no DELETE that can do so,
// Delete replaces the object by an empty one.
func (s *Store) Delete(ctx context.Context, name, at string) error {
	fit, err := s.canDelete(ctx)
	if err != nil {
		return err
	}

	object := s.object(name)
	switch {
	case fit:
		return s.delete(ctx, object, &at)
	case strings.HasPrefix(name, probePrefix):
		// No other caller has the name, so the two calls need not be one, and nothing stays.
		if e, err := s.Get(ctx, name); err != nil || e.Version != at {
			return errors.Join(err, caslock.ErrConflict)
		}
		return s.delete(ctx, object, nil)
	}

	_, err = s.put(ctx, object, nil, at)
	return err
}

// delete sends a DELETE with a condition, or without one if at is nil.
func (s *Store) delete(ctx context.Context, object, at *string) error {
	in := &s3.DeleteObjectInput{Bucket: &s.bucket, Key: object, IfMatch: at}
	_, err := s.client.DeleteObject(ctx, in, once)
	return answer(err)
}

// canDelete reports whether the DELETE of the store can be used. Several callers may find that out
// at the same time.
func (s *Store) canDelete(ctx context.Context) (bool, error) {
	if fit := s.deletes.Load(); fit != nil {
		return *fit, nil
	}
	fit, err := s.probe(ctx, s.object(probePrefix+rand.Text()))
	if err == nil {
		s.deletes.Store(&fit)
	}
	return fit, err
}

// probe reports whether the store obeys If-Match in a DELETE, and then lets the name be created
// again. It uses an object that no other caller has.
func (s *Store) probe(ctx context.Context, object *string) (fit bool, err error) {
	value := []byte("{}")
	at, err := s.put(ctx, object, value, "")
	if err != nil {
		return false, err
	}

	other := `"00000000000000000000000000000000"`
	switch err := s.delete(ctx, object, &other); {
	case err == nil: // the store ignores the condition
		return false, nil
	case codeOf(err) == "NotImplemented": // answer wraps it
		return false, s.delete(ctx, object, nil)
	case !errors.Is(err, caslock.ErrConflict):
		return false, err
	}

	if err := s.delete(ctx, object, &at); err != nil {
		return false, err
	}
	at, err = s.put(ctx, object, value, "")
	if errors.Is(err, caslock.ErrConflict) { // because of the delete marker
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return true, s.delete(ctx, object, &at)
}
