package s3kv

import (
	"crypto/x509"
	"errors"

	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"

	"github.com/hasplock/hasp/caslock"
	"github.com/hasplock/hasp/caslock/internal/adapter"
)

// diagnose returns err, the error of opening a driver, in one line with advice.
func diagnose(s *settings, err error) error {
	at := "bucket " + s.bucket + ": "
	if s.endpoint != "" {
		at = "bucket " + s.bucket + " at " + s.endpoint + ": "
	}
	return adapter.Explain(at, err, hint(s, err))
}

// hints maps the codes of S3 to advice.
var hints = map[string]string{
	"NoSuchBucket":          "check the bucket in the URL, or create it: aws s3 mb s3://bucket",
	"InvalidBucketName":     "check the bucket in the URL",
	"InvalidAccessKeyId":    checkKeys,
	"SignatureDoesNotMatch": checkKeys,
	"ExpiredToken":          "the credentials have expired: log in again, or renew them",
	"InvalidToken":          checkKeys,
	"MethodNotAllowed":      checkEndpoint,
	"XAdminUserNotFound":    checkKeys, // of versitygw
	"RequestTimeTooSkewed":  "the clock of this machine is wrong: set it",
}

const (
	checkKeys = "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the profile in ~/.aws"
	grant     = "grant s3:GetObject, s3:PutObject and s3:DeleteObject on the objects, " +
		"and s3:ListBucket on the bucket"
	checkEndpoint = "is that an S3 server? check the parameter endpoint, and that no proxy answers"
)

// hint returns what to do about an error of opening a driver, or "" if there is no advice. If
// several cases apply, the first one has the most specific advice.
func hint(s *settings, err error) string {
	code := codeOf(err)
	status, region := statusOf(err)

	// S3 names a code in each error. If there is an answer without one, it is not of S3. The SDK
	// has "UnknownError" if it finds no code.
	isOther := status != 0 && (code == "" || code == "UnknownError")

	switch {
	case status/100 == 3, code == "AuthorizationHeaderMalformed":
		// Both say that the request has gone to the wrong region.
		if region == "" {
			region = "…" // for the user to fill in
		}
		return "the bucket is in another region, or has another endpoint: region=" + region
	case hints[code] != "":
		return hints[code]
	case errors.Is(err, errNoETag), isOther:
		return checkEndpoint
	case status == 403: // with a code such as AccessDenied, which is not about the keys
		return grant
	case errors.Is(err, caslock.ErrConflict):
		// The probe's writers were all refused, although its key is new. That is so if a server
		// answers every request with an empty 404, which storeError counts as a conflict.
		return checkEndpoint
	case errors.As(err, new(x509.HostnameError)) && !s.pathStyle:
		return "use_path_style=true, because the certificate is not for BUCKET.host"
	}

	return adapter.Hint(err, "AWS_CA_BUNDLE=/path/to/ca.pem", "http:// in the parameter endpoint")
}

// statusOf returns the status of the answer that err is about, and the region of the bucket if the
// answer names it. If err is about no answer, they are 0 and "".
func statusOf(err error) (status int, region string) {
	var answer *awshttp.ResponseError
	if !errors.As(err, &answer) || answer.Response == nil {
		return 0, ""
	}
	return answer.HTTPStatusCode(), answer.Response.Header.Get("X-Amz-Bucket-Region")
}
