package fairlock

import "time"

// beginLocked counts an activity that Close waits for; wg.Done ends it. It returns
// false once Close has begun. The caller holds mu.
func (d *Driver) beginLocked() bool {
	if d.closed {
		return false
	}
	d.wg.Add(1)
	return true
}

func (d *Driver) begin() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.beginLocked()
}

// closing is how long Close waits for calls in flight. After it has cancelled
// them, it waits as long again.
const closing = time.Second

// Close ends the driver's background work, and closes the connections of a Driver
// that was opened by URL.
func (d *Driver) Close() error {
	d.mu.Lock()
	d.closed = true
	for _, l := range d.lines {
		l.stop()
	}
	d.mu.Unlock()
	d.end()
	done := make(chan struct{})
	go func() {
		d.wg.Wait()
		close(done)
	}()
	within := func() {
		t := time.NewTimer(closing)
		defer t.Stop()
		select {
		case <-done:
		case <-t.C:
		}
	}
	within()
	d.cut()
	err := d.store.Close()
	within()
	return err
}
