package hasp

// Shared callers do not wait in the line of the key. Each asks the store itself, and has a
// hold of its own. A Client that handed a shared hold from caller to caller might never let
// go of the key, and an exclusive caller of another Client would never get it.
//
// The code for lines serves shared callers too: each has a line of its own, is the head of
// it from the start, and no other caller joins.

// addReaderLocked adds the line of one more shared caller of key.
func (c *Client) addReaderLocked(key string) *line {
	ln := c.newLineLocked(key)
	ln.shared, ln.hasHead = true, true
	if c.readers == nil {
		c.readers = map[string]map[*line]bool{}
	}
	of := c.readers[key]
	if of == nil {
		of = map[*line]bool{}
		c.readers[key] = of
	}
	of[ln] = true
	return ln
}

// removeReaderLocked removes the line of a shared caller that has left.
func (c *Client) removeReaderLocked(ln *line) {
	of := c.readers[ln.key]
	delete(of, ln)
	if len(of) == 0 {
		delete(c.readers, ln.key)
	}
}
