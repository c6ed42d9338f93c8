-- enters puts the waiter $7 at the end of the line of l. A waiter that is there keeps its place.
(waiters, ends) = (
    SELECT array_agg(w.id ORDER BY w.n), array_agg(w.until ORDER BY w.n)
    FROM (
        SELECT w.id, w.until, w.n FROM unnest(l.waiters, l.ends) WITH ORDINALITY AS w (id, until, n)
        WHERE w.id <> $7 AND {present}
        UNION ALL
        SELECT $7, clock_timestamp() + $10::bigint * interval '1 us', coalesce(array_position(l.waiters, $7), 2147483647)
    ) w)
