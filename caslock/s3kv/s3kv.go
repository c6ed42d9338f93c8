// Package s3kv keeps locks in objects of an S3 bucket, which must exist. It is the strategy s3:
//
//	hasp.Open(ctx, "s3://bucket/prefix?region=eu-central-1", nil)
//	hasp.Open(ctx, "s3://bucket/prefix?endpoint=https://host:9000", nil)
//
// The names of its objects begin with "prefix/". The credentials come from the default chain of the
// AWS SDK: the variables AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, the files in ~/.aws, or the
// role of the machine. AWS_CA_BUNDLE names the certificate authority of a private server. The
// parameters:
//
//   - region: the region of the bucket. The default comes from AWS_REGION or ~/.aws. It is
//     us-east-1 if there is an endpoint.
//   - endpoint: the URL of a server other than Amazon S3.
//   - use_path_style: whether the bucket is in the path of a URL and not in its host. The default
//     is true if there is an endpoint.
//   - profile: the profile in ~/.aws.
//   - clock: true if the clocks of the store's servers agree within a second. Then a TryLock of a
//     new process gets the key of a dead holder (see package caslock). The age of a record is the
//     Date of the reply less Last-Modified, less two seconds. The default is false.
//
// # Servers
//
// The store must obey If-None-Match and If-Match in PUT. A store that ignores one of them or
// answers 501 to it is refused. These were tried: versitygw 1.8.0, with the tests of this package.
// By their documentation, Amazon S3 (general purpose buckets), MinIO and Cloudflare R2 are fit.
// Use the bucket in only one Region, without a Multi-Region Access Point, whose buckets check
// conditions alone.
//
// A key that has been free for an hour is removed by a DELETE with If-Match, which Amazon S3 obeys.
// Some stores, such as MinIO and R2, ignore this condition or lack it, and some answer 412 to the
// PUT of a name whose last version is a delete marker. In such a store, the object of each key
// stays, because a plain DELETE could remove a new hold. A lifecycle rule may remove old versions
// of objects, but no current one.
//
// Each poll costs money, so set the parameter poll to some seconds. The program needs
// s3:GetObject, s3:PutObject, s3:DeleteObject, and s3:ListBucket, without which S3 answers 403 for
// a missing object.
package s3kv

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/aws/middleware"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/caslock"
	"github.com/hasplock/hasp/caslock/internal/adapter"
	"github.com/hasplock/hasp/caslock/internal/parallel"
)

// maxValue is how many bytes of an object are read. A record of 10,000 shared holds is shorter. A
// longer object is of another program, and its first bytes are no record either.
const maxValue = 4 << 20

// scanners is how many objects are read at the same time by a Scan.
const scanners = 32

// Client is what a Store needs of an [s3.Client].
type Client interface {
	GetObject(
		context.Context, *s3.GetObjectInput, ...func(*s3.Options),
	) (*s3.GetObjectOutput, error)
	PutObject(
		context.Context, *s3.PutObjectInput, ...func(*s3.Options),
	) (*s3.PutObjectOutput, error)
	DeleteObject(
		context.Context, *s3.DeleteObjectInput, ...func(*s3.Options),
	) (*s3.DeleteObjectOutput, error)
	ListObjectsV2(
		context.Context, *s3.ListObjectsV2Input, ...func(*s3.Options),
	) (*s3.ListObjectsV2Output, error)
}

// Store keeps its entries in objects of a bucket, whose names begin with a prefix. It is safe for
// concurrent use.
type Store struct {
	client Client
	bucket string
	prefix string
	clock  bool // the servers' clocks agree within a second
}

// New returns a store in a bucket, which must exist. Names of its objects begin with prefix, such
// as "locks/". Set clock only if the servers' clocks agree. The retries of client are not used.
func New(client Client, bucket, prefix string, clock bool) (*Store, error) {
	if adapter.IsNil(client) || bucket == "" || len(prefix) > 700 {
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

// codeOf returns the code of S3's answer, or "".
func codeOf(err error) string {
	var api interface{ ErrorCode() string }
	if errors.As(err, &api) {
		return api.ErrorCode() // the SDK derives a code from the status of an empty answer
	}
	return ""
}

// storeError returns the error that a Store returns for an error of S3. It is
//   - caslock.ErrConflict if the object has another version or does not exist, or if another write
//     in flight has prevented this write;
//   - backend.ErrInvalid if the store does not know If-Match or If-None-Match;
//   - err itself otherwise, also if err is nil.
func storeError(err error) error {
	switch codeOf(err) {
	case "PreconditionFailed", // 412: another version
		"NoSuchKey", "NotFound", // 404: no object
		"ConditionalRequestConflict", "OperationAborted", "Conflict": // 409: another write
		return caslock.ErrConflict
	case "NotImplemented": // 501
		return fmt.Errorf("s3kv: %w: the store lacks a condition, so it cannot keep locks: %w",
			backend.ErrInvalid, err)
	}

	return err
}

// Get reads the object of name.
func (s *Store) Get(ctx context.Context, name string) (caslock.Entry, error) {
	return s.get(ctx, s.object(name))
}

// get reads the object with this full name. If there is no such object, the Entry is zero.
func (s *Store) get(ctx context.Context, object *string) (caslock.Entry, error) {
	in := &s3.GetObjectInput{Bucket: &s.bucket, Key: object}
	out, err := s.client.GetObject(ctx, in, once)
	err = storeError(err)
	if errors.Is(err, caslock.ErrConflict) {
		return caslock.Entry{}, nil // a GET has no condition, so this says that there is no object
	}
	if err != nil {
		return caslock.Entry{}, err
	}
	defer out.Body.Close()

	var e caslock.Entry
	date, known := middleware.GetServerTime(out.ResultMetadata) // the Date of the reply
	if s.clock && known && out.LastModified != nil {
		// The age must not be too large. Last-Modified has whole seconds, so the write may have
		// been up to a second later. The two times may come from clocks that differ by another
		// second.
		e.Age = date.Sub(*out.LastModified) - 2*time.Second
	}

	e.Value, err = io.ReadAll(io.LimitReader(out.Body, maxValue))
	if err != nil {
		return caslock.Entry{}, err
	}
	e.Version, err = version(out.ETag)
	return e, err
}

var errNoETag = errors.New("the answer has no ETag, so that is no S3 server")

// version returns the version of an object with this ETag. An ETag is a hash of the value, and a
// driver never writes a value twice, so no version comes again.
func version(etag *string) (string, error) {
	if aws.ToString(etag) == "" {
		return "", errNoETag
	}
	return *etag, nil
}

// Put writes the object of name if it has this ETag, or creates the object if at is "".
func (s *Store) Put(ctx context.Context, name string, value []byte, at string) (string, error) {
	in := &s3.PutObjectInput{Bucket: &s.bucket, Key: s.object(name), Body: bytes.NewReader(value)}
	if at == "" {
		in.IfNoneMatch = aws.String("*")
	} else {
		in.IfMatch = &at
	}

	out, err := s.client.PutObject(ctx, in, once)
	if err != nil {
		return "", storeError(err)
	}
	return version(out.ETag)
}

// probePrefix begins the names that only one driver uses, once: package caslock refuses such keys.
const probePrefix = "caslock-probe-"

// Delete deletes the object of name if it has this ETag. If the store does not know If-Match in a
// DELETE, Delete removes only the object of a probe, whatever its ETag. It removes no other object,
// because that could be a new hold.
func (s *Store) Delete(ctx context.Context, name, at string) error {
	in := &s3.DeleteObjectInput{Bucket: &s.bucket, Key: s.object(name), IfMatch: &at}
	_, err := s.client.DeleteObject(ctx, in, once)

	isProbe := strings.HasPrefix(name, probePrefix)
	if codeOf(err) == "NotImplemented" && isProbe {
		// The probe deletes an old version. If that succeeds, the driver deletes no records, but
		// serves the store. The error would refuse the store, and leave the object of the probe.
		in.IfMatch = nil
		_, err = s.client.DeleteObject(ctx, in, once)
	}
	return storeError(err)
}

// Scan lists objects in the order of their names, and reads several of them at the same time. If a
// read fails, Scan returns the entries that it has read, and the first error. The list may have an
// object that is deleted before the read; then its Entry has no version, and caslock skips it.
func (s *Store) Scan(
	ctx context.Context, position string, n int,
) (es []caslock.Entry, next string, err error) {
	in := &s3.ListObjectsV2Input{
		Bucket:  &s.bucket,
		Prefix:  &s.prefix,
		MaxKeys: aws.Int32(int32(n)),
	}
	if position != "" {
		in.ContinuationToken = &position
	}

	out, err := s.client.ListObjectsV2(ctx, in, once)
	if err != nil {
		return nil, "", err
	}

	es = make([]caslock.Entry, len(out.Contents))
	errs := make([]error, len(es))
	parallel.Each(len(es), scanners, func(i int) {
		es[i], errs[i] = s.get(ctx, out.Contents[i].Key)
	})
	return es, aws.ToString(out.NextContinuationToken), cmp.Or(errs...)
}
