// Package s3kv lets caslock keep locks in objects of an S3 bucket. It takes a client of the AWS
// SDK, which signs requests for any endpoint, and which brings no modules but those of AWS.
//
// The store must obey If-None-Match and If-Match in PUT, and If-Match in DELETE, as general purpose
// buckets of Amazon S3 do. caslock.New refuses a store that ignores one of them or answers 501 to
// it, because a DELETE without a condition could remove a new hold. Use the bucket in only one
// Region, without a Multi-Region Access Point, whose buckets check conditions alone.
//
// Each poll costs money, so set hasp.Options.Backoff to some seconds. The program needs
// s3:GetObject, s3:PutObject, s3:DeleteObject, and s3:ListBucket, without which S3 answers 403 for
// a missing object. A lifecycle rule may remove old versions of objects, but no current one.
//
// By default the store has no clock; package caslock says what TryLock means without one. If the
// clocks of the store's servers agree within a second, New may use them. The age of a record is
// then the Date of the reply less Last-Modified, less two seconds.
package s3kv

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/aws/middleware"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/caslock"
)

// maxValue is how many bytes of an object are read. A record of 10,000 shared holds is shorter.
const maxValue = 4 << 20

// Client is what a Store needs of an [s3.Client].
type Client interface {
	GetObject(context.Context, *s3.GetObjectInput, ...func(*s3.Options)) (*s3.GetObjectOutput, error)
	PutObject(context.Context, *s3.PutObjectInput, ...func(*s3.Options)) (*s3.PutObjectOutput, error)
	DeleteObject(context.Context, *s3.DeleteObjectInput, ...func(*s3.Options)) (*s3.DeleteObjectOutput, error)
	ListObjectsV2(context.Context, *s3.ListObjectsV2Input, ...func(*s3.Options)) (*s3.ListObjectsV2Output, error)
}

// Store keeps its entries in objects of a bucket, whose names begin with a prefix. It is safe for
// concurrent use.
type Store struct {
	client Client
	bucket string
	prefix string
	clock  bool // the servers' clocks agree
}

// New returns a store in a bucket, which must exist. Names of its objects begin with prefix, such
// as "locks/". Set clock only if the servers' clocks agree. The retries of client are not used.
func New(client Client, bucket, prefix string, clock bool) (*Store, error) {
	if client == nil || bucket == "" || len(prefix) > 700 {
		return nil, fmt.Errorf("s3kv: %w: want a client, a bucket and a prefix of 700 bytes at most",
			backend.ErrInvalid)
	}
	return &Store{client: client, bucket: bucket, prefix: prefix, clock: clock}, nil
}

// once switches off the retries of one call.
func once(o *s3.Options) { o.Retryer = aws.NopRetryer{} }

// Limits says that calls end promptly.
func (s *Store) Limits() (backend.Reach, backend.Cancellation) {
	return backend.Network, backend.CancelPrompt
}

// object returns the name of an object. It ends with .json, because ".." has a meaning in a path.
func (s *Store) object(name string) *string { return aws.String(s.prefix + name + ".json") }

// answer returns ErrConflict if the object has another version or does not exist, or if another
// write in flight has prevented this write (409).
func answer(err error) error {
	var api interface{ ErrorCode() string }
	if !errors.As(err, &api) {
		return err
	}

	switch api.ErrorCode() { // the SDK derives a code from the status of an empty answer
	case "PreconditionFailed", "NoSuchKey", "NotFound":
		return caslock.ErrConflict
	case "ConditionalRequestConflict", "OperationAborted", "Conflict":
		return caslock.ErrConflict
	case "NotImplemented":
		return fmt.Errorf("s3kv: %w: the store lacks a condition, so it cannot keep locks: %w",
			backend.ErrInvalid, err)
	}
	return err
}

// Get reads the object of name.
func (s *Store) Get(ctx context.Context, name string) (caslock.Entry, error) {
	return s.get(ctx, s.object(name))
}

func (s *Store) get(ctx context.Context, object *string) (e caslock.Entry, err error) {
	in := &s3.GetObjectInput{Bucket: &s.bucket, Key: object}
	out, err := s.client.GetObject(ctx, in, once)
	if err = answer(err); errors.Is(err, caslock.ErrConflict) {
		return e, nil // there is no object
	}
	if err != nil {
		return e, err
	}
	defer out.Body.Close()

	e.Version = aws.ToString(out.ETag)
	now, known := middleware.GetServerTime(out.ResultMetadata)
	if s.clock && known && out.LastModified != nil {
		e.Age = now.Sub(*out.LastModified) - 2*time.Second // both are whole seconds
	}
	e.Value, err = io.ReadAll(io.LimitReader(out.Body, maxValue))
	return e, err
}

// Put writes the object of name if it has this ETag, which is a hash of the value.
func (s *Store) Put(ctx context.Context, name string, value []byte, version string) (string, error) {
	in := &s3.PutObjectInput{
		Bucket: &s.bucket,
		Key:    s.object(name),
		Body:   bytes.NewReader(value),
	}
	if version == "" {
		in.IfNoneMatch = aws.String("*")
	} else {
		in.IfMatch = &version
	}

	out, err := s.client.PutObject(ctx, in, once)
	if err != nil {
		return "", answer(err)
	}
	return aws.ToString(out.ETag), nil
}

// Delete deletes the object of name if it has this ETag.
func (s *Store) Delete(ctx context.Context, name, version string) error {
	in := &s3.DeleteObjectInput{Bucket: &s.bucket, Key: s.object(name), IfMatch: &version}
	_, err := s.client.DeleteObject(ctx, in, once)
	return answer(err)
}

// Scan lists objects in the order of their names, and reads up to 16 of them at the same time.
func (s *Store) Scan(ctx context.Context, position string, n int) (es []caslock.Entry, next string, err error) {
	in := &s3.ListObjectsV2Input{
		Bucket:  &s.bucket,
		Prefix:  &s.prefix,
		MaxKeys: aws.Int32(int32(n)),
	}
	if position != "" {
		in.StartAfter = &position
	}
	out, err := s.client.ListObjectsV2(ctx, in, once)
	if err != nil {
		return nil, "", err
	}

	es = make([]caslock.Entry, len(out.Contents))
	errs := make([]error, len(out.Contents))
	slots := make(chan struct{}, 16)
	var wg sync.WaitGroup
	for i, o := range out.Contents {
		slots <- struct{}{}
		wg.Go(func() {
			es[i], errs[i] = s.get(ctx, o.Key)
			<-slots
		})
	}
	wg.Wait()

	if n := len(out.Contents); n > 0 && aws.ToBool(out.IsTruncated) {
		next = aws.ToString(out.Contents[n-1].Key)
	}
	return es, next, errors.Join(errs...)
}
