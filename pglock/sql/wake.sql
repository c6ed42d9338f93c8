-- wake sends the message to the Client of the waiter wakes. The value of this column means nothing.
CASE WHEN wakes IS NOT NULL THEN pg_notify($2::text || '_' || (abs(wakes) >> 32), wakes::text) END IS NULL
