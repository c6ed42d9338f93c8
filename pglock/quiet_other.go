//go:build !unix

package pglock

import "net"

// nothingToRead reports true: the first statement on a connection that the server has ended
// fails.
func nothingToRead(net.Conn) bool { return true }
