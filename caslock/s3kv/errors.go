package s3kv

import (
	"context"
	"crypto/x509"
	"errors"
	"os"
	"strings"
	"syscall"

	"github.com/hasplock/hasp/caslock"
)

// diagnose returns err, the error of opening a driver, in one line with advice.
func diagnose(s *settings, err error) error {
	at := "bucket " + s.bucket
	if s.endpoint != "" {
		at += " at " + s.endpoint
	}
	text := strings.Join(strings.Fields(err.Error()), " ")
	const most = 500 // bytes; a page of a proxy may be in the text
	if len(text) > most {
		text = text[:most] + "…"
	}
	if hint := hint(s, err); hint != "" {
		text += " (" + hint + ")"
	}
	return &shown{at + ": " + text, err}
}

// shown is an error with another text.
type shown struct {
	text string
	err  error
}

func (s *shown) Error() string { return s.text }
func (s *shown) Unwrap() error { return s.err }

// hints maps the codes of S3 to advice.
var hints = map[string]string{
	"NoSuchBucket":          "check the bucket in the URL, or create it: aws s3 mb s3://bucket",
	"InvalidBucketName":     "check the bucket in the URL",
	"InvalidAccessKeyId":    checkKeys,
	"SignatureDoesNotMatch": checkKeys,
	"ExpiredToken":          "the credentials have expired: log in again, or renew them",
	"InvalidToken":          checkKeys,
	"AccessDenied":          grant,
	"Forbidden":             grant,
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

// hint returns what to do about an error of opening a driver, or "" if there is no advice.
func hint(s *settings, err error) string {
	code := codeOf(err)
	status, region := statusOf(err)
	isElsewhere := code == "PermanentRedirect" || code == "TemporaryRedirect" ||
		code == "AuthorizationHeaderMalformed"

	switch {
	case isElsewhere || status/100 == 3:
		if region == "" {
			region = "…"
		}
		return "the bucket is in another region, or has another endpoint: region=" + region
	case hints[code] != "":
		return hints[code]
	case errors.Is(err, errNoETag), status != 0 && (code == "" || code == "UnknownError"):
		return checkEndpoint
	case status == 403:
		return grant
	case errors.Is(err, caslock.ErrConflict): // an empty 404 to the first request
		return checkEndpoint
	case errors.As(err, new(x509.UnknownAuthorityError)):
		return "name the file of its certificate authority: AWS_CA_BUNDLE=/path/to/ca.pem"
	case errors.As(err, new(x509.HostnameError)):
		if s.pathStyle {
			return "name the host that the certificate is for in the parameter endpoint"
		}
		return "use_path_style=true, because the certificate is not for BUCKET.host"
	case strings.Contains(err.Error(), "server gave HTTP response to HTTPS client"):
		return "the server has no TLS: use http:// in the parameter endpoint"
	case errors.Is(err, syscall.ECONNREFUSED):
		return "nobody listens there: check the parameter endpoint"
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		return "no answer: check the parameter endpoint, and that no firewall is in between"
	}

	return ""
}
