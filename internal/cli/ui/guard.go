package ui

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
)

// guard refuses requests without the token, and requests from pages of other sites. A page of
// another site must not read the locks, even if its host name resolves to this server (DNS
// rebinding). It must not show this page in a frame either.
type guard struct {
	hosts    []string // the names of this server, in lower case
	loopback bool     // only this host can reach the server
	token    string   // empty if browsers need no token
	cookie   string   // the name of the cookie that replaces the token
}

// policy is the Content-Security-Policy. All parts of the page must come from this server, and the
// page's script cannot turn text into markup.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"

// newGuard returns the guard of a server with these options.
func newGuard(o Options) guard {
	host, port, _ := net.SplitHostPort(o.Listen)
	g := guard{token: o.Token, loopback: IsLoopback(host)}
	for _, name := range append([]string{"localhost", host}, o.Hosts...) {
		if name != "" {
			g.hosts = append(g.hosts, strings.ToLower(name))
		}
	}

	// A browser sends a cookie to all ports of a host. Put the port into the name, so that each
	// hasp ui of a host has its own cookie.
	g.cookie = "hasp_ui_" + port
	return g
}

// IsLoopback reports whether host is "localhost" or a loopback address, which other hosts
// cannot reach.
func IsLoopback(host string) bool {
	addr, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && addr.IsLoopback()
}

// admit reports whether to serve a request. It sets the headers that all answers have. If admit
// refuses the request, it also sends the answer.
func (g *guard) admit(w http.ResponseWriter, r *http.Request) bool {
	h := w.Header()
	h.Set("Content-Security-Policy", policy)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("X-Frame-Options", "DENY")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Cache-Control", "no-store")

	switch {
	case r.Method != http.MethodGet && r.Method != http.MethodHead:
		h.Set("Allow", "GET, HEAD")
		http.Error(w, "this page is read-only: use GET", http.StatusMethodNotAllowed)
		return false
	case !g.isMine(r.Host):
		http.Error(w, "unknown host name: start hasp ui with --host and this name", http.StatusMisdirectedRequest)
		return false
	case !sameOrigin(r):
		http.Error(w, "requests of other sites are refused: type the address into the browser", http.StatusForbidden)
		return false
	}

	return g.token == "" || g.authorized(w, r)
}

// isMine reports whether a Host header names this server, and not another site. It accepts the
// names of the server. It also accepts every IP address, because another site can only make a name
// of its own resolve to this server. On a loopback listener, it accepts only loopback addresses.
func (g *guard) isMine(host string) bool {
	name := strings.ToLower((&url.URL{Host: host}).Hostname())
	if addr, err := netip.ParseAddr(name); err == nil && (addr.IsLoopback() || !g.loopback) {
		return true
	}
	return slices.Contains(g.hosts, name)
}

// sameOrigin reports whether a request comes from this page or from no page. It relies on headers
// that browsers add and that scripts cannot change.
func sameOrigin(r *http.Request) bool {
	switch r.Header.Get("Sec-Fetch-Site") {
	case "", "same-origin", "none": // "" is from an old browser or another program; "none" is typed
	default:
		return false
	}

	origin := r.Header.Get("Origin")
	if origin == "" {
		return true
	}
	u, err := url.Parse(origin)
	return err == nil && u.Host != "" && strings.EqualFold(u.Host, r.Host)
}

// authorized reports whether to serve a request: it has the token as "Authorization: Bearer TOKEN",
// or has the cookie. Otherwise authorized sends the answer itself. If the request has ?token=TOKEN,
// the answer is the cookie and a redirect to the address without the token. So the history of the
// browser does not keep the token. If not, the answer is an error.
func (g *guard) authorized(w http.ResponseWriter, r *http.Request) bool {
	bearer, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if ok && equal(bearer, g.token) {
		return true
	}

	// If the address has ?token=, go on to the redirect even with the cookie, because the redirect
	// removes the token.
	c, err := r.Cookie(g.cookie)
	hasPass := err == nil && equal(c.Value, g.pass())
	if hasPass && !r.URL.Query().Has("token") {
		return true
	}

	if given := r.URL.Query().Get("token"); given != "" && equal(given, g.token) {
		http.SetCookie(w, &http.Cookie{
			Name:     g.cookie,
			Value:    g.pass(),
			Path:     "/",
			HttpOnly: true,
			SameSite: http.SameSiteStrictMode,
			Secure:   r.TLS != nil,
		})

		w.Header().Set("Location", "/")
		w.WriteHeader(http.StatusSeeOther)
		return false
	}

	w.Header().Set("WWW-Authenticate", "Bearer")
	http.Error(w, "a token is needed: add ?token= and the token to the address", http.StatusUnauthorized)
	return false
}

// pass returns the value of the cookie, a hash of the token. Different tokens have different
// values, and a value does not reveal its token.
func (g *guard) pass() string {
	m := hmac.New(sha256.New, []byte(g.token))
	m.Write([]byte("hasp ui cookie"))
	return hex.EncodeToString(m.Sum(nil))
}

// equal compares two secrets. The time for that depends only on the lengths of the secrets.
func equal(a, b string) bool { return hmac.Equal([]byte(a), []byte(b)) }
