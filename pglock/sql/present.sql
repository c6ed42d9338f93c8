-- present is true for a waiter w that has asked in the last 3 s.
w.until > clock_timestamp() AND w.until <= clock_timestamp() + interval '3 s'
