package hasp

// Shared callers of a key do not stand in its line. Each asks the store itself, and has a
// hold of its own. If a Client handed its shared holds on to new callers, it would never
// leave the key to a caller of another Client that wants it alone.
//
// So that the code for a line serves both, each shared caller has a line of its own, in
// which it is the head from the beginning, and which nobody joins.

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
